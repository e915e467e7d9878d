"""The states of random generators of every rank, for a run that is continued."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def collect() -> list[dict[str, Any]] | None:
    """On rank 0, the states of all ranks; ``None`` elsewhere. Collective.

    Numbers, strings and tensors only, so that ``torch.load(weights_only=True)`` reads them.
    """
    kind, key, *rest = np.random.get_state()  # noqa: NPY002 (what others may use)
    mine: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(key).astype(np.int64)), *rest),
    }
    if torch.cuda.is_available():
        mine["cuda"] = torch.cuda.get_rng_state()
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every)
    return every


def restore(every: list[dict[str, Any]]) -> None:
    """Take this rank's state. With another number of ranks there is none, and nothing happens."""
    if len(every) != dist.get_world_size():
        return
    mine = every[dist.get_rank()]
    torch.set_rng_state(mine["torch"])
    random.setstate(mine["python"])
    kind, key, *rest = mine["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in mine and torch.cuda.is_available():
        torch.cuda.set_rng_state(mine["cuda"])
