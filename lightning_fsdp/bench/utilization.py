"""How busy the device of this rank is, sampled in the background for as long as steps are timed.

On CUDA that is NVML's figure for the very device that torch computes on (``CUDA_VISIBLE_DEVICES``
is followed), on CPU this process's seconds of CPU per second. A sample that fails is not there; it
is not zero.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import psutil
import torch

_INTERVAL_S = 0.1


class Utilization:
    """Samples in a thread of its own.

    Args:
        read: Gives percent; whatever it raises, there is no sample.
        interval_s: Seconds between samples.

    Attributes:
        samples: Seconds since the start, percent.
    """

    def __init__(self, read: Callable[[], float], interval_s: float = _INTERVAL_S) -> None:
        self.samples: list[tuple[float, float]] = []
        self._read = read
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="utilization", daemon=True)

    @classmethod
    def of(cls, device: torch.device) -> Utilization:
        """Of a rank that computes on ``device``."""
        if device.type == "cuda":
            return cls(lambda: float(torch.cuda.utilization(device)))
        share = psutil.Process().cpu_percent
        share()  # the first is of no time at all
        return cls(share)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> list[tuple[float, float]]:
        """End, and return the samples."""
        self._is_over.set()
        self._thread.join()
        return self.samples

    def _sample(self) -> None:
        start = time.perf_counter()
        while not self._is_over.wait(self._interval_s):
            # No driver, no NVML, no permission: all the same to whoever wants a figure.
            with contextlib.suppress(Exception):
                percent = self._read()
                self.samples.append((time.perf_counter() - start, percent))
