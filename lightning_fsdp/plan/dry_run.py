"""One training step of one rank by the real engine, on tensors without data and a group of one.

torch's fake tensors have shapes, dtypes and storages, and no bytes; the collectives of its fake
process group do nothing. So model, engine, autograd and optimizer run as they are, at any number of
ranks, and every storage that they hold is seen when it comes and when it goes. A formula would have
to repeat the engine's order of gathers, frees and reductions, and what autograd keeps; it would be
wrong as soon as either changed.

The step does what the Trainer does with the recipes' models, in its order::

    forward    per micro-batch: model, cross entropy; gradients of the step before are there until
               the first backward
    backward   all but the last micro-batch's without communication
    step       clipping by norm; fused AdamW, or Muon for matrices of blocks and AdamW for the rest

It is the second step, as the first has no optimizer state and does not know the order of units yet.

What is not seen: what an operation allocates and frees inside (workspaces of kernels), the CUDA
context, buffers of NCCL, and the allocator's fragments. Operations are torch's for CPU, whose
results, and what they keep for backward, have the shapes of those on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_fsdp.config import plan_of_stage
from lightning_fsdp.core.fully_shard import shard_model
from lightning_fsdp.core.ranks.groups import StateOver, communicator_of
from lightning_fsdp.core.ranks.hosts import kept_of
from lightning_fsdp.core.ranks.narrow import NarrowCommunicator
from lightning_fsdp.core.ranks.pairs import PairCommunicator, exchanges_in_pairs
from lightning_fsdp.core.sharded_module import ShardedModule, units_in
from lightning_fsdp.engines.autocast import keep_main_dtype
from lightning_fsdp.engines.calls import call_with
from lightning_fsdp.engines.gradients import gradients
from lightning_fsdp.engines.owned_state import kept_by
from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.search import Search, largest_that_fits
from lightning_fsdp.losses import (
    body_and_head,
    chunk_size_of,
    linear_cross_entropy,
    only_first_chunks,
)
from lightning_fsdp.plan import torch_internals
from lightning_fsdp.plan.ledger import GATHERED, FakeLedger
from lightning_fsdp.plan.loads import Load, loads_of
from lightning_fsdp.plan.models import (
    block_classes,
    build,
    materialize,
    matrices_of_blocks,
    outline_with_adapters,
)
from lightning_fsdp.plan.pace import Pace, Timing
from lightning_fsdp.simulate.groups import simulated
from lightning_fsdp.strategies import unit_calls

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightning_fsdp.strategies.precision import ShardedPrecision

OWNERS = ("parameters", "gradients", "optimizer", GATHERED, "local gradients", "activations")
PHASES = ("forward", "backward", "step")
_MICRO_BATCHES = 3  # the first, the last, and one that stands for all between them
_CHUNKS = 2  # of the loss: the second is made beside the sums of the first
CHOICES = {
    # Of a Trainer's, those that can be planned: 16-mixed has a scaler, which looks at values.
    "precision": ("32-true", "bf16-true", "bf16-mixed"),
    "backend": ("nccl", "gloo"),
    "optimizer": ("adamw", "muon"),
    "loss": ("chunked", "plain"),
    "state_over": get_args(StateOver),
}
"""Of the fields of a run that have few."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is to be trained, and how.

    Attributes:
        world_size: Ranks.
        shard_size: Those that hold one model together; ``None``: all.
        state_over: See :func:`~lightning_fsdp.fully_shard`.
        units: Names of classes, or the smallest number of parameters of a unit; ``None``: those
            that are found. See :func:`~lightning_fsdp.shard_model`.
        zero_stage: 2 or 3.
        precision: Of the Trainer.
        batch_size: Sequences per rank and micro-batch.
        seq_len: Tokens per sequence.
        grad_accum: Micro-batches per optimizer step.
        activation_checkpointing: Keep only the blocks' inputs and compute the rest again.
        optimizer: ``adamw`` or ``muon``.
        loss: ``chunked``, as the recipes' (see :mod:`lightning_fsdp.losses`), or ``plain``: the
            cross entropy of all logits, in fp32.
        adapters: Folder with an ``adapter_config.json`` of peft, whose adapters are trained; the
            model is frozen, and in bf16. ``None``: the model is trained.
        backend: Of the process group. Up to 8 ranks of gloo exchange shards in pairs, which holds
            less.
    """

    world_size: int
    shard_size: int | None = None
    state_over: StateOver = "replica"
    units: tuple[str, ...] | int | None = None
    zero_stage: int = 3
    precision: str = "bf16-mixed"
    batch_size: int = 1
    seq_len: int = 1024
    grad_accum: int = 1
    activation_checkpointing: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    loss: Literal["chunked", "plain"] = "chunked"
    adapters: str | None = None
    backend: Literal["nccl", "gloo"] = "nccl"

    def __post_init__(self) -> None:
        plan_of_stage(self.zero_stage)
        for name in ("world_size", "batch_size", "seq_len", "grad_accum"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expected at least 1, got {getattr(self, name)}. Raise it."
                )
        if self.shard_size is not None:
            is_divisor = self.shard_size >= 1 and self.world_size % self.shard_size == 0
            if not is_divisor:
                raise ValueError(
                    f"shard_size: expected a divisor of the {self.world_size} ranks, got "
                    f"{self.shard_size}. Each replica of the model needs as many ranks."
                )
        if self.state_over == "all" and self.shard_size in (None, self.world_size):
            raise ValueError(
                "state_over='all': expected a shard_size smaller than the number of ranks, got "
                "one replica, which has its state over all ranks already. Leave it out."
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}: expected {' or '.join(map(repr, choices))}, got "
                    f"{getattr(self, name)!r}. Correct it."
                )


@dataclass(frozen=True)
class PhaseBytes:
    """One phase; of several micro-batches the highest peak and the last rest.

    Attributes:
        peak: Bytes by owner at the moment of the phase with most bytes.
        most: The most bytes of each owner in the phase, at whatever moment.
        resting: Bytes by owner at its end.
    """

    peak: dict[str, int]
    most: dict[str, int]
    resting: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """The memory of the rank that holds most.

    Attributes:
        num_parameters: Of the whole model.
        phases: By name.
        owners: Per rank, of the tensors that it steps whole; ``None`` if all steps are of slices.
        timing: What the step takes; ``None`` without a network and a speed.
    """

    run: Run
    num_parameters: int
    phases: dict[str, PhaseBytes]
    owners: list[Load] | None
    timing: Timing | None = None

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors alive at once."""
        return max(sum(phase.peak.values()) for phase in self.phases.values())

    def as_json(self) -> dict[str, Any]:
        """Everything, by name."""
        return {**asdict(self), "peak_bytes": self.peak_bytes}


