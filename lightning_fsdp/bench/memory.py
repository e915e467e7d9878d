"""The observed steps: every storage and every collective, by operation; exact, and slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack

import lightning as L
import torch.distributed as dist

from lightning_fsdp.bench import torch_internals
from lightning_fsdp.bench.records import RankMeasurement
from lightning_fsdp.callbacks.memory import OWNERS, tell_owners
from lightning_fsdp.callbacks.memory_picture import thinned
from lightning_fsdp.callbacks.plain_access import close, gradients_of
from lightning_fsdp.callbacks.storages import Ledger, nbytes_of, resting_tensors
from lightning_fsdp.callbacks.throughput import flop_counter
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.ranks.groups import way_of
from lightning_fsdp.engines.scratch import ScratchEngine

_MOST_POINTS = 500  # of a time line


class StepObserver:
    """Watches this thread from its creation, between two steps, until :meth:`stop`.

    Args:
        trainer: That trains.
        module: What it trains.
        num_tokens: Of the first micro-batch, whose operations are counted.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, num_tokens: int) -> None:
        self._trainer, self._module, self._num_tokens = trainer, module, num_tokens
        self._resting_bytes = nbytes_of(resting_tensors(module, trainer.optimizers))
        self._calls_before = _data_calls(trainer)
        self._access = gradients_of(trainer, module)
        self._ledger = Ledger(trainer.strategy.root_device)
        self._tell()
        self._ledger.start()
        self._ends = [self._ledger.num_operations]  # of steps, by its clock; the first: of none
        self._counting = ExitStack()
        self._counter = self._counting.enter_context(flop_counter())

    def after_backward(self) -> None:
        """A micro-batch's gradients are there."""
        self._counting.close()
        self._tell()

    def end_step(self) -> None:
        """An optimizer step is through."""
        self._tell()
        self._ends.append(self._ledger.num_operations)

    def stop(self) -> None:
        """Watch no more."""
        self._counting.close()
        self._ledger.stop()
        close(self._access)

    def write(self, measured: RankMeasurement) -> None:
        """Put down what was seen; after :meth:`stop`."""
        ledger, seen, num_steps = self._ledger, self._ledger.observation, len(self._ends) - 1
        measured.resting_bytes = self._resting_bytes
        if not torch_internals.num_graphs():
            start, stop = self._ends[-2:]  # the last whole step
            moments, clock = ledger.moments(OWNERS), range(start, stop + 1)
            totals = [sum(of_owners.values()) for of_owners in moments]
            line = [(ledger.times_s[i] - ledger.times_s[start], totals[i]) for i in clock]
            measured.peak_bytes = seen.peak_bytes
            measured.peak_by_kind = moments[totals.index(max(totals))]
            measured.mean_bytes = mean_over_time(line)
            # Its ends stay, or it would begin late and be taken for shorter.
            measured.timeline = [line[0], *thinned(line[1:-1], _MOST_POINTS), line[-1]]
        flops = self._counter.get_total_flops()
        if flops and self._num_tokens:
            measured.flops_per_token = flops / self._num_tokens
        measured.collectives = {kind: n / num_steps for kind, n in seen.calls.items()}
        measured.collective_bytes = {kind: n / num_steps for kind, n in seen.bytes_of.items()}
        measured.payload_bytes = seen.payload_bytes / num_steps
        calls, before = _data_calls(self._trainer), self._calls_before
        if calls is not None and before is not None:
            measured.data_collectives = {k: (n - before[k]) / num_steps for k, n in calls.items()}

    def _tell(self) -> None:
        self._ledger.settle()
        tell_owners(self._ledger, self._access, self._trainer, self._module)


def comm_of(trainer: L.Trainer) -> str | None:
    """How its data moves, as records say it."""
    if trainer.world_size == 1:
        return None
    communicator = _communicator(trainer)
    return dist.get_backend() if communicator is None else way_of(communicator)


def _data_calls(trainer: L.Trainer) -> dict[str, int] | None:
    """Of this core, so far; ``None`` where another engine is at work."""
    communicator = _communicator(trainer)
    if communicator is None:
        return None
    return {kind: of_kind.calls for kind, of_kind in communicator.traffic.items()}


def _communicator(trainer: L.Trainer) -> Communicator | None:
    engine = getattr(trainer.strategy, "engine", None)
    return engine.communicator if isinstance(engine, ScratchEngine) else None


def mean_over_time(line: Sequence[tuple[float, int]]) -> float:
    """Bytes, each for as long as they were alive.

    Args:
        line: Seconds, bytes from then on; by seconds, from the first to the last of which it goes.
    """
    held = sum(n * (until - since) for (since, n), (until, _) in itertools.pairwise(line))
    seconds = line[-1][0] - line[0][0]
    return held / seconds if seconds else float(line[0][1])
