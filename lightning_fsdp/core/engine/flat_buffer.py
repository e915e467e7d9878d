"""A 1-D buffer that is freed and filled again while tensors keep pointing at it.

The whole copy of a flat parameter lives here. Parameters are views of it, made once; freeing sets
the storage to 0 bytes and allocating gives the same storage its bytes back. What autograd saved for
the backward are views of this storage too, so gathering again before the backward is enough for
exact gradients. Swapping ``.data`` would not do: saved tensors follow the storage, not the
parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.layout import Slot


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
        self._home = home
        self._nbytes = self.flat.untyped_storage().nbytes()

    @property
    def can_be_freed(self) -> bool:
        """False once somebody took a numpy array of it, which goes on pointing at the memory."""
        return self.flat.untyped_storage().resizable()

    def allocate(self) -> None:
        """Give the storage its memory; the content is undefined."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:  # else it could not be freed
            self._home.allocate(storage, self._nbytes)

    def free(self) -> None:
        """Release the memory, if it can be; views stay valid for the next :meth:`allocate`."""
        if self.can_be_freed:
            self.flat.untyped_storage().resize_(0)

    def view(self, slot: Slot) -> Tensor:
        """One parameter of the buffer in its original shape.

        Made from ``.data``, so that it has a version counter of its own: filling the buffer between
        forward and backward must not look like an in-place change of what autograd saved.
        """
        with torch.inference_mode(False):
            return self.flat.data.narrow(0, slot.offset, slot.numel).view(slot.shape)