def dry_run(config: PretrainedConfig, run: Run, pace: Pace | None = None) -> Plan:
    """Plan a model's training.

    Args:
        config: Of a causal language model of transformers; nothing is allocated.
        run: How it is trained.
        pace: How fast, for the plan's timing; of a network of as many ranks.

    Raises:
        RuntimeError: This process belongs to a process group already.
        ValueError: Sequences longer than the model's positions.
    """
    with dry_runs(config, run, pace) as plan_of:
        return plan_of(run.batch_size, run.grad_accum)


@contextmanager
def dry_runs(
    config: PretrainedConfig, run: Run, pace: Pace | None = None
) -> Iterator[Callable[[int, int], Plan]]:
    """Plan a model's training in several sizes; see :func:`dry_run`.

    Yields:
        What plans a step of so many sequences in a micro-batch and so many micro-batches. Each call
        takes half the time of a dry run of its own, and says the same.
    """
    with ExitStack() as on_a_rank:  # the one that holds most
        training = on_a_rank.enter_context(_training_on(0, config, run, pace))
        # Of owners, which one that is shows when they are there.
        kept = [load.numel + load.copied for load in training.loads()]
        if kept and (fullest := kept.index(max(kept))):
            on_a_rank.close()
            training = on_a_rank.enter_context(_training_on(fullest, config, run, pace))
        yield training.plan


def largest_batch(
    config: PretrainedConfig, run: Run, *, device_bytes: int, cap: int
) -> tuple[Search, Plan | None]:
    """The most sequences per rank and micro-batch whose tensors fit on a device.

    Args:
        config: Of a causal language model of transformers.
        run: How it is trained; its batch size does not matter.
        device_bytes: What all tensors of a rank may take together.
        cap: The largest batch to try.

    Returns:
        The search, and the plan of what it found.

    Raises:
        RuntimeError: See :func:`dry_run`.
        ValueError: Likewise, or the cap is below 1.
    """
    plans: dict[int, Plan] = {}

    def attempt(size: int) -> str | None:
        plans[size] = plan_of(size, run.grad_accum)
        peak_bytes = plans[size].peak_bytes
        return f"takes {format_bytes(peak_bytes)}" if peak_bytes > device_bytes else None

    def guess() -> int:
        # Most peaks are a constant and as much again for each sequence; of few sequences, some are
        # elsewhere in the step.
        sizes = sorted(plans)
        fitting = [size for size in sizes if plans[size].peak_bytes <= device_bytes]
        low = min(fitting[-1], sizes[-2])
        high = sizes[sizes.index(low) + 1]
        least, most = plans[low].peak_bytes, plans[high].peak_bytes
        return low + (high - low) * (device_bytes - least) // max(most - least, 1)

    with dry_runs(config, run) as plan_of:
        search = largest_that_fits(attempt, cap=cap, guess=guess)
    return search, None if search.largest is None else plans[search.largest]


