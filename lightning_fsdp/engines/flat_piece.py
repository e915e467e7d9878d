"""A flat slice of a tensor that is not the core's, written and read as the core's own are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.core.engine.layout import FlatSlice
from lightning_fsdp.core.engine.torch_internals import disabled_torch_function, wrap_without_storage
from lightning_fsdp.core.tensors.flat_chunks import FlatChunks

aten = torch.ops.aten


class FlatPiece(FlatChunks, Tensor):
    """A flat slice for ``torch.distributed.checkpoint``, over memory that belongs to the caller.

    Args:
        local: ``(n,)``, this rank's elements; may be empty. A load writes to it.
        shape: Shape of the whole tensor.
        start: First of the elements in the whole, in row-major order.
    """

    @staticmethod
    def __new__(cls, local: Tensor, shape: tuple[int, ...], start: int) -> FlatPiece:  # noqa: D102, PYI034
        piece: FlatPiece = wrap_without_storage(  # type: ignore[assignment]
            cls, tuple(shape), local, False
        )
        piece._local = local
        piece.flat_slice = FlatSlice(tuple(shape), start, start + local.numel())
        return piece

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _COPIES:
            piece = next(arg for arg in args if isinstance(arg, FlatPiece))
            raise RuntimeError(
                f"{func}: expected a whole tensor, got {piece!r}: a sharded checkpoint is written "
                "from slices. Rename or drop the entry, or compute with to_local() on every rank."
            )
        piece, options = args[0], dict(kwargs or {})
        options.pop("memory_format", None)
        local = func(piece._local, *args[1:], **options)
        return FlatPiece(local, tuple(piece.shape), piece.flat_slice.start)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatPiece({self.flat_slice}, {self.dtype})"


_COPIES = {aten.detach.default, aten.clone.default, aten._to_copy.default}
