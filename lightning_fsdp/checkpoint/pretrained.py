"""Models of transformers, from and to the folders that ``from_pretrained`` reads.

    save    whole tensors, one at a time: every rank takes part, rank 0 writes
    load    each rank reads the elements that it keeps, and nothing else

Any module may take the place of a model of transformers; it has no config that could be written.
"""

from __future__ import annotations

import copy
import os
import shutil
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_fsdp.checkpoint import transformers_internals as conventions
from lightning_fsdp.checkpoint.files import naming
from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.checkpoint.safetensors_folder import (
    Outline,
    SafetensorsFolder,
    SafetensorsWriter,
    bytes_of,
)
from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.core.tensors.flat_chunks import Box, FlatChunks
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.base import owner_of
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from lightning_fsdp.engines.native import NativeEngine
from lightning_fsdp.engines.native_state import named_wholes

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
) -> None:
    """Write a folder that ``AutoModel.from_pretrained`` loads. Collective: every rank calls.

    Rank 0 holds one whole parameter at a time. The folder is there when all of it is.

    Args:
        model: Plain, or sharded by :func:`~lightning_fsdp.fully_shard` or torch's FSDP2; or a
            LightningModule around one model of transformers, under any strategy.
        directory: Does not exist yet, or is empty. On rank 0 alone.
        max_shard_size: Of a file's tensors, bytes or ``"5GB"``.
        tokenizer: Saved beside the model (``tokenizer.save_pretrained``).

    Raises:
        FileExistsError: There is something in the directory.
        OSError: It cannot be written.
        ValueError: A model that the format cannot hold, or several to choose from.
        NotImplementedError: Adapters and quantized weights.
    """
    max_bytes = bytes_of(max_shard_size)
    path = Path(directory)
    model, root = _model_in(model), model
    weights = _weights_in(model, root)
    stored, aliases = _layout_of(model, weights)
    ranks = Ranks()
    doing = f"save_pretrained {str(path)!r}"
    beside = path.with_name(f".{path.name}.partial")

    def begin() -> SafetensorsWriter:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(
                "expected a directory that does not exist yet, got one with something in it. "
                "Choose another, or remove it."
            )
        shutil.rmtree(beside, ignore_errors=True)  # of a save that was interrupted
        beside.mkdir(parents=True)
        opened.callback(shutil.rmtree, beside, ignore_errors=True)  # unless it takes its place
        _write_configuration(model, weights, tokenizer, beside)
        outlines = {key: weights[name].outline for key, name in stored.items()}
        return opened.enter_context(
            SafetensorsWriter(beside, outlines, max_bytes=max_bytes, aliases=aliases)
        )

    with ExitStack() as opened:
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
            beside.replace(path)

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
        return _refuse_values(engine.state_dict_of_pieces(model))
    return {name: tensor for name, (tensor, _) in _tensors_in(model, root).items()}


def _tensors_in(model: nn.Module, root: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """The tensors of the state dict, sharded as they are, with the same number where tied.

    Raises:
        TypeError: FSDP1's, which do not say what they are.
        ValueError: A value that is no tensor.
    """
    for name, inner in root.named_modules():
        if isinstance(inner, FullyShardedDataParallel) or _holds_piece(inner):
            raise TypeError(
                f"{name or type(root).__name__}: expected a module that is plain or sharded by "
                "fully_shard, got FullyShardedDataParallel, which hides the elements that a rank "
                "has. Give the whole LightningModule, inside of FSDP1Strategy."
            )
    state = _refuse_values(model.state_dict(keep_vars=True))
    return {name: (tensor, id(tensor)) for name, tensor in state.items()}


def _refuse_values(state: Mapping[str, Any]) -> dict[str, Tensor]:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r}: expected a tensor, got {type(value).__name__}: safetensors files hold "
                "nothing else. Save a checkpoint of the Trainer."
            )
    return dict(state)


def _holds_piece(module: nn.Module) -> bool:
    """Whether FSDP1 has sharded something around this module: its weight is 1-D then."""
    return isinstance(module, nn.Embedding | nn.Linear) and module.weight.dim() != 2


# -- saving ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weight:
    """One name of a state dict.

    Attributes:
        outline: Of the whole.
        identity: The same for the names of one tied tensor.
        whole: Makes it, plain, on any device. Collective.
    """

    outline: Outline
    identity: int
    whole: Callable[[], Tensor]


def _weights_in(model: nn.Module, root: nn.Module) -> dict[str, _Weight]:
    engine = owner_of(root)
    if isinstance(engine, NativeEngine) and not engine.shows_whole_shapes:
        return {
            name: _Weight(Outline(tuple(shape), dtype), identity, whole)
            for name, (shape, dtype, identity, whole) in named_wholes(engine, model).items()
        }
    return {
        name: _Weight(Outline(tuple(tensor.shape), tensor.dtype), identity, partial(_whole, tensor))
        for name, (tensor, identity) in _tensors_in(model, root).items()
    }


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        if isinstance(tensor, DTensor):  # offloaded ones are not where the mesh communicates
            return typing.cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor()
        if isinstance(tensor, ShardedTensor):
            return tensor.full_tensor(rank0_only=True)
        return tensor.detach()


def _layout_of(
    model: nn.Module, weights: Mapping[str, _Weight]
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


def _write_configuration(
    model: Any, weights: Mapping[str, _Weight], tokenizer: Any, path: Path
) -> None:
    if tokenizer is not None:
        with naming("the tokenizer"):
            tokenizer.save_pretrained(path)
    if not conventions.is_pretrained_model(model):
        return
    config = copy.deepcopy(model.config)
    # Sharding gives a module another class; files name the one that it was made of.
    own = (c for c in type(model).__mro__ if not issubclass(c, ShardedModule | FSDPModule))
    config.architectures = [next(own).__name__]
    dtypes = [w.outline.dtype for w in weights.values() if w.outline.dtype.is_floating_point]
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
