"""Tensors in and out of a folder, in torch.distributed.checkpoint's own format.

Torch plans who writes and reads what (its planners; DTensor and every tensor with its protocol take
part) and packs each slice as ``torch.save`` does, one after another in a file per rank. Here are
the ends: files that are summed up while they are written, slices read without the rest of what a
rank had written, and metadata read without running code.

Nothing but tensors is in these files. ``.metadata`` is a pickle: it is read with a list of the few
names that may be in it. The tensors are pickled too, in their zip archive, and are not unpickled at
all: their shape and dtype are in the metadata, their elements are read as they lie.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import EnumType
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
)
from torch.utils import serialization
from typing_extensions import override

from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.checkpoint.files import (
    RESTORE,
    Sum,
    SummedFile,
    naming,
    read_listed,
    write_file,
)
from lightning_fsdp.checkpoint.torch_internals import METADATA_NAMES, StorageInfo

METADATA = ".metadata"
Where = dict[MetadataIndex, StorageInfo]
_MAX_SHOWN = 5  # names in a message


class SlicePlanner(DefaultSavePlanner):
    """Plans a save; the slices of this rank may be copied to the host first.

    Slices are written contiguous, so that a part of one can be found in a file.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        _check_values(state)
        self.set_up_planner(dict(state))
        self._copies: dict[MetadataIndex, Tensor] | None = None

    def copy_to_host(self, plan: SavePlan) -> None:
        """From now on the state may change: what this rank writes is what it is now."""
        self._copies = {i.index: self._slice(i).to("cpu", copy=True) for i in plan.items}
        self.state_dict = {}

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self._copies is None:
            return self._slice(write_item)
        return self._copies.pop(write_item.index)  # freed once it is written

    def _slice(self, item: WriteItem) -> Tensor:
        data: Tensor = self.lookup_object(item.index)
        return data.detach().resolve_conj().resolve_neg().contiguous()


def write_slices(path: Path, plan: SavePlan, planner: SlicePlanner) -> tuple[Where, Sum]:
    """Write what the plan gives to this rank, holding one slice on the host at a time.

    Torch's own writer keeps all of them until the file is closed.

    Returns:
        Where in the file each slice lies, and the sum of the file.
    """
    where: Where = {}
    with naming(path.name), SummedFile(path) as file:
        for item in plan.items:
            data = planner.resolve_data(item).cpu()
            if data.untyped_storage().nbytes() != data.nbytes:
                data = data.clone()  # torch.save writes whole storages
            offset = file.sum.num_bytes
            # Torch would sum up every tensor once more, at half the speed, and nobody looks at it.
            with serialization.config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                torch.save(data, cast(BinaryIO, file))
            where[item.index] = StorageInfo(path.name, offset, file.sum.num_bytes - offset)
            del data  # before the next one is made
    return where, file.sum


def write_metadata(folder: Path, metadata: Metadata, where: Where) -> Sum:
    """Say what tensors there are and where each slice lies, as torch does."""
    whole = replace(metadata, storage_data=where, version=CURRENT_DCP_VERSION)
    return write_file(folder / METADATA, pickle.dumps(whole))


class SliceReader:
    """Reads what this module wrote: of each slice only the stretch that is asked for.

    Torch's own reader unpickles every slice that is touched, whole.

    Attributes:
        metadata: What tensors there are and where each slice lies; checked.
    """

    def __init__(self, folder: Path, sums: Mapping[str, Sum]) -> None:
        self._folder = folder
        path = folder / METADATA
        data = read_listed(folder, METADATA, sums)
        try:
            self.metadata: Metadata = _MetadataUnpickler(io.BytesIO(data)).load()
            self._tensors = _checked(self.metadata, sums)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{path}: {error}") from error
        except Exception as error:  # a pickle of anything may fail in any way
            raise DamagedCheckpoint(
                f"{path}: expected where each tensor lies, got something else ({error}). {RESTORE}"
            ) from error

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Of every tensor."""
        return {name: (md.size, md.properties.dtype) for name, md in self._tensors.items()}

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fill the tensors that were planned for."""
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            in_file = self.metadata.storage_data[item.storage_index].relative_path
            items.setdefault(in_file, []).append(item)
        for name, of_file in items.items():
            path = self._folder / name
            with path.open("rb") as file:
                for item in of_file:
                    target = planner.resolve_tensor(item).detach()
                    if target.numel() > 0:
                        self._read(path, file, item, target)

    def _read(self, path: Path, file: BinaryIO, item: ReadItem, target: Tensor) -> None:
        """Fill ``target`` with a box: one read, from its first element to its last."""
        index = item.storage_index
        stored = self._tensors[index.fqn]
        dtype = stored.properties.dtype
        sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
        strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        ends = [o + n - 1 for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
        first = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
        last = sum(o * s for o, s in zip(ends, strides, strict=True))

        info = self.metadata.storage_data[index]
        window = _Window(file, info.offset, info.length)
        start = _start_of_elements(window, math.prod(sizes) * dtype.itemsize)
        # Where the box lies in one piece on both sides, without a copy in between.
        is_one_piece = last - first + 1 == target.numel() and target.is_contiguous()
        is_direct = is_one_piece and target.is_cpu and target.dtype == dtype
        stretch = (
            target.view(-1)
            if is_direct
            else torch.empty(last - first + 1, dtype=dtype, device="cpu")
        )
        window.seek(start + first * dtype.itemsize)
        if window.readinto(stretch.view(torch.uint8).numpy().data) != stretch.nbytes:
            raise DamagedCheckpoint(f"{path}: expected more bytes. {RESTORE}")
        if not is_direct:
            target.copy_(stretch.as_strided(tuple(item.lengths), strides))


def plan_load(
    reader: SliceReader, state: Mapping[str, Any], *, partial: bool, cast: bool
) -> Callable[[], None]:
    """Compare the state with the checkpoint; what this returns reads this rank's slices.

    Raises:
        ValueError: A name or shape differs; a dtype, unless ``cast``.
        TypeError: A value is no tensor.
    """
    _check_values(state)
    _check_same(reader.shapes(), state, partial=partial, cast=cast)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), reader.metadata)
    return functools.partial(reader.read, planner.create_local_plan(), planner)


