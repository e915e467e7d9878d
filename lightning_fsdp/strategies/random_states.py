"""The states of the random generators of every rank, for a run that is continued.

Rank r of W ranks takes the state of rank r modulo the number of ranks that saved: its own, where
that number has not changed. Otherwise ranks that drew the same numbers (a layer that is dropped on
all of them or on none) still do, further ranks repeat the numbers of the first ones, and the seed
is the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def collect(device: torch.device) -> list[dict[str, Any]] | None:
    """On rank 0 the states of all ranks, in their order; ``None`` on the others. Collective.

    Numbers, strings and tensors only, so that ``torch.load(weights_only=True)`` reads them.

    Args:
        device: Of this rank; if it is a CUDA device, its generator is among the states.
    """
    version, words, gauss = random.getstate()
    drawn_from: Any = np.random.get_state()  # noqa: NPY002 (what user code draws from)
    kind, key, *rest = drawn_from
    mine: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, device="cpu"), gauss),
        "numpy": (kind, torch.tensor(key.astype(np.int64), device="cpu"), *rest),
    }
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every)
    return every


def restore(every: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Go on drawing where a rank was. A CUDA generator that was not saved is left as it is."""
    state = every[dist.get_rank() % len(every)]
    torch.set_rng_state(_on_cpu(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, _on_cpu(key).numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_on_cpu(state["cuda"]), device)


def _on_cpu(state: Tensor) -> Tensor:
    return state.cpu()  # also where a CheckpointIO maps all of a file to a device
