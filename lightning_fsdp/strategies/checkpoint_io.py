"""Full checkpoints on a local disk, without a second copy of them in memory.

    saving     tensor by tensor into a file beside, which then takes the name
    loading    the file is mapped: who takes a slice of a tensor reads that slice alone

Lightning's own would write the file into memory first, twice, and read all of it on every rank.
"""

from __future__ import annotations

import copy
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.checkpoint.files import RESTORE, write_for_torch

# What is cut or copied when it is loaded.
_MAPPED = ("state_dict", "optimizer_states")


class FullCheckpointIO(TorchCheckpointIO):
    """Writes and reads local files; leaves URLs, and files of another kind, to Lightning."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if not self.streams(path, storage_options):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_for_torch(path, checkpoint)

    def streams(self, path: str | Path, storage_options: Any) -> bool:
        """Whether a file there is written tensor by tensor."""
        return storage_options is None and _is_local(path)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,  # noqa: ARG005
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """As Lightning's.

        Raises:
            DamagedCheckpoint: The file is cut off, or another one; torch's errors do not name it.
        """
        if not _is_local(path):
            return super().load_checkpoint(path, map_location, weights_only)
        try:
            if not zipfile.is_zipfile(path):
                return super().load_checkpoint(path, map_location, weights_only)
            file: dict[str, Any] = torch.load(
                path, map_location=map_location, mmap=True, weights_only=weights_only
            )
        except (FileNotFoundError, PermissionError, pickle.UnpicklingError, MemoryError):
            raise  # it says what to do
        except Exception as error:  # a damaged file is an error of many kinds
            raise DamagedCheckpoint(
                f"{path}: expected a file that torch.load reads, got a damaged one "
                f"({type(error).__name__}: {error}). {RESTORE}"
            ) from error
        # What others keep (callbacks, schedulers) must not hang on the file.
        return {k: v if k in _MAPPED else copy.deepcopy(v) for k, v in file.items()}


def _is_local(path: str | Path) -> bool:
    return "://" not in str(path)
