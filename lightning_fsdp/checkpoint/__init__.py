"""Folders of training state that are written whole or not at all, and read without running code."""

from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.checkpoint.folder import (
    Saving,
    async_save,
    is_checkpoint,
    load,
    read_extra,
    read_shapes,
    save,
    wait_for_saving,
)

__all__ = [
    "save",
    "async_save",
    "Saving",
    "wait_for_saving",
    "load",
    "read_extra",
    "read_shapes",
    "is_checkpoint",
    "DamagedCheckpoint",
]
