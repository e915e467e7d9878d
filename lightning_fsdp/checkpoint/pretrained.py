"""Models of transformers, from and to the folders that ``from_pretrained`` reads.

    save    whole tensors, one at a time: every rank takes part, rank 0 writes
    load    each rank reads the elements that it keeps, and nothing else

Any module may take the place of a model of transformers; it has no config that could be written.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from lightning_fsdp.checkpoint import transformers_internals as conventions
from lightning_fsdp.checkpoint.adapters import merged, own_class
from lightning_fsdp.checkpoint.files import naming
from lightning_fsdp.checkpoint.new_folder import NewFolder
from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.checkpoint.safetensors_folder import (
    Outline,
    SafetensorsFolder,
    SafetensorsWriter,
    bytes_of,
)
from lightning_fsdp.checkpoint.weights import Weight, refuse_values, tensors_in, weights_in
from lightning_fsdp.core.tensors.flat_chunks import Box, FlatChunks
from lightning_fsdp.engines.base import owner_of
from lightning_fsdp.engines.fsdp1 import FSDP1Engine

_MAX_SHOWN = 5  # names of a kind in a message


@dataclass(frozen=True)
class Differences:
    """What :func:`load_pretrained` left out, where it was not strict.

    Attributes:
        missing: Names of the module that keep the values they had.
        unexpected: Names in the files that the module has no place for.
    """

    missing: list[str]
    unexpected: list[str]


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    merge_adapters: bool = False,
) -> None:
    """Write a folder that ``AutoModel.from_pretrained`` loads. Collective: every rank calls.

    Rank 0 holds one whole parameter at a time. The folder is there when all of it is.

    Args:
        model: Plain, or sharded by :func:`~lightning_fsdp.fully_shard` or torch's FSDP2; or a
            LightningModule around one model of transformers, under any strategy.
        directory: Does not exist yet, or is empty. On rank 0 alone.
        max_shard_size: Of a file's tensors, bytes or ``"5GB"``.
        tokenizer: Saved beside the model (``tokenizer.save_pretrained``).
        merge_adapters: Of a model of peft, the model under its adapters, with what they add to its
            weights; rank 0 merges one layer at a time. The model itself stays as it is.

    Raises:
        FileExistsError: There is something in the directory.
        OSError: It cannot be written.
        ValueError: A model that the format cannot hold, or several to choose from.
        NotImplementedError: Adapters that are not merged, and quantized weights.
    """
    max_bytes = bytes_of(max_shard_size)
    path = Path(directory)
    plan = _plan_of_merged(model) if merge_adapters else _plan_of(model)
    weights, stored = plan.weights, plan.stored
    ranks = Ranks()
    doing = f"save_pretrained {str(path)!r}"

    def begin() -> SafetensorsWriter:
        folders.append(opened.enter_context(NewFolder(path)))
        _write_configuration(plan, tokenizer, folders[0].beside)
        outlines = {key: weights[name].outline for key, name in stored.items()}
        return opened.enter_context(
            SafetensorsWriter(
                folders[0].beside, outlines, max_bytes=max_bytes, aliases=plan.aliases
            )
        )

    with ExitStack() as opened:
        folders: list[NewFolder] = []
        writers: list[SafetensorsWriter] = []
        ranks.on_first(doing, lambda: writers.append(begin()))
        groups = ranks.on_first(doing, lambda: writers[0].groups)
        failure: Exception | None = None
        for key in (key for group in groups for key in group):
            whole = weights[stored[key]].whole()  # on every rank, also after a failure
            if writers and failure is None:
                try:
                    writers[0].write(key, whole)
                except Exception as error:  # noqa: BLE001 (the others are on their way)
                    failure = error
            del whole

        def finish() -> None:
            if failure is not None:
                raise failure
            writers[0].finish()
            folders[0].finish()

        ranks.on_first(doing, finish)


def load_pretrained(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: bool = False,
) -> Differences:
    """Take the weights of a folder that transformers wrote. Collective: every rank calls.

    A rank reads the elements that it keeps, from the file to where they belong. Nothing is written
    before all names, shapes and dtypes were compared.

    Args:
        module: As for :func:`save_pretrained`; parameters have memory (they are plain, or sharded).
        directory: With ``model.safetensors``, or an index and the files that it names.
        strict: Every name of the module is in the folder and the other way round; but for those
            that ``from_pretrained`` does not mind.
        cast: Convert where the dtypes differ.

    Returns:
        What was left out, if it was not strict.

    Raises:
        OSError: The directory or a file is not there.
        ValueError: A damaged file; or names, shapes or dtypes that differ. The module is unchanged.
        NotImplementedError: Weights that are stored in another form than the module's.
    """
    model = _model_in(module)
    targets = _targets_in(model, module)
    ranks = Ranks()
    doing = f"load_pretrained {os.fspath(directory)!r}"
    with ExitStack() as stack:

        def compare() -> _Match:
            folder = stack.enter_context(SafetensorsFolder(Path(directory)))
            found = _match(model, targets, folder, cast=cast, strict=strict)
            folders.append(folder)
            return found

        def read() -> None:
            with torch.no_grad():
                for name, key in match.sources:
                    for box, piece in _pieces_of(targets[name]):
                        folders[0].read_into(key, box, piece)

        folders: list[SafetensorsFolder] = []
        match = ranks.on_each(doing, compare)[ranks.rank]
        ranks.on_each(doing, read)
    return match.differences


# -- the module ------------------------------------------------------------------------------------


def _model_in(module: nn.Module) -> nn.Module:
    """The model of transformers that this is or that is inside; or the module, if there is none."""
    names = {
        name: inner
        for name, inner in module.named_modules()
        if conventions.is_pretrained_model(inner)
    }
    outermost = {
        name: inner
        for name, inner in names.items()
        if not any(o != name and (o == "" or name.startswith(f"{o}.")) for o in names)
    }
    if len(outermost) > 1:
        raise ValueError(
            f"{type(module).__name__}: expected one model of transformers inside, got "
            f"{list(outermost)}. Give one of them."
        )
    model = next(iter(outermost.values()), module)
    conventions.refuse_what_is_stored_otherwise(model, module)
    return model


def _targets_in(model: nn.Module, root: nn.Module) -> dict[str, Tensor]:
    """What weights are read into: slices of what is sharded."""
    engine = owner_of(root)
    if isinstance(engine, FSDP1Engine) and engine.parameters:
        return refuse_values(engine.state_dict_of_pieces(model))
    return {name: tensor for name, (tensor, _) in tensors_in(model, root).items()}


# -- saving ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What is written.

    Attributes:
        model: That the folder will be of.
        weights: By names in the module.
        stored: Names in the files -> names in the module.
        aliases: Further names -> names in the files.
        is_untied: Embeddings that the config ties are two.
    """

    model: nn.Module
    weights: Mapping[str, Weight]
    stored: Mapping[str, str]
    aliases: Mapping[str, str]
    is_untied: bool = False


