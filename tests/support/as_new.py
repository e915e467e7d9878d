"""What a rank puts back before it runs another call, so that this one finds it as a new rank is."""

import gc
import os
import random
import warnings
from pathlib import Path

import numpy as np
import torch
import torch._dynamo.utils


class AsNew:
    """The state of this process, as it is now."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._filters = list(warnings.filters)
        self._dtype = torch.get_default_dtype()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        _seed()

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        _seed()
        torch.set_default_dtype(self._dtype)
        torch.use_deterministic_algorithms(self._deterministic)
        torch.set_num_threads(1)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        gc.collect()


def _seed() -> None:
    """Each process draws its own seeds: a test of what random numbers give would vary with them.
    Not the seed of pytest's own process, so that equal values were sent and not made twice.
    """
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
