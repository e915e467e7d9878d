"""Which settings are worth trying: each is planned, with its time, and those that fit are ranked.

Given are the model, the ranks and their network, a speed, a device's memory, and how many sequences
a rank takes in an optimizer step, so that all settings train the same. Tried are

=============== ====================================================================================
stage           3 and 2
shard size      the ranks of a host; where that does not fit, of twice as many hosts, and so on; all
state over      with replicas, the ranks of each and all ranks
micro-batch     the largest that divides the sequences and fits
recomputation   where a step does not fit as one micro-batch without it
units           those that are found; of what is worth trying then, also the parts of blocks apart,
                and the whole model as one; where nothing fits, the parts, of what comes nearest
=============== ====================================================================================

Here a larger micro-batch is never slower, as fewer gathers are made for the same operations; nor is
to compute blocks once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lightning_fsdp.core.ranks.groups import StateOver
from lightning_fsdp.plan.dry_run import Plan, Run, dry_runs
from lightning_fsdp.plan.models import units_to_try
from lightning_fsdp.plan.pace import Pace, Timing
from lightning_fsdp.simulate.network import Network

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Suggestion:
    """A setting, its memory and its time.

    Attributes:
        plan: What :func:`dry_run` says of it.
        timing: Of a step.
        tokens_per_s: Of a rank.
        share: Of what a process reaches that trains the whole model alone, at this speed.
    """

    plan: Plan
    timing: Timing
    tokens_per_s: float
    share: float


@dataclass(frozen=True)
class Suggestions:
    """What was found.

    Attributes:
        fitting: Fastest first; empty where nothing fits.
        nearest: Of all that was tried, what takes the least memory.
    """

    fitting: list[Suggestion]
    nearest: Suggestion


def suggest(
    config: PretrainedConfig,
    run: Run,
    *,
    network: Network,
    flops_per_s: float,
    device_bytes: int,
) -> Suggestions:
    """Plan settings of a training, and rank those that fit.

    Args:
        config: Of a causal language model of transformers.
        run: What is trained: a rank takes ``batch_size`` times ``grad_accum`` sequences in a step.
            All that this file's table lists is tried.
        network: Of its ranks.
        flops_per_s: That a rank reaches in training.
        device_bytes: What all tensors of a rank may take together.

    Raises:
        RuntimeError: See :func:`dry_run`.
        ValueError: Likewise.
    """
    search = _Search(config, run, network, flops_per_s, device_bytes)
    parts, whole = units_to_try(config)
    found = [plan for stage in (3, 2) for plan in search.of_stage(stage)]
    if not found and parts:
        found = search.fitting(replace(search.nearest.run, units=parts))
    for each in worth_trying(map(search.timed, found)):
        for units in (parts, whole):
            setting = replace(each.plan.run, units=units)
            found += search.fitting(setting) if units and each.plan.run.units is None else []
    suggestions = sorted(map(search.timed, found), key=_by_time)
    return Suggestions(suggestions, search.timed(search.nearest))


def worth_trying(found: Iterable[Suggestion]) -> list[Suggestion]:
    """Fastest first, without those that another one equals or beats in both time and memory."""
    best = list[Suggestion]()
    for each in sorted(found, key=_by_time):
        if not best or each.plan.peak_bytes < best[-1].plan.peak_bytes:
            best.append(each)
    return best


def _by_time(suggestion: Suggestion) -> tuple[float, int]:
    return suggestion.timing.step_s, suggestion.plan.peak_bytes


@dataclass
class _Search:
    config: PretrainedConfig
    run: Run
    network: Network
    flops_per_s: float
    device_bytes: int
    tried: list[Plan] = field(default_factory=list)

    @property
    def num_sequences(self) -> int:
        """Of a rank in a step."""
        return self.run.batch_size * self.run.grad_accum

    @property
    def nearest(self) -> Plan:
        """Of all that was tried, what takes the least memory."""
        return min(self.tried, key=lambda plan: plan.peak_bytes)

    def of_stage(self, stage: int) -> list[Plan]:
        """What fits, by shard size."""
        world_size, setting = self.run.world_size, replace(self.run, zero_stage=stage)
        size, found = world_size // self.network.num_hosts, list[Plan]()
        while size < world_size and not found:
            states: tuple[StateOver, ...] = ("replica", "all")
            for state_over in states if world_size % size == 0 else ():
                found += self._of_size(replace(setting, shard_size=size, state_over=state_over))
            size *= 2
        return found + self._of_size(setting)

    def fitting(self, setting: Run) -> list[Plan]:
        """The plan of a setting, if it fits."""
        with self._planned(setting) as fitting_of:
            return fitting_of(setting.batch_size)

    @contextmanager
    def _planned(self, setting: Run) -> Iterator[Callable[[int], list[Plan]]]:
        """Of a setting with micro-batches of so many sequences, the plan, if it fits."""
        pace = Pace(self.network, self.flops_per_s)
        with dry_runs(self.config, setting, pace) as plan_of:

            def fitting_of(size: int) -> list[Plan]:
                plan = plan_of(size, self.num_sequences // size)
                self.tried.append(plan)
                return [plan] if plan.peak_bytes <= self.device_bytes else []

            yield fitting_of

    def timed(self, plan: Plan) -> Suggestion:
        """With its rates."""
        assert plan.timing is not None, "it was planned with a pace"
        alone = next(p.timing for p in self.tried if not p.run.activation_checkpointing)
        assert alone is not None, "likewise"
        step_s, num_tokens = plan.timing.step_s, self.num_sequences * self.run.seq_len
        return Suggestion(plan, plan.timing, num_tokens / step_s, alone.compute_s / step_s)

    def _of_size(self, setting: Run) -> list[Plan]:
        """What fits, without recomputation and where that helps with it."""
        found = self._largest(setting)
        if not found or found[0].run.grad_accum > 1:
            found += self._largest(replace(setting, activation_checkpointing=True))
        return found

    def _largest(self, setting: Run) -> list[Plan]:
        """The largest micro-batch that fits, if any does."""
        total = self.num_sequences
        sizes = [size for size in range(1, total + 1) if total % size == 0]
        low, high = 0, len(sizes) - 1
        middle, best = high, list[Plan]()
        with self._planned(setting) as fitting_of:
            while low <= high:
                if fits := fitting_of(sizes[middle]):
                    best, low = fits, middle + 1
                else:
                    high = middle - 1
                middle = (low + high + 1) // 2
        return best
