"""What is in a checkpoint of any form, by name, tensors unread.

==============  ==============================================  ==================================
form            is                                              tensors are read
==============  ==============================================  ==================================
full            one file of the Trainer                         where they lie in the mapped file
sharded         a folder of ``lightning_fsdp.checkpoint.folder``  some at a time, into memory
safetensors     a folder of transformers, weights alone         where they lie in the mapped files
==============  ==============================================  ==================================

All have the names of the sharded form: ``model.<name>``, ``optimizer.<i>.<name>.<key>``.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.checkpoint import folder
from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.checkpoint.safetensors_folder import Outline, SafetensorsFolder, is_folder
from lightning_fsdp.checkpoint.state import PREFIXES, TENSORS_OF, by_name, is_slot
from lightning_fsdp.core.optimizers.optimizer_classes import SCALARS

FORMS = ("full", "sharded", "safetensors")
LEFT_OUT = "parameters_left_out"
"""Key of a checkpoint: by name, the shapes of the parameters that it does not hold."""

NAMES = "optimizer_parameter_names"
"""Key of a full checkpoint: of each optimizer, the names of the parameters of each group."""


@dataclass(frozen=True)
class Contents:
    """A checkpoint that is open.

    Attributes:
        form: One of ``FORMS``.
        outlines: Of all tensors.
        state_dicts: Of the module, ``"state_dict"``, and others with its names (an average of
            weights): by name ``{"tensor": name in outlines}`` or ``{"value": any}``; tied
            parameters are one tensor.
        optimizers: Per optimizer, by parameter name: ``slices`` (dtypes of the tensors there are),
            ``state`` (the rest), ``param_groups`` (with names); ``None`` where there is nothing.
        extra: Everything else.
        missing: What is in the checkpoint and not in here, for the user to read.
        read: Tensors, in the order that was asked for.
    """

    form: str
    outlines: dict[str, Outline]
    state_dicts: dict[str, dict[str, dict[str, Any]]]
    read: Callable[[Sequence[str]], Iterator[Tensor]]
    optimizers: list[dict[str, Any]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Of the module."""
        return self.state_dicts["state_dict"]


def open_checkpoint(path: Path, stack: ExitStack, prefix: str = "") -> Contents:
    """Look into a checkpoint; runs no code from it.

    Args:
        path: A file or folder.
        stack: Closes what is opened.
        prefix: What names in safetensors get in front of them.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: It is no checkpoint, or a damaged one.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a checkpoint, got nothing there.")
    if path.is_file():
        return _open_full(path)
    if is_folder(path):
        return _open_safetensors(stack.enter_context(SafetensorsFolder(path)), prefix)
    return _open_sharded(path)


# -- full ------------------------------------------------------------------------------------------


def _open_full(path: Path) -> Contents:
    try:
        file = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        _check_sums(path)
    except Exception as error:  # a damaged file is an error of many kinds
        raise ValueError(
            f"{path}: expected a file that torch.load(weights_only=True) reads, got another or a "
            f"damaged one ({folder.cause_of(error)}). What would run code is not read: save the "
            "file again without it."
        ) from error
    state = file.get("state_dict") if isinstance(file, dict) else None
    if not isinstance(state, dict):
        found = list(file)[:5] if isinstance(file, dict) else type(file).__name__
        raise ValueError(
            f"{path}: expected a checkpoint of the Trainer, with 'state_dict' in it, got {found}."
        )
    tensors: dict[str, Tensor] = {}
    state_dicts = {
        part: _open_state_dict(PREFIXES.get(part, part), entries, tensors)
        for part, entries in file.items()
        if isinstance(entries, dict) and set(entries) == set(state)
    }
    optimizers, missing = _open_optimizers(path, file, tensors)
    not_extra = {*state_dicts, "optimizer_states", NAMES}
    extra = {k: v for k, v in file.items() if k not in not_extra}
    outlines = {key: Outline(tuple(t.shape), t.dtype) for key, t in tensors.items()}
    return Contents(
        "full",
        outlines,
        state_dicts,
        lambda keys: (tensors[key] for key in keys),
        optimizers,
        extra,
        missing,
    )


def _check_sums(path: Path) -> None:
    """See that a file is what was written: torch writes a CRC-32 of each tensor and reads none.

    Otherwise what is converted would get a sum that says it is right.
    """
    with zipfile.ZipFile(path) as archive:
        changed = archive.testzip()
    if changed is not None:
        raise ValueError(f"checksum of {changed!r}: its content has changed since it was saved")


def _open_state_dict(
    prefix: str, state: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """One state dict; its tensors are added to ``tensors``."""
    entries: dict[str, dict[str, Any]] = {}
    stored_as: dict[Any, str] = {}
    for name, value in state.items():
        if is_slot(name, value):
            key = stored_as.setdefault(_identity(value, name), f"{prefix}.{name}")
            tensors[key] = value
            entries[name] = {"tensor": key}
        else:
            entries[name] = {"value": value}
    return entries


def _identity(tensor: Tensor, name: str) -> Any:
    """The same for tied parameters."""
    if tensor.numel() == 0:
        return name
    view = tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, *view


def _open_optimizers(
    path: Path, file: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Optimizer states with names for numbers; their tensors are added to ``tensors``."""
    states = file.get("optimizer_states")
    if states is None:
        return None, []
    names_of = file.get(NAMES) or [_names_by_torch(state) for state in states]
    if any(names is None or any("" in group for group in names) for names in names_of):
        reason = (
            "optimizer state: the file has numbers where a sharded checkpoint has names. Files "
            "that the strategies of lightning_fsdp write have both"
        )
        return None, [reason]
    _check_names(path, states, names_of)

    def dtype_of(index: int, name: str, key: str, value: Any) -> torch.dtype | None:
        shape = getattr(file["state_dict"].get(name), "shape", None)
        if not isinstance(value, Tensor) or key in SCALARS or value.shape != shape:
            return None
        tensors[f"optimizer.{index}.{name}.{key}"] = value
        return value.dtype

    named = [
        # Without state: what Lightning puts where there is no optimizer.
        by_name(state, names, partial(dtype_of, index)) if "state" in state else dict(state)
        for index, (state, names) in enumerate(zip(states, names_of, strict=True))
    ]
    return named, []


