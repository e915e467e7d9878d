"""What each rank of ``hosts.py`` does: all arms in turns, timed, and their bytes counted.

Started by torchrun on every host, as ``python -m benchmarks.hosts_ranks SETTINGS.json``; each rank
writes what it measured beside the settings.

============== ========================================================================
arm            is
============== ========================================================================
flat_core      the core, ZeRO-3 over all ranks
flat_fsdp2     torch's FSDP2 likewise
hsdp_core      the core, ZeRO-3 in each host, replicas over the hosts
hsdp_fsdp2     torch's likewise
flat_core_x4   four micro-batches, gradients of each rank's own until the last
flat_core_x4s  four, gradients reduced with each
hsdp_core_x4   four, reduced in the host with each, averaged over hosts with the last
hsdp_core_x4l  four, gradients of each rank's own until the last, as ``flat_core_x4``
hsdp_fsdp2_x4  torch's as ``hsdp_core_x4`` (``set_requires_all_reduce``)
hfsdp_core     the core, ZeRO-3 in each host, optimizer state over all ranks
hfsdp_core_x4  four micro-batches, as ``hsdp_core_x4``
============== ========================================================================
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel

from benchmarks.core_step import blocks_of
from lightning_fsdp import shard_model
from lightning_fsdp.bench.arms import Arm as BenchArm
from lightning_fsdp.bench.arms import Workload
from lightning_fsdp.bench.theory import demand, model_units
from lightning_fsdp.core.ranks.groups import StateOver, way_of
from lightning_fsdp.core.ranks.hosts import BETWEEN_HOSTS
from lightning_fsdp.core.sharded_module import units_in
from lightning_fsdp.harness.gpt2 import build_gpt2
from tests.support.counting import CollectiveCounter
from tests.support.hosts import kernel_bytes

MICRO_BATCHES = 4
BATCH, SEQ, VOCABULARY = 1, 32, 4096


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        engine: ``core`` or ``fsdp2``.
        has_replicas: Whether each host holds a model.
        micro_batches: To an optimizer step.
        accumulation: ``local``: reduced with the last one; ``sum``: with each; ``replica``: with
            each in the host, over hosts with the last.
        state_over: Of the core: see :func:`~lightning_fsdp.fully_shard`.
    """

    engine: str
    has_replicas: bool
    micro_batches: int = 1
    accumulation: str = "sum"
    state_over: StateOver = "replica"


ARMS = {
    "flat_core": Arm("core", False),
    "flat_fsdp2": Arm("fsdp2", False),
    "hsdp_core": Arm("core", True),
    "hsdp_fsdp2": Arm("fsdp2", True),
    "flat_core_x4": Arm("core", False, MICRO_BATCHES, "local"),
    "flat_core_x4s": Arm("core", False, MICRO_BATCHES, "sum"),
    "hsdp_core_x4": Arm("core", True, MICRO_BATCHES, "replica"),
    "hsdp_core_x4l": Arm("core", True, MICRO_BATCHES, "local"),
    "hsdp_fsdp2_x4": Arm("fsdp2", True, MICRO_BATCHES, "replica"),
    "hfsdp_core": Arm("core", True, state_over="all"),
    "hfsdp_core_x4": Arm("core", True, MICRO_BATCHES, "replica", "all"),
}


@dataclass
class Measured:
    """Of one arm on one rank, a value for each timed step.

    Attributes:
        seconds: From a barrier to the end of the step.
        kernel_bytes: Sent and received by this host; on its first rank only.
        counted_bytes: That its ranks handed over for the other hosts, by the core's own counters or
            as torch's dispatcher saw them; in one step, by this rank.
        loss: The last.
        way: How the core moves data in its sharding group.
    """

    seconds: list[float] = field(default_factory=list)
    kernel_bytes: list[tuple[int, int]] = field(default_factory=list)
    counted_bytes: float = 0.0
    loss: float = 0.0
    way: str = ""


def build_model() -> GPT2LMHeadModel:
    """GPT-2 in small, the same weights everywhere: 17 MB."""
    return build_gpt2(
        num_layers=4, width=256, num_heads=4, vocabulary=VOCABULARY, num_positions=256
    )


def shard(arm: Arm, mesh: DeviceMesh) -> nn.Module:
    """A fresh model under an engine, over a mesh of one or two dimensions."""
    model = build_model()
    if arm.engine == "core":
        return shard_model(model, mesh=mesh, state_over=arm.state_over)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def train_one_step(
    arm: Arm, model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]
) -> float:
    """One optimizer step on the micro-batches of this rank."""
    for index, tokens in enumerate(batches):
        is_last = index == len(batches) - 1
        if arm.accumulation == "replica":
            model.set_requires_all_reduce(is_last)
        waits = arm.accumulation == "local" and not is_last
        with model.no_sync() if waits else contextlib.nullcontext():
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss / len(batches)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() * len(batches)


