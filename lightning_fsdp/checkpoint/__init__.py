"""Sharded checkpoints, whole or not there, that any engine reads at any number of ranks."""

from lightning_fsdp.checkpoint.background import Saving, wait_for_saving
from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.checkpoint.folder import (
    OpenCheckpoint,
    async_save,
    is_checkpoint,
    load,
    read_extra,
    read_shapes,
    save,
)

__all__ = [
    "save",
    "async_save",
    "Saving",
    "wait_for_saving",
    "load",
    "OpenCheckpoint",
    "read_extra",
    "read_shapes",
    "is_checkpoint",
    "DamagedCheckpoint",
]
