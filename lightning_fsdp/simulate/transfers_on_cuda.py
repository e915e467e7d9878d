"""The simulated network for tensors on CUDA: a stream, and a kernel that spins.

As NCCL's, a collective begins when all is done that was queued before it, and goes on while other
kernels compute. Its kernels are a copy, which fills the result, and one that spins for the rest of
the time that the network would have taken; who waits is a stream, not the program:

    compute stream    [ a ][ b ]......[ c ]      c needs the result: exposed are the dots
    network stream         [copy][spin]

Nothing here waits for the device before :meth:`CudaTransfers.settle`, which asks it for the times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, cuda

from lightning_fsdp.simulate import torch_internals
from lightning_fsdp.simulate.network import Cost
from lightning_fsdp.simulate.transfer import Future, Transfer, Usage, Work

_HIGHEST_PRIORITY = -1  # so that the spinning one finds a place beside kernels that fill the device
_CALIBRATED_CYCLES = 10_000_000  # some milliseconds
_CALIBRATED_BYTES = 2**28
_CALIBRATIONS = 5


@dataclass(frozen=True)
class Pace:
    """How fast the device spins and copies.

    Attributes:
        cycles_per_s: Of the kernel that spins.
        bytes_per_s: That a copy writes.
    """

    cycles_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, device: torch.device) -> Pace:
        """Measured, on an idle device."""
        spun_s = _median_s(device, lambda: torch_internals.spin(_CALIBRATED_CYCLES))
        copied_s = _median_s(device, _copier(device))
        cuda.empty_cache()  # what is reserved is a figure of the benchmark
        return cls(_CALIBRATED_CYCLES / spun_s, _CALIBRATED_BYTES / copied_s)


class CudaTransfers:
    """One transfer after another, on a stream of its own.

    Args:
        usage: Counts waits, and what is late.
        device: Whose tensors are moved.
        pace: Of the device.
    """

    def __init__(self, usage: Usage, device: torch.device, pace: Pace) -> None:
        self.usage = usage
        self.device = device
        self.pace = pace
        self._stream = cuda.Stream(device, _HIGHEST_PRIORITY)  # type: ignore[no-untyped-call]
        self._durations: list[tuple[cuda.Event, cuda.Event, float]] = []  # and that as modelled
        self._waits: list[tuple[cuda.Event, cuda.Event]] = []

    def start(self, transfer: Transfer, cost: Cost) -> Work:
        """Queue it behind what is queued on the current stream."""
        spun_s = max(0.0, cost.duration_s - transfer.written_bytes / self.pace.bytes_per_s)
        began, ended = _event(), _event()
        self._stream.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(self._stream), torch.no_grad():
            began.record(self._stream)
            if transfer.move is not None:
                transfer.move()
            if spun_s:
                torch_internals.spin(round(spun_s * self.pace.cycles_per_s))
            ended.record(self._stream)
        self._durations.append((began, ended, cost.duration_s))
        query: Callable[[], bool] = ended.query
        return Work(transfer, partial(self.wait, ended), query, self.future_of)

    def wait(self, ended: cuda.Event) -> None:
        """Let the current stream wait for a collective."""
        stream = cuda.current_stream(self.device)
        if stream != cuda.default_stream(self.device):
            self.usage.sees_waits = False  # for what, and if at all, is the other stream's matter
            stream.wait_event(ended)
            return
        before, after = _event(), _event()
        before.record(stream)
        stream.wait_event(ended)
        after.record(stream)
        self._waits.append((before, after))

    def future_of(self, result: list[Tensor]) -> Future:
        """What is done when all is that was queued on the network; DDP waits for it in C++."""
        self.usage.sees_waits = False
        future = Future(devices=[self.device])
        with cuda.stream(self._stream):
            future.set_result(result)
        return future

    def settle(self) -> None:
        """Wait for the device, and add up what it took."""
        cuda.synchronize(self.device)
        for before, after in self._waits:
            self.usage.waited_s += before.elapsed_time(after) / 1e3
        for began, ended, modelled_s in self._durations:
            self.usage.late_s += max(0.0, began.elapsed_time(ended) / 1e3 - modelled_s)
        self._waits, self._durations = [], []


def _event() -> cuda.Event:
    return cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _copier(device: torch.device) -> Callable[[], object]:
    source, target = torch.empty(2, _CALIBRATED_BYTES, dtype=torch.uint8, device=device)
    return lambda: target.copy_(source)


def _median_s(device: torch.device, action: Callable[[], object]) -> float:
    """Of a few calls, after one."""
    seconds: list[float] = []
    for _ in range(1 + _CALIBRATIONS):
        before, after = _event(), _event()
        before.record(cuda.current_stream(device))
        action()
        after.record(cuda.current_stream(device))
        cuda.synchronize(device)
        seconds.append(before.elapsed_time(after) / 1e3)
    return statistics.median(seconds[1:])
