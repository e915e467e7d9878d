"""Which settings are worth trying: each is planned, with its time, and those that fit are ranked.

Given are the model, the ranks and their network, a speed, a device's memory, and how many sequences
a rank takes in an optimizer step, so that all settings train the same. Tried are

=============== ====================================================================================
stage           3 and 2
shard size      the ranks of a host; where that does not fit, of twice as many hosts, and so on; all
micro-batch     the largest that divides the sequences and fits
recomputation   where a step does not fit as one micro-batch without it
=============== ====================================================================================

Here a larger micro-batch is never slower, as fewer gathers are made for the same operations; nor is
to compute blocks once. Units are those that are found automatically.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_fsdp.plan.dry_run import Plan, Run, dry_run
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
            Stage, shard size, micro-batch and recomputation are tried.
        network: Of its ranks.
        flops_per_s: That a rank reaches in training.
        device_bytes: What all tensors of a rank may take together.

    Raises:
        RuntimeError: See :func:`dry_run`.
        ValueError: Likewise.
    """
    search = _Search(config, run, network, flops_per_s, device_bytes)
    found = [plan for stage in (3, 2) for plan in search.of_stage(stage)]
    suggestions = sorted(map(search.timed, found), key=lambda found: found.timing.step_s)
    nearest = min(search.tried, key=lambda plan: plan.peak_bytes)
    return Suggestions(suggestions, search.timed(nearest))


class _Search:
    def __init__(
        self,
        config: PretrainedConfig,
        run: Run,
        network: Network,
        flops_per_s: float,
        device_bytes: int,
    ) -> None:
        self._config, self._run = config, run
        self._network, self._flops_per_s = network, flops_per_s
        self._device_bytes = device_bytes
        self._num_sequences = run.batch_size * run.grad_accum
        self.tried: list[Plan] = []

    def of_stage(self, stage: int) -> list[Plan]:
        """What fits, by shard size."""
        world_size = self._run.world_size
        size, found = world_size // self._network.num_hosts, list[Plan]()
        while size < world_size and not found:
            found += self._of_size(stage, size) if world_size % size == 0 else []
            size *= 2
        return found + self._of_size(stage, None)

    def timed(self, plan: Plan) -> Suggestion:
        """With its rates."""
        assert plan.timing is not None, "it was planned with a pace"
        alone = next(p.timing for p in self.tried if not p.run.activation_checkpointing)
        assert alone is not None, "likewise"
        step_s, num_tokens = plan.timing.step_s, self._num_sequences * self._run.seq_len
        return Suggestion(plan, plan.timing, num_tokens / step_s, alone.compute_s / step_s)

    def _of_size(self, stage: int, shard_size: int | None) -> list[Plan]:
        """What fits, without recomputation and where that helps with it."""
        setting = replace(self._run, zero_stage=stage, shard_size=shard_size)
        found = self._largest(replace(setting, activation_checkpointing=False))
        if not found or found[0].run.grad_accum > 1:
            found += self._largest(replace(setting, activation_checkpointing=True))
        return found

    def _largest(self, setting: Run) -> list[Plan]:
        """The largest micro-batch that fits, if any does."""
        total = self._num_sequences
        sizes = [size for size in range(1, total + 1) if total % size == 0]
        low, high = 0, len(sizes) - 1
        middle, best = high, list[Plan]()
        while low <= high:
            size = sizes[middle]
            chosen = replace(setting, batch_size=size, grad_accum=total // size)
            plan = dry_run(self._config, chosen, Pace(self._network, self._flops_per_s))
            self.tried.append(plan)
            if plan.peak_bytes <= self._device_bytes:
                best, low = [plan], middle + 1
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return best
