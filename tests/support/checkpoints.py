"""States to save, in every form that a checkpoint takes, and the values that they must come back
with: those of plain tensors, made from a seed.
"""

import contextlib
import itertools
import json
import os
import threading
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_fsdp.checkpoint import folder
from lightning_fsdp.checkpoint.files import SummedFile


@contextlib.contextmanager
def verified_files():
    """Names of the files whose whole content this process compares with its checksum."""
    plain, names = folder.check_content, []

    def check_content(path, expected):
        names.append(path.name)
        plain(path, expected)

    folder.check_content = check_content
    try:
        yield names
    finally:
        folder.check_content = plain


@contextlib.contextmanager
def disk_stops():
    """Until the context ends, whatever is written or pushed to the disk waits, at most 20 s."""
    go_on, fsync, write = threading.Event(), os.fsync, SummedFile.write

    def late_fsync(descriptor):
        assert go_on.wait(20)
        fsync(descriptor)

    def late_write(file, data):
        assert go_on.wait(20)
        return write(file, data)

    os.fsync, SummedFile.write = late_fsync, late_write
    try:
        yield
    finally:
        go_on.set()
        os.fsync, SummedFile.write = fsync, write


FORMS = ("plain", "dtensor", "flat")


class Net(nn.Module):
    """Sizes that no number of ranks divides, a parameter smaller than four ranks, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(7, 5)
        self.block = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("count", torch.randint(0, 100, ()))


class FlatSlice(torch.Tensor):
    """A tensor with torch's checkpoint protocol: outside of at most two dims, inside the range of
    the flattened elements that one rank keeps.
    """

    @staticmethod
    def __new__(cls, whole, rank, world_size):
        per_rank = -(-whole.numel() // world_size)
        start, stop = (min(r * per_rank, whole.numel()) for r in (rank, rank + 1))
        self = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        self.local = whole.flatten()[start:stop].clone()
        self.start, self.stop = start, stop
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)

    def full_tensor(self):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.local)
        return torch.cat(parts).view(self.shape)

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in self._boxes()]

    def __create_write_items__(self, name, _):
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        (found,) = (box for box in self._boxes() if box[0] == index.offset)
        _, sizes, start = found
        stop = start + sizes.numel()
        return self.local[start - self.start : stop - self.start].view(sizes)

    def _boxes(self):
        """Offsets, sizes and first element of the end of a row, whole rows, the start of a row."""
        if self.start == self.stop:
            return []
        if self.dim() < 2:
            numbers = [self.start] * self.dim(), [self.stop - self.start] * self.dim()
            return [(torch.Size(numbers[0]), torch.Size(numbers[1]), self.start)]
        width = self.shape[1]
        first, last = -(-self.start // width) * width, self.stop // width * width
        cuts = [self.start, self.stop] if first > last else [self.start, first, last, self.stop]
        boxes = []
        for start, stop in itertools.pairwise(cuts):
            if start < stop:
                rows = max(1, (stop - start) // width) if start % width == 0 else 1
                sizes = torch.Size((rows, (stop - start) // rows))
                boxes.append((torch.Size(divmod(start, width)), sizes, start))
        return boxes


def whole_state(seed: int) -> dict[str, torch.Tensor]:
    """Plain tensors; every rank makes the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Net()
        state = {f"model.{name}": value.detach() for name, value in net.state_dict().items()}
        momentum = {f"optimizer.0.{n}.exp_avg": torch.randn(p.shape) for n, p in state.items()}
    return state | momentum


def make_state(form: str, seed: int) -> dict[str, torch.Tensor]:
    """The state of ``whole_state(seed)``; as ``"dtensor"``, sharded by torch's ``fully_shard``;
    as ``"flat"``, in :class:`FlatSlice`.
    """
    whole = whole_state(seed)
    if form == "plain":
        return whole
    if form == "flat":
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return {name: FlatSlice(value, rank, world_size) for name, value in whole.items()}
    net = Net()
    net.load_state_dict({n.removeprefix("model."): v for n, v in whole.items() if n[0] == "m"})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh)
    state = {f"model.{name}": value for name, value in net.state_dict().items()}
    assert isinstance(state["model.inlet.weight"], DTensor)
    for name, value in whole.items():
        if name not in state:
            like = state[name.removeprefix("optimizer.0.").removesuffix(".exp_avg")]
            if isinstance(like, DTensor):
                value = _shard_like(value, like)
            state[name] = value
    return state


def values_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole plain tensors. Collective where tensors are sharded."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in state.items()
    }


def assert_is(state: dict[str, torch.Tensor], seed: int) -> None:
    """``state`` has the values of ``whole_state(seed)``, to the bit."""
    found, expected = values_of(state), whole_state(seed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def sign_again(folder: Path) -> None:
    """Make the marker say what the files hold now, as somebody would who forges a checkpoint."""
    marker = json.loads((folder / "complete.json").read_text())
    for name in marker["files"]:
        data = (folder / name).read_bytes()
        marker["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    (folder / "complete.json").write_text(json.dumps(marker))


def _shard_like(whole: torch.Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements)
