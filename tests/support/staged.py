"""Collectives between processes that share one GPU, which NCCL refuses.

What a collective reads is copied to pinned memory on a stream of the group's own, as soon as the
compute stream gets there; a thread of the group's own exchanges it over gloo and queues the way
back. As with NCCL, a collective begins at its call, runs beside what is computed, and ``wait()``
makes the current stream wait for its end; but the host as well waits until the exchange is over.

On the CPU the same thread exchanges the tensors themselves.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.groups import Exchange, GroupOverGloo


class _StagedWork(dist.Work):
    """One collective.

    Attributes:
        ended: Gives what the current stream has to wait for, None on the CPU.
        keeps: Tensors that are read or written; given up once they were waited for.
    """

    def __init__(self, keeps: Sequence[Tensor]) -> None:
        super().__init__()
        self.ended: Future[torch.cuda.Event | None] = Future()
        self.keeps = keeps

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        event = self.ended.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        self.keeps = ()
        for before in getattr(self, "before", ()):
            before.wait()
        return True

    def is_completed(self) -> bool:
        event = self.ended.result() if self.ended.done() else None
        return self.ended.done() and (event is None or event.query())


class StagedGroup(GroupOverGloo):
    backend = "staged"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name=f"{self.backend} group").start()

    def start(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exchange: Exchange
    ) -> dist.Work:
        inputs, outputs = [t.detach() for t in inputs], [t.detach() for t in outputs]
        work = _StagedWork([*inputs, *outputs])
        run = self._prepare(inputs, outputs, exchange)

        def job() -> None:
            try:
                ended = run()
            except BaseException as error:  # noqa: BLE001 (whoever waits must hear it)
                work.ended.set_exception(error)
            else:
                work.ended.set_result(ended)

        self._jobs.put(job)
        return work

    def _prepare(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exchange: Exchange
    ) -> Callable[[], torch.cuda.Event | None]:
        """Begin, and return what the thread has to do."""

        def run() -> None:
            exchange(inputs, outputs)

        return run

    def _serve(self) -> None:
        while True:
            with torch.no_grad():
                self._jobs.get()()


class StagedGroupOnCuda(StagedGroup):
    backend = "staged_nccl"  # the core takes for CUDA what says nccl
    devices = ("cuda",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stream = torch.cuda.Stream()

    def _prepare(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exchange: Exchange
    ) -> Callable[[], torch.cuda.Event | None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            sent = [_pinned_like(tensor).copy_(tensor, non_blocking=True) for tensor in inputs]
            arrived = self._stream.record_event()

        def run() -> torch.cuda.Event:
            arrived.synchronize()
            received = [_pinned_like(tensor) for tensor in outputs]
            exchange(sent, received)
            with torch.cuda.stream(self._stream):
                for output, value in zip(outputs, received, strict=True):
                    output.copy_(value, non_blocking=True)
                event: torch.cuda.Event = self._stream.record_event()
            return event

        return run


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