def _check_names(
    path: Path, states: Sequence[Mapping[str, Any]], names_of: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Refuse names that are not one for each parameter, which would be given another's state."""
    expected = [[len(g["params"]) for g in state.get("param_groups", ())] for state in states]
    got = [
        [len({*group}.difference(*groups[:place])) for place, group in enumerate(groups)]
        for groups in names_of
    ]
    if got != expected:
        raise ValueError(
            f"{path}: expected a name for each parameter in {NAMES!r}, by optimizer and group "
            f"{expected}, got {got} different ones. Correct them, or take {NAMES!r} out of the "
            "file to convert it without optimizer state."
        )


def _names_by_torch(state: Mapping[str, Any]) -> list[list[str]] | None:
    """What torch notes where an optimizer was built over named parameters."""
    groups = state.get("param_groups", ())
    if not all("param_names" in group for group in groups):
        return None
    return [list(group["param_names"]) for group in groups]


# -- safetensors -----------------------------------------------------------------------------------


def _open_safetensors(opened: SafetensorsFolder, prefix: str) -> Contents:
    names = {name: name for name in opened.outlines} | opened.aliases
    named = {f"{prefix}{n}": {"tensor": f"model.{prefix}{of}"} for n, of in names.items()}
    in_file = {f"model.{prefix}{name}": name for name in opened.outlines}
    return Contents(
        "safetensors",
        {key: opened.outlines[name] for key, name in in_file.items()},
        {"state_dict": named},
        lambda keys: (opened.mapped(in_file[key]) for key in keys),
    )


# -- sharded ---------------------------------------------------------------------------------------


def _open_sharded(path: Path) -> Contents:
    try:
        opened = folder.OpenCheckpoint(path)
        extra, shapes = opened.extra(), opened.shapes()
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"{path}: expected a sharded checkpoint, or safetensors, got a folder without, or a "
            f"damaged one ({error})."
        ) from error
    if TENSORS_OF not in extra:
        raise ValueError(
            f"{path}: expected a checkpoint of a Trainer, or one of save_sharded, got tensors that "
            "belong to no state dict. Load them with lightning_fsdp.checkpoint.load."
        )
    outlines = {key: Outline(tuple(shape), dtype) for key, (shape, dtype) in shapes.items()}
    state_dicts = {
        part: {name: {"tensor": key} for name, key in names.items()}
        | {name: {"value": value} for name, value in extra.pop(part).items()}
        for part, names in extra.pop(TENSORS_OF).items()
    }

    def read(keys: Sequence[str]) -> Iterator[Tensor]:
        tensors = {
            key: torch.empty(outlines[key].shape, dtype=outlines[key].dtype, device="cpu")
            for key in keys
        }
        if tensors:
            try:
                opened.read(tensors, partial=True)
            except DamagedCheckpoint as error:
                raise ValueError(str(error)) from error
        while tensors:
            yield tensors.pop(next(iter(tensors)))

    return Contents(
        "sharded",
        outlines,
        state_dicts,
        read,
        extra.pop("optimizer_states", None),
        extra,
    )