def _plan_of(root: nn.Module) -> _Plan:
    model = _model_in(root)
    weights = weights_in(model, root)
    return _Plan(model, weights, *_layout_of(model, weights))


def _plan_of_merged(root: nn.Module) -> _Plan:
    with merged(root) as found:
        base = _model_in(found.base)
        layout = _layout_of(base, found.weights)
        return _Plan(base, found.weights, *layout, is_untied=found.is_untied)


def _layout_of(
    model: nn.Module, weights: Mapping[str, Weight]
) -> tuple[dict[str, str], dict[str, str]]:
    """Names in the files -> names in the module; and further names -> names in the files.

    Of the names of a tied tensor, that is stored which transformers looks for.
    """
    is_pretrained = conventions.is_pretrained_model(model)
    names = [n for n in weights if not is_pretrained or not conventions.is_left_out(model, n)]
    kept: dict[int, str] = {}
    for name in sorted(
        names, key=lambda n: is_pretrained and conventions.is_copy_of_tied(model, n)
    ):
        kept.setdefault(weights[name].identity, name)
    stored_as = {name: name for name in names}
    if is_pretrained:
        outlines = {name: torch.empty(weights[name].outline.shape, device="meta") for name in names}
        stored_as = conventions.names_in_files(model, outlines)
    stored = {stored_as[n]: n for n in names if kept[weights[n].identity] == n}
    copies = {stored_as[n]: stored_as[kept[weights[n].identity]] for n in names}
    return stored, {copy: key for copy, key in copies.items() if copy != key}