@contextmanager
def _training_on(
    rank: int, config: PretrainedConfig, run: Run, pace: Pace | None
) -> Iterator[_Training]:
    from lightning_fsdp.strategies.precision import ShardedPrecision  # imports Lightning

    num_positions = getattr(config, "max_position_embeddings", run.seq_len)
    if run.seq_len > num_positions:
        raise ValueError(
            f"seq_len: expected at most the model's {num_positions} positions, got {run.seq_len}. "
            "Lower it."
        )
    outline = None if run.adapters is None else outline_with_adapters(config, run.adapters)
    with _group_of(rank, run, pace) as mesh, torch_internals.fake_tensors() as forget:
        precision = ShardedPrecision(run.precision)
        with precision.module_init_context():  # not convert_module, which swaps parameters
            model = build(config) if outline is None else materialize(outline)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if run.activation_checkpointing:
            unit_calls.apply(model, None, checkpointing=block_classes(model), compiles=False)
        forget()
        shard_model(
            model,
            plan_of_stage(run.zero_stage),
            units=run.units,
            mesh=mesh,
            mp_policy=precision.policy,
            state_over=run.state_over,
        )
        keep_main_dtype(model, precision.policy, "cuda" if run.backend == "nccl" else "cpu")
        yield _Training(model, run, precision, num_parameters, pace)


