"""Where shards live, and the one way between there and the device that computes.

Offloaded, a shard lives on the host, and with it the reduced gradient and the optimizer's state:

    host                                                         device that computes
    shard ---- cast ----> staging (pinned) ------ copy ------>   this rank's slot of the whole copy
    gradient of the shard (pinned)  <------ copy, event ------   reduced gradient

All that crosses passes :class:`Home`, and is counted there. Not offloaded, the two places are one.

Copies from and to pinned memory are queued on the compute stream, and the host goes on. It must not
read or write what they do: a gather reads a staging buffer, not the shard that the optimizer
writes, and a gradient is handed out after its event. Memory of pinned buffers that are dropped is
not reused before copies queued on it have run; torch's allocator sees to that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fsdp.config import CPUOffloadPolicy
from lightning_fsdp.core.collectives import Pending, Traffic

_HOST = torch.device("cpu")


class Home:
    """Where the shards of one call of the door live.

    Attributes:
        compute_device: Of whole copies, local gradients and collectives.
        device: Of shards, reduced gradients and optimizer state.
        policy: How they are offloaded, ``None`` where they are not.
        traffic: What has crossed, by direction: ``to_device``, ``to_host``.
    """

    def __init__(self, compute_device: torch.device, policy: CPUOffloadPolicy | None) -> None:
        self.compute_device = compute_device
        self.device = compute_device if policy is None else _HOST
        self.policy = policy
        self.traffic = {"to_device": Traffic(), "to_host": Traffic()}
        self._pins = policy is not None and policy.pin_memory

    @property
    def is_offloaded(self) -> bool:
        """Whether shards live elsewhere than on the device that computes."""
        return self.policy is not None

    def new_shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, ``(numel,)``, where shards live."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self._pins)

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device that computes; casts before, so that no byte too many travels.

        Args:
            source: ``(n,)``, where shards live; may be written to when this returns.
            target: ``(n,)`` of any dtype, on the device; there for what is queued after this.
        """
        if self.is_offloaded:
            if self._pins or source.dtype != target.dtype:
                staging = torch.empty_like(
                    source, dtype=target.dtype, device=_HOST, pin_memory=self._pins
                )
                source = staging.copy_(source)
            self._count("to_device", source)
        target.copy_(source, non_blocking=self._pins)

    def to_host(self, source: Tensor, *, may_pin: bool = True) -> Pending:
        """Start the copy of a tensor to where shards live.

        Args:
            source: Any shape, on the device that computes; kept until waited for.
            may_pin: False for what is large, rare and kept by the caller: pinned memory is scarce.

        Returns:
            The copy; its result has the shape and dtype of ``source``, and is ``source`` itself
            where nothing is offloaded.
        """
        if not self.is_offloaded:
            return Pending("no copy", (), lambda: source)
        pins = self._pins and may_pin
        landing = torch.empty_like(source, device=_HOST, pin_memory=pins)
        self._count("to_host", source)
        landing.copy_(source, non_blocking=pins)
        if not pins:
            return Pending("copy to the host", (), lambda: landing)
        arrival = _record_event(source.device)

        def landed() -> Tensor:
            arrival.synchronize()
            return landing

        return Pending("copy to the host", (), landed, keeps=(source,))

    def _count(self, direction: str, moved: Tensor) -> None:
        traffic = self.traffic[direction]
        traffic.calls += 1
        traffic.sent_bytes += moved.nbytes


def _record_event(device: torch.device) -> torch.cuda.Event:
    """An event that is over when all that is queued now on the device's stream has run."""
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event