def _check_values(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"expected a tensor for {name!r}, got {type(value).__name__}. Put what is no "
                "tensor into `extra`."
            )
        if value.is_meta or value.layout != torch.strided:
            raise TypeError(
                f"expected a dense tensor with values for {name!r}, got one on {value.device} of "
                f"layout {value.layout}. Materialize the module first."
            )


def _check_same(
    stored: Mapping[str, tuple[torch.Size, torch.dtype]],
    state: Mapping[str, Tensor],
    *,
    partial: bool,
    cast: bool,
) -> None:
    differences = [f"{n!r} is not in the checkpoint" for n in state if n not in stored]
    if not partial:
        differences += [f"{n!r} is only in the checkpoint" for n in stored if n not in state]
    for name in state.keys() & stored.keys():
        ours, (shape, dtype) = state[name], stored[name]
        if ours.size() != shape:
            differences.append(
                f"{name!r} has the shape {tuple(ours.size())} here and {tuple(shape)} in the "
                "checkpoint"
            )
        elif ours.dtype != dtype and not cast:
            differences.append(f"{name!r} is {ours.dtype} here and {dtype} in the checkpoint")
    if differences:
        shown = "; ".join(sorted(differences)[:_MAX_SHOWN])
        more = f"; and {n} more" if (n := len(differences) - _MAX_SHOWN) > 0 else ""
        raise ValueError(
            f"expected the tensors that the checkpoint holds, got others: {shown}{more}. Nothing "
            "was loaded. Build the model and optimizer that were saved."
        )


class _MetadataUnpickler(pickle.Unpickler):
    """Looks up nothing but what torch's metadata is made of, none of which does anything."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 pickles a member
            return _member_of_enum
        if name not in METADATA_NAMES.get(module, ()):
            raise _asks_for(f"{module}.{name}")
        return super().find_class(module, name)


def _member_of_enum(kind: Any, name: Any) -> Any:
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise _asks_for(f"{name!r} of {kind!r}")


def _asks_for(what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"expected only torch's metadata, got a pickle that asks for {what}: it could run code, "
        "and was not read further. Do not load it anywhere else."
    )


def _checked(metadata: Any, sums: Mapping[str, Sum]) -> dict[str, TensorStorageMetadata]:
    """The tensors, when what was unpickled is what it should be, throughout."""
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpoint(f"expected Metadata, got {type(metadata).__name__}. {RESTORE}")
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            raise DamagedCheckpoint(
                f"expected only tensors, got {type(stored).__name__} for {name!r}: such an entry "
                "is a pickle, and was not read. Do not load it anywhere else."
            )
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            raise DamagedCheckpoint(f"expected all of {name!r}, got a part of it. {RESTORE}")
        for chunk in stored.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            if info.relative_path not in sums or info.transform_descriptors:
                raise DamagedCheckpoint(
                    f"expected {name!r} in a file of this checkpoint, as it is, got it in "
                    f"{info.relative_path!r}. {RESTORE}"
                )
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


class _Window(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    @override
    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        num_bytes = cast(io.BufferedReader, self._file).readinto(view)
        self._position += num_bytes
        return num_bytes


def _start_of_elements(window: _Window, num_bytes: int) -> int:
    """Where in an archive of ``torch.save`` the elements of its only tensor begin."""
    with zipfile.ZipFile(window) as archive:
        (record,) = (r for r in archive.infolist() if r.filename.endswith("/data/0"))
    if record.file_size != num_bytes or record.compress_type != zipfile.ZIP_STORED:
        raise DamagedCheckpoint(
            f"expected {num_bytes} bytes of elements as they are, got {record.file_size}. {RESTORE}"
        )
    # The directory at the archive's end has other extra fields than the header before the elements,
    # whose two lengths are at 26 and 28 of its 30 bytes.
    window.seek(record.header_offset + 26)
    lengths = window.read(4)
    name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    return record.header_offset + 30 + name + extra
