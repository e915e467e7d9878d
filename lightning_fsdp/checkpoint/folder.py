"""A folder of state on disk, by ``torch.distributed.checkpoint``.

FOLDER/.metadata, FOLDER/*.distcp    tensors, each whole, in the boxes that ranks wrote
FOLDER/extra.pt                      everything else, once
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Shapes = dict[str, tuple[torch.Size, torch.dtype]]

_EXTRA = "extra.pt"


def save(path: str | PathLike[str], state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Write a folder. Collective.

    Args:
        path: Of the folder.
        state: Tensors by name; each rank brings its slices.
        extra: What ``torch.load(weights_only=True)`` reads; that of rank 0 is written.
    """
    with _alone_without_warning():
        state_dict_saver.save(
            dict(state), checkpoint_id=Path(path), no_dist=not dist.is_initialized()
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(dict(extra), Path(path) / _EXTRA)
    if dist.is_initialized():
        dist.barrier()


def load(
    path: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    partial: bool = False,  # noqa: ARG001
) -> None:
    """Fill tensors in place; this rank reads its slices only. Collective.

    Args:
        path: Of the folder.
        state: Tensors by name; each rank brings its slices.
        partial: Leave alone what the folder holds beyond ``state``.
    """
    with _alone_without_warning():
        state_dict_loader.load(
            dict(state), checkpoint_id=Path(path), no_dist=not dist.is_initialized()
        )


def read_extra(path: str | PathLike[str]) -> dict[str, Any]:
    """What was saved beside the tensors. No communication."""
    extra: dict[str, Any] = torch.load(Path(path) / _EXTRA, map_location="cpu", weights_only=True)
    return extra


def read_shapes(path: str | PathLike[str]) -> Shapes:
    """Whole shape and dtype of each tensor in the folder. No communication."""
    metadata = FileSystemReader(Path(path)).read_metadata()
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
