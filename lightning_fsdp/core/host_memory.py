"""Memory of the host: whole copies and shards that live there, and when unused memory goes back.

How memory is mapped and given back is in ``lightning_fsdp/libc.py``.

Note: offloading
With shards, the reduced gradients and the optimizer's state are on the host as well:

    host                                                         device that computes
    shard ---- cast ----> staging (pinned) ------ copy ------>   this rank's slot of the whole copy
    gradient of the shard (pinned)  <------ copy, event ------   reduced gradient

All data between the two passes through :class:`OffloadedHome`, and is counted there.

Copies from and to pinned memory are queued on the compute stream, and the host goes on meanwhile.
It must not touch memory that they still read or write: so a gather reads a staging buffer, not the
shard that the optimizer writes, and a gradient is handed out after its event. Memory of pinned
buffers that are dropped is not reused before the copies queued on it have run; torch's allocator
sees to that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fsdp import libc
from lightning_fsdp.config import CPUOffloadPolicy
from lightning_fsdp.core.engine.communicator import Pending
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watcher

_HOST = torch.device("cpu")


class UnusedMemory(Watcher):
    """Returns unused pages to the kernel as gradients arrive, and at each step."""

    def before_gradients(self, unit: Unit) -> None:
        """Make room for a large unit's gradients, and for its whole copy if there is none."""
        coming = sum(p.shard.nbytes for p in unit.flat_params) * unit.communicator.world_size
        if 2 * coming > libc.SLACK_BYTES:  # gradients and the copy are as large
            if not unit.is_whole:
                coming += sum(p.buffer.flat.nbytes for p in unit.flat_params)
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


class OffloadedHome(MappedHome):
    """Shards on the host.

    Args:
        compute_device: The device that computes.
        policy: Whether the host's memory is pinned.
    """

    def __init__(self, compute_device: torch.device, policy: CPUOffloadPolicy) -> None:
        super().__init__(compute_device)
        self.device = _HOST
        self.policy = policy
        self.after_reduction = (("bring_home", lambda shard, unit_name: self.to_host(shard)),)
        self._pins = policy.pin_memory and compute_device.type != "cpu"

    def new_shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros, ``(numel,)``, on the host."""
        return torch.zeros(numel, dtype=dtype, device=_HOST, pin_memory=self._pins)

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device; cast on the host, as the compute dtype usually is the narrower."""
        if self._pins or source.dtype != target.dtype:
            cast = torch.empty_like(source, dtype=target.dtype, device=_HOST, pin_memory=self._pins)
            source = cast.copy_(source)
        self.traffic["to_device"].add(source.nbytes)
        target.copy_(source, non_blocking=self._pins)

    def to_host(self, source: Tensor, *, may_pin: bool = True) -> Pending:
        """Start the copy of a tensor to the host; see :meth:`Home.to_host`."""
        pins = self._pins and may_pin
        landing = torch.empty_like(source, device=_HOST, pin_memory=pins)
        self.traffic["to_host"].add(source.nbytes)
        landing.copy_(source, non_blocking=pins)
        if not pins:
            return Pending("copy to the host", (), lambda: landing)
        arrival = _record_event(source.device)

        def landed() -> Tensor:
            arrival.synchronize()
            return landing

        return Pending("copy to the host", (), landed, keeps=(source,))


def _record_event(device: torch.device) -> torch.cuda.Event:
    """An event that is reached when all work queued on the device's stream so far has run."""
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event
