"""Checkpoints from one form into another, in one process.

==============  ==========================================================  =====================
to              holds                                                       in memory at a time
==============  ==========================================================  =====================
full            everything                                                  one tensor
sharded         everything; optimizer state if its names are known          one tensor
safetensors     the weights                                                 one tensor; one file,
                                                                            if from shards
==============  ==========================================================  =====================

What cannot be held is told. The new checkpoint is there when all of it is, and never replaces one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fsdp.checkpoint import folder, torch_internals
from lightning_fsdp.checkpoint.contents import FORMS, LEFT_OUT, NAMES, Contents, open_checkpoint
from lightning_fsdp.checkpoint.files import write_for_torch
from lightning_fsdp.checkpoint.new_folder import NewFolder
from lightning_fsdp.checkpoint.safetensors_folder import Outline, SafetensorsWriter, bytes_of
from lightning_fsdp.checkpoint.state import TENSORS_OF, by_place
from lightning_fsdp.libc import return_unused_memory

# What transformers keeps beside weights.
_MODEL_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "*.model", "chat_template*")

Progress = Callable[[int], None]


def _ignore(_num_bytes: int) -> None:
    return


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    prefix: str = "",
    config: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    on_total: Progress = _ignore,
    on_bytes: Progress = _ignore,
) -> list[str]:
    """Write a checkpoint in another form. Needs neither a process group nor an accelerator.

    Args:
        source: A file of the Trainer, a sharded folder, or a folder of safetensors.
        target: Where nothing is yet.
        to: ``"full"``, ``"sharded"`` or ``"safetensors"``.
        prefix: Of names in the Trainer's checkpoint, which names in safetensors do without.
        config: A folder of transformers: configuration and tokenizer are copied from it.
        max_shard_size: Of a safetensors file.
        on_total: Told once how many bytes of tensors there are.
        on_bytes: Told of each tensor, when it is written, or where it is handed over to be written.

    Returns:
        What the new checkpoint does not hold, in words.

    Raises:
        OSError: There is nothing at ``source``, or something at ``target``.
        ValueError: ``source`` is no checkpoint, or a damaged one, or has that form already.
        NotImplementedError: To safetensors, weights of a model with adapters (peft), or without
            its base (``checkpoint_base=False``).
    """
    source, target = Path(source), Path(target)
    max_bytes = bytes_of(max_shard_size)
    if to not in FORMS:
        raise ValueError(f"to: expected one of {', '.join(FORMS)}, got {to!r}.")
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target}: expected nothing there yet. Choose another name.")
    if config is not None and not (Path(config) / "config.json").is_file():
        raise FileNotFoundError(f"{config}: expected a folder with config.json.")
    if config is not None and to != "safetensors":
        raise ValueError(f"config: expected safetensors to be written, got {to!r}. Leave it out.")
    if prefix and not prefix.endswith("."):
        raise ValueError(f"prefix: expected names up to a dot, got {prefix!r}. Add the dot.")
    with ExitStack() as stack:
        contents = open_checkpoint(source, stack, prefix)
        if contents.form == to:
            raise ValueError(f"{source}: is {to} already. Copy it.")
        if prefix and "safetensors" not in (contents.form, to):
            raise ValueError("prefix: expected from or to safetensors. Names stay: leave it out.")
        on_total(sum(outline.nbytes for outline in contents.outlines.values()))
        target.parent.mkdir(parents=True, exist_ok=True)
        if to == "safetensors":
            left_out = _write_safetensors(contents, target, prefix, config, max_bytes, on_bytes)
        else:
            if contents.form == "safetensors":
                contents.extra.update(_begun_by_lightning())
            write = _write_full if to == "full" else _write_sharded
            write(contents, target, on_bytes)
            left_out = [*contents.missing]
    return left_out


def _begun_by_lightning() -> dict[str, Any]:
    """What a Trainer asks of any checkpoint."""
    import lightning

    version = lightning.__version__
    return {"pytorch-lightning_version": version, "epoch": 0, "global_step": 0}


# -- to full ---------------------------------------------------------------------------------------


class _ReadWhenWritten:
    """Stands for a tensor of a checkpoint in what ``torch.save`` is given."""

    def __init__(self, contents: Contents, key: str, on_bytes: Progress) -> None:
        self._contents, self._key, self._on_bytes = contents, key, on_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        outline = self._contents.outlines[self._key]
        return torch_internals.reduce_and_make_later(outline.shape, outline.dtype, self._read)

    def _read(self) -> Tensor:
        (tensor,) = self._contents.read([self._key])
        self._on_bytes(tensor.nbytes)
        return_unused_memory(tensor.nbytes, all_of_it=True)  # of those before
        return tensor


def _write_full(contents: Contents, target: Path, on_bytes: Progress) -> None:
    tensors = {key: _ReadWhenWritten(contents, key, on_bytes) for key in contents.outlines}
    file = dict(contents.extra)
    for part, state in contents.state_dicts.items():
        file[part] = {
            name: tensors[entry["tensor"]] if "tensor" in entry else entry["value"]
            for name, entry in state.items()
        }
    if contents.optimizers is not None:
        packed = [_by_number(i, state, tensors) for i, state in enumerate(contents.optimizers)]
        file["optimizer_states"] = packed
        file[NAMES] = [
            [group["params"] for group in state.get("param_groups", ())]
            for state in contents.optimizers
        ]
    write_for_torch(target, file)


def _by_number(
    index: int, state: dict[str, Any], tensors: Mapping[str, _ReadWhenWritten]
) -> dict[str, Any]:
    """As ``optimizer.state_dict()`` has it."""
    if "slices" not in state:
        return state
    entries: dict[str, Any] = {name: dict(others) for name, others in state["state"].items()}
    for name, keys in state["slices"].items():
        read = {key: tensors[f"optimizer.{index}.{name}.{key}"] for key in keys}
        entries[name] = {**entries.get(name, {}), **read}
    return by_place([group["params"] for group in state["param_groups"]], entries, state)


# -- to sharded ------------------------------------------------------------------------------------


def _write_sharded(contents: Contents, target: Path, on_bytes: Progress) -> None:
    extra = dict(contents.extra)
    extra[TENSORS_OF] = {}
    for part, state in contents.state_dicts.items():
        extra[part] = {name: e["value"] for name, e in state.items() if "value" in e}
        extra[TENSORS_OF][part] = {name: e["tensor"] for name, e in state.items() if "tensor" in e}
    if contents.optimizers is not None:
        extra["optimizer_states"] = contents.optimizers
    keys = list(contents.outlines)
    tensors = {}
    for key, tensor in zip(keys, contents.read(keys), strict=True):  # mapped, not read
        tensors[key] = tensor
        on_bytes(tensor.nbytes)
    folder.save(target, tensors, extra)


# -- to safetensors --------------------------------------------------------------------------------


def _write_safetensors(
    contents: Contents,
    target: Path,
    prefix: str,
    config: str | os.PathLike[str] | None,
    max_bytes: int,
    on_bytes: Progress,
) -> list[str]:
    names = [n for n, e in contents.state_dict.items() if "tensor" in e and n.startswith(prefix)]
    if not names:
        first = list(contents.state_dict)[:3]
        raise ValueError(f"prefix: expected the beginning of names as {first}, got {prefix!r}.")
    left_out = next((n for n in contents.extra.get(LEFT_OUT, ()) if n.startswith(prefix)), None)
    if left_out is not None:
        raise NotImplementedError(
            f"{left_out}: expected all weights of a model, got a checkpoint without this one, of a "
            "run with checkpoint_base=False. Load it into the model over its base, and use "
            "save_pretrained, or save_adapters."
        )
    adapted = next((name for name in names if "base_layer" in name.split(".")), None)
    if adapted is not None:
        raise NotImplementedError(
            f"{adapted}: expected the names of a model, got one that peft gave to a weight under "
            "an adapter, which from_pretrained would not know. Load the checkpoint into the "
            "adapted model, merge the adapters (merge_and_unload) and use save_pretrained."
        )
    key_of: dict[str, str] = {}  # tensors under the first of their names
    aliases: dict[str, str] = {}
    name_of: dict[str, str] = {}
    for name in names:
        key, stored = contents.state_dict[name]["tensor"], name.removeprefix(prefix)
        if key in name_of:
            aliases[stored] = name_of[key]
        else:
            name_of[key], key_of[stored] = stored, key
    outlines = {name: contents.outlines[key] for name, key in key_of.items()}
    with NewFolder(target) as new:
        beside = new.beside
        with SafetensorsWriter(beside, outlines, max_bytes=max_bytes, aliases=aliases) as writer:
            for group in writer.groups:
                tensors = contents.read([key_of[name] for name in group])
                for name, tensor in zip(group, tensors, strict=True):
                    writer.write(name, tensor)
                    on_bytes(outlines[name].nbytes)
                del tensor  # before the next file is read
            writer.finish()
        for pattern in (*_MODEL_FILES, *_TOKENIZER_FILES) if config is not None else ():
            for file in Path(str(config)).glob(pattern):
                shutil.copy(file, beside)
        _say_dtype(beside / "config.json", outlines.values())
        new.finish()
    return _left_out(contents, prefix, has_config=config is not None)


def _left_out(contents: Contents, prefix: str, *, has_config: bool) -> list[str]:
    state, alone = contents.state_dict, "safetensors hold weights alone"
    left_out = [
        (["optimizer state"] * bool(contents.optimizers or contents.missing), alone),
        ([*contents.extra, *(p for p in contents.state_dicts if p != "state_dict")], alone),
        ([n for n, e in state.items() if "tensor" not in e], "no tensors"),
        ([n for n in state if not n.startswith(prefix)], f"not below {prefix!r}"),
    ]
    told = [f"{', '.join(map(str, names))}: {why}" for names, why in left_out if names]
    if not has_config:
        told.append("config.json, which from_pretrained needs: --config FOLDER copies one")
    return told


def _say_dtype(config: Path, outlines: Iterable[Outline]) -> None:
    """Let a config name the dtype of the weights: to its own, transformers would round them."""
    dtypes = [outline.dtype for outline in outlines if outline.dtype.is_floating_point]
    if not config.exists() or not dtypes:
        return
    settings: dict[str, Any] = json.loads(config.read_text())
    for key in {"dtype", "torch_dtype"} & settings.keys():  # of this transformers, or an older one
        settings[key] = str(dtypes[0]).removeprefix("torch.")
    config.write_text(json.dumps(settings, indent=2) + "\n")