def _write_configuration(plan: _Plan, tokenizer: Any, path: Path) -> None:
    if tokenizer is not None:
        with naming("the tokenizer"):
            tokenizer.save_pretrained(path)
    model: Any = plan.model
    if not conventions.is_pretrained_model(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [own_class(model).__name__]
    if plan.is_untied:
        config.tie_word_embeddings = False
    dtypes = [w.outline.dtype for w in plan.weights.values() if w.outline.dtype.is_floating_point]
    if dtypes:
        config.dtype = str(dtypes[0]).removeprefix("torch.")
    with naming("config.json"):
        config.save_pretrained(path)
    if model.can_generate() and model.generation_config is not None:
        with naming("generation_config.json"):
            model.generation_config.save_pretrained(path)


# -- loading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Match:
    """What goes where.

    Attributes:
        sources: Names in the module, and in the files; each tensor of the module once.
        differences: What was left out.
    """

    sources: list[tuple[str, str]]
    differences: Differences


def _match(
    model: nn.Module,
    targets: Mapping[str, Tensor],
    folder: SafetensorsFolder,
    *,
    strict: bool,
    cast: bool,
) -> _Match:
    """Compare names, shapes and dtypes.

    Raises:
        ValueError: They differ; all differences are named.
    """
    is_pretrained = conventions.is_pretrained_model(model)
    name_of = {key: key for key in folder.outlines}
    if is_pretrained:
        name_of = conventions.names_in_module(model, list(folder.outlines), targets)
    keys_of: dict[int, list[tuple[str, str]]] = {}  # per tensor of the module
    for key, name in name_of.items():
        if name in targets:
            keys_of.setdefault(id(targets[name]), []).append((name, key))
    missing = [
        name
        for name, tensor in targets.items()
        if id(tensor) not in keys_of
        and not (is_pretrained and conventions.may_be_missing(model, name))
    ]
    unexpected = [
        key
        for key, name in name_of.items()
        if name not in targets and not (is_pretrained and conventions.may_be_left_over(model, name))
    ]
    problems: dict[str, list[str]] = {}
    if strict:
        problems |= {"missing in the files": missing, "without a place in the module": unexpected}
    for found in keys_of.values():
        for name, key in found:
            target, outline = targets[name], folder.outlines[key]
            if target.is_meta:
                problems.setdefault("on the meta device in the module", []).append(name)
            elif tuple(target.shape) != outline.shape:
                shapes = f"{name}: {outline.shape} in the files, {tuple(target.shape)} here"
                problems.setdefault("of another shape", []).append(shapes)
            elif target.dtype != outline.dtype and not cast:
                dtypes = f"{name}: {outline.dtype} in the files, {target.dtype} here"
                problems.setdefault("of another dtype", []).append(dtypes)
    _raise(problems)
    for (_, first), *others in keys_of.values():
        for name, key in others:
            if not _are_equal(targets[name], folder, first, key):
                problems.setdefault("one weight here, two with other values there", []).append(
                    f"{first} and {key}"
                )
    _raise(problems)
    return _Match([found[0] for found in keys_of.values()], Differences(missing, unexpected))


def _raise(problems: Mapping[str, list[str]]) -> None:
    parts = [
        f"{what}: {', '.join(names[:_MAX_SHOWN])}"
        + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
        for what, names in problems.items()
        if names
    ]
    if not parts:
        return
    cures = {
        "missing": "strict=False leaves out what only one side has",
        "without": "strict=False leaves out what only one side has",
        "of another dtype": "cast=True converts",
        "of another shape": "the folder belongs to a model with another config",
        "on the meta": "load after sharding, which computes initial values",
        "one weight": "build the model without the tie (tie_word_embeddings=False)",
    }
    found = [cure for start, cure in cures.items() if any(p.startswith(start) for p in parts)]
    raise ValueError(
        f"expected the weights of the module, got {'; '.join(parts)} "
        f"({'; '.join(dict.fromkeys(found))})."
    )


def _are_equal(target: Tensor, folder: SafetensorsFolder, first: str, second: str) -> bool:
    """Whether two stored tensors have the same values where this rank keeps them."""
    for box, piece in _pieces_of(target):
        one, other = torch.empty_like(piece), torch.empty_like(piece)
        folder.read_into(first, box, one)
        folder.read_into(second, box, other)
        if not torch.equal(one, other):
            return False
    return True


def _pieces_of(tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The parts of a tensor that this rank holds, each a view of the memory that holds it."""
    if not isinstance(tensor, DTensor | FlatChunks):
        yield Outline(tuple(tensor.shape), tensor.dtype).box, tensor.detach()
        return
    sharded: Any = tensor
    for chunk in sharded.__create_chunk_list__():
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if 0 not in box.sizes:
            piece = sharded.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
            yield box, piece.detach()
