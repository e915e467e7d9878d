"""A flat slice of somebody else's tensor, written and read as the core's own are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.core.engine.layout import FlatSlice
from lightning_fsdp.core.engine.torch_internals import disabled_torch_function, wrap_without_storage
from lightning_fsdp.core.tensors.flat_chunks import FlatChunks

aten = torch.ops.aten


class FlatPiece(FlatChunks, Tensor):
    """A flat slice on its way into a checkpoint or out of it, over memory of somebody else.

    Args:
        local: ``(n,)``, this rank's elements; may be empty. Written to by a load.
        shape: Of the whole.
        start: The first of the elements in the whole.
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
