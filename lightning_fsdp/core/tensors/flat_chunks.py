"""How ``torch.distributed.checkpoint`` sees a flat slice of an n-d tensor: as boxes, none copied.

A rank holds elements ``[start, stop)`` of the row-major order. That is at most ``2n - 1`` boxes,
each contiguous in the slice; (4, 10) and [7, 36) are three:

    row 0   . . . . . . . a a a      a   offsets (0, 7)   sizes (1, 3)
    row 1   b b b b b b b b b b      b   offsets (1, 0)   sizes (2, 10)
    row 2   b b b b b b b b b b
    row 3   c c c c c c . . . .      c   offsets (3, 0)   sizes (1, 6)

A name in the checkpoint stands for a whole tensor, so a reader may cut it in any other way.

``torch.distributed.checkpoint`` is imported where it is used, as that takes as long as torch does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fsdp import safetensors_boxes
from lightning_fsdp.core.engine.layout import FlatSlice

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


class FlatChunks:
    """Mixed into tensors of which this rank holds a flat slice: torch's protocol for checkpoints.

    Attributes:
        dtype: The tensor's.
        flat_slice: Which elements of the whole this rank holds.
    """

    dtype: torch.dtype
    flat_slice: FlatSlice
    _local: Tensor

    def to_local(self) -> Tensor:
        """This rank's elements, ``(n,)``, sharing memory; may be empty."""
        return self._local

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:  # noqa: A002
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        safetensors_boxes.spread_over_files()
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

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        whole = self.flat_slice
        if 0 in whole.shape:  # no rank holds an element, yet the name has to be saved
            return [box_of((0,) * len(whole.shape), whole.shape)]
        return list(boxes(whole.shape, whole.start, whole.stop))

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        position = 0
        for box in self.__create_chunk_list__():
            numel = math.prod(box.sizes)
            if box.offsets == index.offset:
                return self.to_local().detach().narrow(0, position, numel).view(box.sizes)
            position += numel
        raise ValueError(
            f"{index.fqn!r}: expected the first element of a box of {self.flat_slice}, got "
            f"{tuple(index.offset)}. Ask for what __create_chunk_list__ lists."
        )


def note_writing(tensors: Iterable[Tensor]) -> None:
    """Count a write to tensors that a checkpoint has filled, also on ranks without a box of them.

    A stale whole copy is gathered again, which all ranks have to do, or none.
    """
    local = [tensor.to_local() for tensor in tensors if isinstance(tensor, FlatChunks)]
    torch.autograd.graph.increment_version(local)


def box_of(offsets: Iterable[int], sizes: Iterable[int]) -> ChunkStorageMetadata:
    """A part of an n-d tensor: per dimension, ``sizes`` elements from ``offsets`` on."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[ChunkStorageMetadata]:
    """Cut elements ``[start, stop)`` of a row-major tensor into boxes, each contiguous in memory.

    For (4, 10) and [7, 36): the end of row 0, rows 1 and 2 whole, the beginning of row 3.

    Args:
        shape: Shape of the tensor, any number of dimensions.
        start: First element.
        stop: Past-the-last element.

    Yields:
        Boxes in the order of their elements, at most ``2 * len(shape) - 1``; one for a scalar.
    """
    row_numels = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape and start < stop:
        yield box_of((), ())
        return
    while start < stop:
        offsets = tuple(start // n % size for n, size in zip(row_numels, shape, strict=True))
        # The outermost dimension of which a whole row begins here, and ends before ``stop``.
        dim, numel = next(
            (dim, n) for dim, n in enumerate(row_numels) if start % n == 0 and start + n <= stop
        )
        num_rows = min((stop - start) // numel, shape[dim] - offsets[dim])
        yield box_of(offsets, (*[1] * dim, num_rows, *shape[dim + 1 :]))
        start += num_rows * numel
