"""Whole copies in memory of this host, and when unused memory goes back: as gradients come.

How is in ``lightning_fsdp/libc.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fsdp import libc
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watcher


class UnusedMemory(Watcher):
    """Returns unused pages to the kernel as gradients arrive, and at each step."""

    def before_gradients(self, unit: Unit) -> None:
        """Make room for a large unit's gradients, and for its whole copy if there is none."""
        coming = sum(p.shard.nbytes for p in unit.sites) * unit.communicator.world_size
        if 2 * coming > libc.SLACK_BYTES:  # gradients and the copy are as large
            if not unit.is_whole:
                coming += sum(p.buffer.flat.nbytes for p in unit.sites)
            libc.return_unused_memory(slack=libc.SLACK_BYTES - coming)

    def on_reduce(self, flat_param: FlatParameter, has_one: Sequence[bool]) -> None:
        """Count the reduced gradient that is about to be written, as large as the shard."""
        libc.return_unused_memory(flat_param.shard.nbytes)

    def on_unreduced(self, flat_param: FlatParameter) -> None:
        """Count the gradients of the whole flat parameter, which were written."""
        libc.return_unused_memory(flat_param.layout.numel * flat_param.shard.itemsize)

    def on_step(self) -> None:
        """Look at the process at once."""
        libc.return_unused_memory()


class MappedHome(Home):
    """Where the host computes, large blocks are mapped outside the heap, in huge pages."""

    def __init__(self, compute_device: torch.device) -> None:
        super().__init__(compute_device)
        if compute_device.type == "cpu":
            libc.keep_freed_memory()

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate ``(numel,)``; the content is undefined."""
        if self.compute_device.type != "cpu":
            return super().empty(numel, dtype)
        flat = torch.empty(0, dtype=dtype, device=self.compute_device)
        storage, num_bytes = flat.untyped_storage(), numel * dtype.itemsize
        if not libc.is_mapped_apart(storage, num_bytes):
            return super().empty(numel, dtype)
        libc.map_apart(storage, num_bytes)
        return flat.resize_(numel)

    def allocator(self, storage: torch.UntypedStorage, num_bytes: int) -> Callable[[int], object]:
        """See :meth:`Home.allocator`; small storages are resized as any other."""
        is_apart = libc.is_mapped_apart(storage, num_bytes)
        return functools.partial(libc.map_apart, storage) if is_apart else storage.resize_
