"""Where shards live and whole copies come and go: here, both in the memory of one device.

Note: freed and filled again
The whole copy of a flat parameter is a buffer that is freed and filled again while tensors keep
pointing at it. Parameters are views of it, made once; freeing sets the storage to 0 bytes and
allocating gives the same storage its bytes back. What autograd saved for the backward are views of
this storage too, so gathering again before the backward is enough for exact gradients. Swapping
``.data`` would not do: saved tensors follow the storage, not the parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fsdp.config import CPUOffloadPolicy
from lightning_fsdp.core.engine.communicator import Pending, Stage, Traffic
from lightning_fsdp.core.engine.layout import Slot


class Home:
    """The memory of the flat parameters that one call of ``fully_shard`` makes.

    Attributes:
        compute_device: Device of whole copies, local gradients and collectives.
        device: Device of shards, reduced gradients and optimizer state.
        policy: How these are offloaded; ``None`` where they are not.
        after_reduction: Stages that follow a reduction, with their names.
        traffic: What was copied between the two devices, by direction: ``to_device``, ``to_host``.
    """

    policy: CPUOffloadPolicy | None = None

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = self.device = compute_device
        self.after_reduction: tuple[tuple[str, Stage], ...] = ()
        self.traffic = {"to_device": Traffic(), "to_host": Traffic()}

    def new_shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros, ``(numel,)``, where shards live."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate ``(numel,)`` on the device that computes; the content is undefined."""
        return torch.empty(numel, dtype=dtype, device=self.compute_device)

    def allocator(self, storage: torch.UntypedStorage, num_bytes: int) -> Callable[[int], object]:
        """The function that gives a storage of 0 bytes its ``num_bytes`` back."""
        return storage.resize_

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device that computes, casting to the dtype of ``target``.

        Args:
            source: ``(n,)``, where shards live; may be written to when this returns.
            target: ``(n,)`` of any dtype, on the device that computes; what is queued there after
                this call reads the new values.
        """
        target.copy_(source)

    def to_host(self, source: Tensor, *, may_pin: bool = True) -> Pending:
        """Start the copy of a tensor to where shards live.

        Args:
            source: Any shape, on the device that computes; kept alive until waited for.
            may_pin: False for what is large, rare and kept by the caller: pinned memory is scarce.

        Returns:
            The copy; its result has the shape and dtype of ``source``, or is ``source`` itself.
        """
        return Pending("no copy", (), lambda: source)


class FlatBuffer:
    """``numel`` elements that exist only between :meth:`allocate` and :meth:`free`.

    It starts allocated, because views can only be made then.

    Attributes:
        flat: ``(numel,)``; its storage has 0 bytes while free.
    """

    def __init__(self, numel: int, dtype: torch.dtype, home: Home) -> None:
        # Outside of inference mode: an inference tensor could never be written to in training.
        with torch.inference_mode(False):
            self.flat = home.empty(numel, dtype)
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._resize = home.allocator(self._storage, self._nbytes)

    def allocate(self) -> None:
        """Give the storage its memory; the content is undefined."""
        if self._storage.nbytes() == 0:  # else free() had to leave it
            self._resize(self._nbytes)

    def free(self) -> None:
        """Release the memory, if possible; views are valid again after :meth:`allocate`."""
        # It is not resizable once somebody took a numpy array, which points at the memory.
        if self._storage.nbytes() > 0 and self._storage.resizable():
            self._storage.resize_(0)

    def view(self, slot: Slot) -> Tensor:
        """One parameter of the buffer in its original shape.

        Made from ``.data``, so that it has a version counter of its own: filling the buffer between
        forward and backward must not look like an in-place change of what autograd saved.
        """
        with torch.inference_mode(False):
            return self.flat.data.narrow(0, slot.offset, slot.numel).view(slot.shape)
