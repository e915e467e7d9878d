"""Stored tensors, matched with what each rank keeps of a module and read into it.

compare    names, shapes and dtypes, on every rank; all differences are in one error
read       each rank the elements that it keeps, from the file to where they belong
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor

from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.checkpoint.safetensors_folder import SafetensorsFolder
from lightning_fsdp.checkpoint.weights import refuse_values, tensors_in
from lightning_fsdp.core.tensors.flat_chunks import FlatChunks, box_of, note_writing
from lightning_fsdp.engines.base import owner_of
from lightning_fsdp.engines.fsdp1 import FSDP1Engine

_MAX_SHOWN = 5  # names of a kind in a message


@dataclass(frozen=True)
class Differences:
    """What :func:`~lightning_fsdp.load_pretrained` left out, where it was not strict.

    Attributes:
        missing: Names of the module that keep the values they had.
        unexpected: Names in the files that the module has no place for.
    """

    missing: list[str]
    unexpected: list[str]


@dataclass(frozen=True)
class Names:
    """What names in files mean.

    Attributes:
        in_module: By the name in the files; also where the module has none such.
        may_be_missing: Names in the module that need not be in the files.
        may_be_left_over: Names in the module's terms that need no place there.
        cures: What to do about a kind of difference, by how the kind begins, if not the usual.
    """

    in_module: Mapping[str, str]
    may_be_missing: Collection[str] = ()
    may_be_left_over: Collection[str] = ()
    cures: Mapping[str, str] = field(default_factory=dict)


def targets_in(model: nn.Module, root: nn.Module) -> dict[str, Tensor]:
    """What weights are read into: slices of what is sharded.

    Args:
        model: It, or a part of it.
        root: The module that was sharded.
    """
    engine = owner_of(root)
    if isinstance(engine, FSDP1Engine) and engine.parameters:
        return refuse_values(engine.state_dict_of_pieces(model))
    return tensors_in(model, root)


def read_matching(
    doing: str,
    targets: Mapping[str, Tensor],
    open_folder: Callable[[], SafetensorsFolder],
    names_of: Callable[[Collection[str]], Names],
    *,
    cast: bool,
    strict: bool = True,
) -> Differences:
    """Compare a folder with a module, then read it. Collective: every rank calls.

    Args:
        doing: What this is about, the first words of an error.
        targets: By names in the module; tied ones are one object.
        open_folder: On each rank; what it raises is an error on all of them.
        names_of: Of the names in the files.
        cast: Convert where the dtypes differ.
        strict: All names have to match.

    Raises:
        ValueError: Names, shapes or dtypes differ; all differences are named. The module is
            unchanged.
    """
    ranks = Ranks()
    with ExitStack() as stack:

        def compare() -> tuple[SafetensorsFolder, list[tuple[str, str]], Differences]:
            folder = stack.enter_context(open_folder())
            names = names_of(list(folder.outlines))
            return folder, *_match(targets, folder, names, strict=strict, cast=cast)

        def read() -> None:
            with torch.no_grad():
                for name, key in sources:
                    for box, piece in _pieces_of(targets[name]):
                        folder.read_into(key, box, piece)
            note_writing(targets.values())

        folder, sources, differences = ranks.here(doing, compare)
        ranks.on_each(doing, read)
    return differences


def _match(
    targets: Mapping[str, Tensor],
    folder: SafetensorsFolder,
    names: Names,
    *,
    strict: bool,
    cast: bool,
) -> tuple[list[tuple[str, str]], Differences]:
    """Compare names, shapes and dtypes.

    Returns:
        Names in the module, and in the files, each tensor of the module once; what was left out.

    Raises:
        ValueError: They differ; all differences are named.
    """
    keys_of: dict[int, list[tuple[str, str]]] = {}  # per tensor of the module
    for key, name in names.in_module.items():
        if name in targets:
            keys_of.setdefault(id(targets[name]), []).append((name, key))
    missing = [
        name
        for name, tensor in targets.items()
        if id(tensor) not in keys_of and name not in names.may_be_missing
    ]
    unexpected = [
        key
        for key, name in names.in_module.items()
        if name not in targets and name not in names.may_be_left_over
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
    _raise(problems, {**_CURES, **names.cures})
    for (_, first), *others in keys_of.values():
        for name, key in others:
            if not _are_equal(targets[name], folder, first, key):
                problems.setdefault("one weight here, two with other values there", []).append(
                    f"{first} and {key}"
                )
    _raise(problems, {**_CURES, **names.cures})
    return [found[0] for found in keys_of.values()], Differences(missing, unexpected)


_CURES = {
    "missing": "strict=False leaves out what only one side has",
    "without": "strict=False leaves out what only one side has",
    "of another dtype": "cast=True converts",
    "of another shape": "the folder belongs to a model with another config",
    "on the meta": "load after sharding, which computes initial values",
    "one weight": "build the model without the tie (tie_word_embeddings=False)",
}


def _raise(problems: Mapping[str, list[str]], cures: Mapping[str, str]) -> None:
    parts = [
        f"{what}: {', '.join(names[:_MAX_SHOWN])}"
        + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
        for what, names in problems.items()
        if names
    ]
    if not parts:
        return
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


def _pieces_of(tensor: Tensor) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
    """The parts of a tensor that this rank holds, each a view of the memory that holds it."""
    if not isinstance(tensor, DTensor | FlatChunks):
        yield box_of((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()
        return
    sharded: Any = tensor
    for box in sharded.__create_chunk_list__():
        if 0 not in box.sizes:
            piece = sharded.__get_tensor_shard__(MetadataIndex("", box.offsets))
            yield box, piece.detach()
