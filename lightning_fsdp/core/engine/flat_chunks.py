"""How ``torch.distributed.checkpoint`` sees a flat slice of an n-d tensor: as boxes, none copied.

A rank holds elements ``[start, stop)`` of the row-major order. That is at most ``2n - 1`` boxes,
each contiguous in the slice; (4, 10) and [7, 36) are three:

    row 0   . . . . . . . a a a      a   offsets (0, 7)   sizes (1, 3)
    row 1   b b b b b b b b b b      b   offsets (1, 0)   sizes (2, 10)
    row 2   b b b b b b b b b b
    row 3   c c c c c c . . . .      c   offsets (3, 0)   sizes (1, 6)

Names in the checkpoint are whole tensors, so whoever reads may cut them in any other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.layout import Box, FlatSlice, boxes


class FlatChunks:
    """Mixed into tensors of which this rank holds a flat slice: torch's protocol for checkpoints.

    Attributes:
        dtype: Of the tensor; as all tensors have it.
    """

    dtype: torch.dtype

    def to_local(self) -> Tensor:
        """``(n,)``, the elements of this rank."""
        raise NotImplementedError

    @property
    def flat_slice(self) -> FlatSlice:
        """Which elements of the whole these are."""
        raise NotImplementedError

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:  # noqa: A002
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.to_local())
        size = torch.Size(self.flat_slice.shape)
        return [
            WriteItem(
                # Replicas have the same boxes; torch lets one of them write.
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        position = 0
        for box in self._boxes():
            numel = math.prod(box.sizes)
            if box.offsets == tuple(index.offset):
                return self.to_local().detach().narrow(0, position, numel).view(box.sizes)
            position += numel
        raise ValueError(
            f"{index.fqn!r}: expected the first element of a box of {self.flat_slice}, got "
            f"{tuple(index.offset)}. Ask for what __create_chunk_list__ lists."
        )

    def _boxes(self) -> Iterator[Box]:
        piece = self.flat_slice
        if math.prod(piece.shape) == 0:  # nobody holds an element, but it is to be there
            yield Box((0,) * len(piece.shape), piece.shape)
        yield from boxes(piece.shape, piece.start, piece.stop)


class FlatPiece(FlatChunks, Tensor):
    """A flat slice on its way into a checkpoint or out of it, over memory of somebody else.

    Args:
        local: ``(n,)``, this rank's elements; may be empty. Written to by a load.
        shape: Of the whole.
        start: The first of the elements in the whole.
    """

    _local: Tensor
    _start: int

    @staticmethod
    def __new__(cls, local: Tensor, shape: tuple[int, ...], start: int) -> FlatPiece:  # noqa: D102, PYI034
        piece: FlatPiece = torch_internals.wrap_without_storage(  # type: ignore[assignment]
            cls, tuple(shape), local, False
        )
        piece._local, piece._start = local, start
        return piece

    __torch_function__ = torch_internals.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _COPIES:
            _refuse(func, args)
        piece, options = args[0], dict(kwargs or {})
        options.pop("memory_format", None)
        local = func(piece._local, *args[1:], **options)
        return FlatPiece(local, tuple(piece.shape), piece._start)

    def to_local(self) -> Tensor:
        """``(n,)``, the elements of this rank, sharing memory."""
        return self._local

    @property
    def flat_slice(self) -> FlatSlice:
        """Which elements of the whole these are."""
        return FlatSlice(tuple(self.shape), self._start, self._start + self._local.numel())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatPiece({self.flat_slice}, {self.dtype})"


_COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


def _refuse(func: Any, args: tuple[Any, ...]) -> NoReturn:
    piece = next(arg for arg in args if isinstance(arg, FlatPiece))
    raise RuntimeError(
        f"{func}: expected a whole tensor, got {piece!r}: a sharded checkpoint is written from "
        "slices. Rename or drop the entry, or compute with to_local() on every rank."
    )
