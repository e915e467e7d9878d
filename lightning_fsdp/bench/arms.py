"""What is compared: an arm is one engine at one ZeRO stage with one batch shape."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fsdp.strategies.registry import NAMES

ENGINES = ("scratch", "fsdp1", "fsdp2")
_STRATEGIES = {"single": "auto", "scratch": "scratch_fsdp"}  # where called otherwise than engines
_OF_UNFUSED = """\
In mixed precision the references (single, ddp) step with an optimizer that is not fused, since
Lightning clips for no fused one there; the other arms' are as configured."""

# What the callback is told of a workload.
_OF_MEASURE = "warmup_steps", "timed_steps", "profiled_steps", "writes_traces", "writes_snapshots"

# Whatever else a recipe says of hosts, of a beginning and of an end; and nothing but training.
_OF_EVERY_ARM = """
--trainer.num_nodes 1 --ckpt_path null --trainer.max_epochs -1 --trainer.max_time null
--trainer.limit_train_batches null --trainer.overfit_batches 0 --trainer.fast_dev_run false
--trainer.logger false --trainer.enable_checkpointing false --trainer.enable_progress_bar false
--trainer.enable_model_summary false --trainer.limit_val_batches 0
--trainer.num_sanity_val_steps 0
"""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every arm does, whatever its engine.

    Attributes:
        config: YAML of the recipe that is trained.
        num_ranks: Processes of the arms that share the work.
        accelerator: Where they compute: ``cpu`` or ``cuda``.
        precision: Of the Trainer.
        warmup_steps: Optimizer steps before the clock starts.
        timed_steps: Optimizer steps on the clock.
        profiled_steps: Optimizer steps after them, under a profiler.
        observed_steps: Optimizer steps after those, slowed down by exact memory tracking.
        writes_traces: Whether each run leaves a chrome trace of its profiled steps.
        writes_snapshots: Whether each run leaves a snapshot of CUDA's memory in a warm-up step.
        overrides: Further command line arguments of the recipe.
        launcher: Module that runs the recipe, and its arguments; none: it runs by itself.
        shard_size: Ranks that hold one model together, in arms that shard; ``None``: all.
    """

    config: Path
    num_ranks: int
    accelerator: str
    precision: str
    warmup_steps: int
    timed_steps: int
    profiled_steps: int
    observed_steps: int
    writes_traces: bool = False
    writes_snapshots: bool = False
    overrides: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    shard_size: int | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of one run."""
        return self.warmup_steps + self.timed_steps + self.profiled_steps + self.observed_steps


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row of the comparison.

    Attributes:
        engine: One of :data:`ENGINES`, or a reference: ``ddp`` (nothing sharded), ``single`` (one
            process that does the work of all ranks).
        zero_stage: 2 or 3; ``None`` for references.
        batch_size: Sequences per rank and micro-batch.
        grad_accum: Micro-batches per optimizer step.
    """

    engine: str
    zero_stage: int | None
    batch_size: int
    grad_accum: int

    @property
    def kind(self) -> str:
        """Engine and stage."""
        return self.engine if self.zero_stage is None else f"{self.engine}_zero{self.zero_stage}"

    @property
    def name(self) -> str:
        """Unique, and good for a file name."""
        return f"{self.kind}_b{self.batch_size}_a{self.grad_accum}"

    def _strategy(self, shard_size: int | None) -> str:
        name = self.kind.replace(self.engine, _STRATEGIES.get(self.engine, self.engine))
        if shard_size is None or self.engine not in ENGINES:
            return name
        cls, _, arguments = NAMES[name]
        options = {**arguments, "shard_size": shard_size}
        return json.dumps({"class_path": f"lightning_fsdp.{cls}", "init_args": options})

    def num_shards(self, workload: Workload) -> int:
        """Processes that hold one model together, where the arm shards."""
        shards = self.engine in ENGINES
        return (shards and workload.shard_size) or self.num_processes(workload)

    def num_processes(self, workload: Workload) -> int:
        """Processes that the arm starts."""
        return 1 if self.engine == "single" else workload.num_ranks

    def recipe_arguments(self, workload: Workload, out: Path) -> list[str]:
        """Command line of ``recipes.train`` for this arm, which writes measurements to ``out``."""
        is_single = self.engine == "single"
        # One process takes all ranks' sequences, so that every arm sees the same global batches.
        batch_size = self.batch_size * (workload.num_ranks if is_single else 1)
        told = {"out": str(out)} | {name: getattr(workload, name) for name in _OF_MEASURE}
        measure = {"class_path": "lightning_fsdp.bench.measure.Measure", "init_args": told}
        is_unfused = self.engine not in ENGINES and _has_unfused_references(workload.precision)
        unfused = ("--model.optimizer.fused", "false") if is_unfused else ()
        return [
            *("fit", "--config", str(workload.config)),
            *("--trainer.strategy", self._strategy(workload.shard_size)),
            *("--trainer.accelerator", workload.accelerator),
            *("--trainer.devices", str(self.num_processes(workload))),
            *("--trainer.precision", workload.precision),
            *("--trainer.max_steps", str(workload.total_steps)),
            *("--trainer.accumulate_grad_batches", str(self.grad_accum)),
            *("--trainer.callbacks", json.dumps([measure])),
            *("--trainer.default_root_dir", str(out)),
            *("--data.batch_size", str(batch_size)),
            *_OF_EVERY_ARM.split(),
            *unfused,
            *workload.overrides,
        ]


def _has_unfused_references(precision: str) -> bool:
    """Whether Lightning's plugin for mixed precision is theirs: it clips for no fused optimizer."""
    return precision.endswith("-mixed")


def notes_on(precision: str) -> list[str]:
    """What a reader of figures in it has to know of their arms."""
    return [_OF_UNFUSED] if _has_unfused_references(precision) else []


def choose_arms(
    engines: Sequence[str],
    zero_stages: Sequence[int],
    batch_sizes: Sequence[int],
    grad_accums: Sequence[int],
) -> list[Arm]:
    """All combinations, and for each batch shape the two references before them."""
    kinds: list[tuple[str, int | None]] = [("single", None), ("ddp", None)]
    kinds += itertools.product(engines, zero_stages)
    arms = [
        Arm(engine=engine, zero_stage=stage, batch_size=batch_size, grad_accum=grad_accum)
        for batch_size, grad_accum in itertools.product(batch_sizes, grad_accums)
        for engine, stage in kinds
    ]
    return list(dict.fromkeys(arms))
