"""The simulated network for tensors on CPU: one queue, and a thread that sleeps.

The thread moves the data, and then sleeps until the time is over that the network would have taken;
whoever waits for the collective waits that long:

    issued     A  B
    network    [   A   ][   B   ]     end = max(issued, end of the one before) + modelled duration
    waiting           A         B
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_fsdp.simulate.network import Cost
from lightning_fsdp.simulate.transfer import Future, Transfer, Usage, Work

_BURNT_NUMEL = 2**16  # copied at a time to occupy a core: some ten microseconds


class HostTransfers:
    """One transfer after another, by a thread of its own.

    Args:
        usage: Counts waits, and what is late.
        host_share: Of :class:`~lightning_fsdp.simulate.network.Network`.
    """

    def __init__(self, usage: Usage, host_share: float) -> None:
        self.usage = usage
        self.host_share = host_share
        self._thread = ThreadPoolExecutor(1, "simulated network")
        self._end_s = 0.0  # of the last one

    def start(self, transfer: Transfer, cost: Cost) -> Work:
        """Put it into the thread's queue."""
        future = Future()
        self._thread.submit(self._run, transfer, cost, time.perf_counter(), future)
        left = replace(transfer, move=None)  # the thread has what it moves
        return Work(left, partial(self._wait, future), future.done, partial(self._unseen, future))

    def close(self) -> None:
        """End the thread, after all that is in its queue."""
        self._thread.shutdown()

    def _wait(self, future: Future) -> None:
        start_s = time.perf_counter()
        future.wait()
        self.usage.waited_s += time.perf_counter() - start_s

    def _unseen(self, future: Future, result: list[Tensor]) -> Future:
        """What DDP waits for."""
        del result  # which the future has
        self.usage.sees_waits = False
        return future

    def _run(self, transfer: Transfer, cost: Cost, issued_s: float, future: Future) -> None:
        self._end_s = max(issued_s, self._end_s) + cost.duration_s
        try:
            occupied_until_s = time.thread_time() + self.host_share * cost.duration_s
            if transfer.move is not None:
                with torch.no_grad():
                    transfer.move()
            _occupy_core(occupied_until_s)
        except Exception as error:  # noqa: BLE001 (whoever waits gets it)
            future.set_exception(error)  # type: ignore[arg-type]
            return
        remaining_s = self._end_s - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)
        else:
            self._end_s -= remaining_s
            self.usage.late_s -= remaining_s
        future.set_result(transfer.result)


def _occupy_core(until_s: float) -> None:
    """Compute up to that time of this thread, as a network stack does; Python runs on meanwhile."""
    if time.thread_time() >= until_s:
        return
    source, target = torch.empty(2, _BURNT_NUMEL)
    while time.thread_time() < until_s:
        target.copy_(source)
