"""Where shards live, and where whole copies come and go: here, in one memory, of one device."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fsdp.config import CPUOffloadPolicy
from lightning_fsdp.core.engine.communicator import Pending, Stage, Traffic


class Home:
    """The memory of the flat parameters of one call of the door.

    Attributes:
        compute_device: Of whole copies, local gradients and collectives.
        device: Of shards, reduced gradients and optimizer state.
        policy: How they are offloaded, ``None`` where they are not.
        after_reduction: What follows a reduction: names and stages.
        traffic: What has crossed between the two, by direction: ``to_device``, ``to_host``.
    """

    policy: CPUOffloadPolicy | None = None

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = self.device = compute_device
        self.after_reduction: tuple[tuple[str, Stage], ...] = ()
        self.traffic = {"to_device": Traffic(), "to_host": Traffic()}

    def new_shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros, ``(numel,)``, where shards live."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``(numel,)``, on the device that computes; the content is undefined."""
        return torch.empty(numel, dtype=dtype, device=self.compute_device)

    def allocate(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give the storage of such a tensor, which was freed, its bytes back."""
        storage.resize_(num_bytes)

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device that computes, and cast.

        Args:
            source: ``(n,)``, where shards live; may be written to when this returns.
            target: ``(n,)`` of any dtype, on the device; there for what is queued after this.
        """
        target.copy_(source)

    def to_host(self, source: Tensor, *, may_pin: bool = True) -> Pending:
        """Start the copy of a tensor to where shards live.

        Args:
            source: Any shape, on the device that computes; kept until waited for.
            may_pin: False for what is large, rare and kept by the caller: pinned memory is scarce.

        Returns:
            The copy; its result has the shape and dtype of ``source``, or is ``source`` itself.
        """
        return Pending("no copy", (), lambda: source)
