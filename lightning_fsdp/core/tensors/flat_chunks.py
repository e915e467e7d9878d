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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fsdp.core.engine.layout import FlatSlice


@dataclass(frozen=True)
class Box:
    """A part of an n-d tensor: ``sizes`` elements from ``offsets`` on, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


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


def note_writing(tensors: Iterable[Tensor]) -> None:
    """Say that tensors were written to, box by box: also on a rank that has no box of them.

    All ranks then gather anew, or none.
    """
    local = [tensor.to_local() for tensor in tensors if isinstance(tensor, FlatChunks)]
    torch.autograd.graph.increment_version(local)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut elements ``[start, stop)`` of a row-major tensor into boxes, each contiguous in memory.

    For (4, 10) and [7, 36): the end of row 0, rows 1 and 2 whole, the beginning of row 3.

    Args:
        shape: Of the tensor, any number of dims.
        start: First element.
        stop: Past-the-last element.

    Yields:
        Boxes in the order of their elements, at most ``2 * len(shape) - 1``; one for a scalar.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = shape[1:]
    row_numel = math.prod(inner)

    def within_row(row: int, start: int, stop: int) -> Iterator[Box]:
        for box in boxes(inner, start - row * row_numel, stop - row * row_numel):
            yield Box((row, *box.offsets), (1, *box.sizes))

    first, last = -(-start // row_numel), stop // row_numel  # rows [first, last) are whole
    if first > last:
        yield from within_row(last, start, stop)
        return
    yield from within_row(first - 1, start, first * row_numel)
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    yield from within_row(last, last * row_numel, stop)