@dataclass(eq=False)
class _Training:
    """A sharded model in training, as the Trainer would run it."""

    model: nn.Module
    run: Run
    precision: ShardedPrecision
    num_parameters: int
    pace: Pace | None

    def __post_init__(self) -> None:
        self.optimizers = _optimizers_for(self.model, self.run)
        self._step(1, lambda _: nullcontext(), num_micro_batches=1)  # it learns the order of units

    def plan(self, batch_size: int, grad_accum: int) -> Plan:
        """Watch a step of so many sequences per micro-batch, and so many of these."""
        ledger = FakeLedger(self.pace)
        moments: list[Timing] = []  # the beginning, the end of each backward, the end
        clocks: list[tuple[str, int, int]] = []

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            start = ledger.num_operations
            yield
            if self.pace is not None and name != "forward":
                moments.append(self.pace.now())
            ledger.settle()  # first: looking for owners makes views of its own
            clocks.append((name, start, ledger.num_operations))
            self._tell_owners(ledger)

        self._tell_owners(ledger)
        watch = gradients(self.model).on_local(
            lambda _, gradient, __: ledger.tell("local gradients", [gradient]), edits=False
        )
        if self.pace is not None:
            moments.append(self.pace.now())
        ledger.start()
        try:
            self._step(batch_size, phase, min(grad_accum, _MICRO_BATCHES))
        finally:
            ledger.stop()
            watch.remove()
        run = replace(self.run, batch_size=batch_size, grad_accum=grad_accum)
        phases, loads = _phases_of(ledger, clocks), self.loads() or None
        timing = _timing(moments, grad_accum) if moments else None
        return Plan(run, self.num_parameters, phases, loads, timing)

    def loads(self) -> list[Load]:
        """Per rank, of the tensors that it steps whole; empty if all steps are of slices."""
        return [load for optimizer in self.optimizers for load in loads_of(optimizer)]

    def _step(
        self,
        batch_size: int,
        phase: Callable[[str], AbstractContextManager[None]],
        num_micro_batches: int,
    ) -> None:
        model = cast(ShardedModule, self.model)
        for index in range(num_micro_batches):
            with phase("forward"):
                shape = batch_size, self.run.seq_len
                input_ids, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
                with self.precision.forward_context():
                    # As under a strategy, whose pass is a step of the whole module.
                    loss = call_with(model, self._loss, input_ids, labels) / num_micro_batches
                if index == 0:
                    model.zero_grad()
            is_last = index == num_micro_batches - 1
            with phase("backward"), nullcontext() if is_last else model.no_sync():
                torch.autograd.backward(loss)
        with phase("step"):
            model.clip_grad_norm_(1.0)
            with self._standing_for(0.0):  # as suggestions say
                for optimizer in self.optimizers:
                    optimizer.step()

    def _standing_for(self, times: float) -> AbstractContextManager[None]:
        """Inside, an operation takes so many times its time, if there is a pace."""
        return self.pace.standing_for(times) if self.pace else nullcontext()

    def _loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        model = cast("PreTrainedModel", self.model)
        parts = body_and_head(model) if self.run.loss == "chunked" else None
        if parts is not None:
            inner, body, head = parts

            def loss_of_hidden(hidden: Tensor, labels: Tensor) -> Tensor:
                # Those left out are like the last.
                size = chunk_size_of(hidden, head.weight)
                times = max(1.0, labels.numel() / (_CHUNKS * size))
                with only_first_chunks(_CHUNKS), self._standing_for(times):
                    return linear_cross_entropy(hidden, head.weight, labels, head.bias)

            def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
                hidden = body(input_ids=input_ids, use_cache=False)[0]
                return call_with(head, loss_of_hidden, hidden, labels)

            # As the recipes: its own forward is not called, and it may be a unit.
            return call_with(inner, loss, input_ids, labels)
        logits = model(input_ids=input_ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _tell_owners(self, ledger: FakeLedger) -> None:
        flat_params = {
            flat_param for unit in units_in(self.model) for flat_param in unit.flat_params
        }
        ledger.tell(GATHERED, (flat_param.buffer.flat for flat_param in flat_params))
        ledger.tell("parameters", (flat_param.shard for flat_param in flat_params))
        for flat_param in flat_params:
            kept = kept_of(flat_param.communicator, flat_param.buffer.flat)
            ledger.tell("parameters", kept)
        ledger.tell("parameters", self.model.buffers())
        for optimizer in self.optimizers:
            ledger.tell("optimizer", map(_local, kept_by(optimizer)))
        for gradient in gradients(self.model).values():
            if gradient.state == "local":
                ledger.tell("local gradients", [gradient.local()])
            elif gradient.state == "reduced":
                ledger.tell("gradients", [gradient.shard])


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharded or not; not detached, which takes an operation."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(Tensor, to_local())


def _optimizers_for(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    matrices = matrices_of_blocks(model) if run.optimizer == "muon" else []
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices)] if matrices else []
    return [*optimizers, torch.optim.AdamW(others, fused=True)] if others else optimizers


def _timing(moments: list[Timing], grad_accum: int) -> Timing:
    """Of the whole step, in which the second micro-batch stands for those not run."""
    seen = moments[-1] - moments[0]
    num_left_out = grad_accum - (len(moments) - 2)
    return seen + (moments[2] - moments[1]) * num_left_out if num_left_out else seen


def _phases_of(ledger: FakeLedger, clocks: list[tuple[str, int, int]]) -> dict[str, PhaseBytes]:
    moments = ledger.moments(OWNERS)
    phases = {}
    for name in PHASES:
        ranges = [(start, stop) for phase, start, stop in clocks if phase == name]
        inside = [moments[i] for start, stop in ranges for i in range(start, stop + 1)]
        phases[name] = PhaseBytes(
            peak=max(inside, key=lambda of_owners: sum(of_owners.values())),
            most={owner: max(moment[owner] for moment in inside) for owner in OWNERS},
            resting=moments[ranges[-1][1]],
        )
    return phases


@contextmanager
def _group_of(rank: int, run: Run, pace: Pace | None) -> Iterator[DeviceMesh]:
    """A process group whose other ranks do not exist; with a pace, its collectives take time."""
    if dist.is_initialized():
        raise RuntimeError(
            "dry_run: expected a process without a process group, as it opens one of its own, got "
            f"one of {dist.get_world_size()} ranks. Plan before training, or in another process."
        )
    with ExitStack() as group:
        if pace is None:
            torch_internals.open_fake_group(run.world_size, rank)
            group.callback(dist.destroy_process_group)
        else:
            group.enter_context(simulated(pace.network, clock=pace.clock, rank=rank))
        size = run.shard_size or run.world_size
        shape = (run.world_size // size, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        in_pairs = exchanges_in_pairs(run.backend, size)
        kind = PairCommunicator if in_pairs else NarrowCommunicator
        communicator_of(mesh, kind=kind, state_over=run.state_over)
        yield mesh
