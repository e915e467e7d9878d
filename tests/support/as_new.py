"""What a rank puts back before it runs another call, so that this one finds it as a new rank is."""

import gc
import os
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
        self._of_numpy = np.random.get_state()  # that of ``random`` is new in each process
        self._of_torch = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._deterministic = torch.are_deterministic_algorithms_enabled()

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        np.random.set_state(self._of_numpy)
        torch.set_rng_state(self._of_torch)
        torch.set_default_dtype(self._dtype)
        torch.use_deterministic_algorithms(self._deterministic)
        torch.set_num_threads(1)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        gc.collect()