# -- bytes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Hosts and the ranks on each.

    Attributes:
        hosts: How many.
        ranks: On each.
    """

    hosts: int
    ranks: int

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks

    def share_that_leaves(self, engine: str) -> float:
        """Of what a rank sends to a flat group: to each other rank a part, or round a ring."""
        if engine == "core":
            return (self.world_size - self.ranks) / (self.world_size - 1)
        return 1 / self.ranks

    def ring(self, nbytes: float) -> float:
        """Sent by each rank in a gather round a ring over all ranks."""
        return nbytes * (self.world_size - 1) / self.world_size

    def mean_over_hosts(self, nbytes: float) -> float:
        """Sent by each rank to average its shard of so many bytes over the hosts.

        Or to reduce it to parts, and to gather as much of weights: the same bytes in one dtype.
        """
        return 2 * nbytes * (self.hosts - 1) / self.hosts


def theory(arm: Arm, shape: Shape) -> float:
    """Bytes that a host sends to others in one step, from the model's units.

    gloo's reduce-scatter, which FSDP2 asks for, is an all-reduce of the whole inside: twice the
    bytes. What ranks agree on, padding and what TCP adds is not in it.
    """
    model = build_model()
    units = model_units(model)
    total = sum(unit.nbytes for unit in units)
    if arm.has_replicas:
        return shape.ranks * shape.mean_over_hosts(total / shape.ranks)
    is_core = arm.engine == "core"
    bench_arm = BenchArm(
        engine="scratch" if is_core else arm.engine, zero_stage=3, batch_size=BATCH,
        grad_accum=arm.micro_batches,
    )  # fmt: skip
    workload = Workload(
        config=Path(), num_ranks=shape.world_size, accelerator="cpu", precision="32-true",
        warmup_steps=0, timed_steps=0, profiled_steps=0, observed_steps=0,
    )  # fmt: skip
    sent = demand(bench_arm, workload, units).sent_bytes
    assert sent is not None, "it depends on the model only"
    num_reductions = arm.micro_batches if arm.accumulation == "sum" else 1
    sent += (num_reductions * (1 if is_core else 2) - 1) * shape.ring(total)
    if not is_core:  # its root stays whole between forward and backward
        in_blocks = sum(p.nbytes for block in blocks_of(model) for p in block.parameters())
        sent -= arm.micro_batches * shape.ring(total - in_blocks)
    return shape.ranks * sent * shape.share_that_leaves(arm.engine)


class Counted:
    """Within, what this rank hands over for other hosts is counted."""

    def __init__(self, arm: Arm, model: nn.Module, mesh: DeviceMesh, shape: Shape) -> None:
        self._arm, self._shape = arm, shape
        self._communicators = {unit.communicator for unit in units_in(model)}
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self._seen = CollectiveCounter(*groups)
        self._before = self._core()

    def __enter__(self) -> Self:
        self._seen.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._seen.__exit__(*error)

    def _core(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for communicator in self._communicators:
            for kind, traffic in communicator.traffic.items():
                found[kind] = found.get(kind, 0) + traffic.sent_bytes
        return found

    def nbytes(self) -> float:
        arm, shape = self._arm, self._shape
        if arm.engine == "core":
            sent = {kind: nbytes - self._before[kind] for kind, nbytes in self._core().items()}
            if arm.has_replicas:
                return sent["all_reduce"] + sum(sent[k] for k in sent if k.endswith(BETWEEN_HOSTS))
            exchanged = sent["all_gather"] + sent["reduce_scatter"]
            return exchanged * shape.share_that_leaves("core")
        seen = {
            kind: sum(call.nbytes for call in self._seen.data() if call.kind == kind)
            for kind in ("all_gather", "reduce_scatter", "all_reduce")
        }
        if arm.has_replicas:
            return shape.mean_over_hosts(seen["all_reduce"])
        ring = shape.ring(seen["all_gather"] + 2 * seen["reduce_scatter"])
        return ring * shape.share_that_leaves("fsdp2")


# -- steps -----------------------------------------------------------------------------------------


def measure(names: Sequence[str], shape: Shape, warmup: int, rounds: int) -> dict[str, Measured]:
    """All arms in turns, a step each, so that a slow moment of the machine falls on all of them."""
    flat = init_device_mesh("cpu", (shape.world_size,), mesh_dim_names=("shard",))
    sizes = (shape.hosts, shape.ranks)
    hosts = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    arms = {name: ARMS[name] for name in names}
    meshes = {name: hosts if arm.has_replicas else flat for name, arm in arms.items()}
    models = {name: shard(arm, meshes[name]) for name, arm in arms.items()}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for name, model in models.items()
    }
    found = {name: Measured() for name in names}
    gc.collect()  # or it would walk all that was imported in the middle of some arm's step
    gc.freeze()
    generator = torch.Generator().manual_seed(dist.get_rank())
    is_first = dist.get_rank() % shape.ranks == 0
    for number in range(warmup + rounds):
        tokens = torch.randint(VOCABULARY, (MICRO_BATCHES, BATCH, SEQ), generator=generator)
        for name, arm in arms.items():
            batches = list(tokens[: arm.micro_batches])
            arguments = arm, models[name], optimizers[name], batches
            dist.barrier()
            if number == warmup - 1:  # what counts would slow down what is timed
                with Counted(arm, models[name], meshes[name], shape) as counted:
                    train_one_step(*arguments)
                found[name].counted_bytes = counted.nbytes()
                continue
            before = kernel_bytes()
            dist.barrier()  # or the other ranks of this host would have begun to send
            start = time.perf_counter()
            loss = train_one_step(*arguments)
            seconds = time.perf_counter() - start
            dist.barrier()
            after = kernel_bytes()
            if number >= warmup:
                found[name].seconds.append(seconds)
                found[name].loss = loss
                if is_first:
                    sent, received = (b - a for a, b in zip(before, after, strict=True))
                    found[name].kernel_bytes.append((sent, received))
    for name, arm in arms.items():
        if arm.engine == "core":
            ways = {way_of(unit.communicator) for unit in units_in(models[name])}
            found[name].way = ", ".join(sorted(ways))
    return found


def main() -> None:
    """Measure, and write it down."""
    path = Path(sys.argv[1])
    settings = json.loads(path.read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = Shape(settings["hosts"], settings["ranks"])
    found = measure(settings["arms"], shape, settings["warmup"], settings["rounds"])
    result = {name: asdict(measured) for name, measured in found.items()}
    (path.parent / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
