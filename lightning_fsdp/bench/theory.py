"""What an engine and stage demand of the network, worked out from the model's units.

Gathers of each unit per optimizer step of ``A`` micro-batches, and reductions; a *first* unit holds
embeddings only, so that nothing is computed behind it; the *last* one ends the forward and begins
the backward; a *shared* weight belongs to the first and to the last unit (embedding and head):

============ ======================================= ===================== ==================
             ZeRO-3 gathers                          ZeRO-2 gathers        reductions
============ ======================================= ===================== ==================
scratch      2A; first A; last A; shared 2A          1                     1
fsdp2        2A                                      1                     1
fsdp1        2A; shared A                            1                     1
ddp          none                                    none                  1, of everything
single       none                                    none                  none
============ ======================================= ===================== ==================

Over replicas, each reduction is followed by one all-reduce of the shard.

The core keeps the last unit whole for the backward, once a first step has shown that it comes first
there. It sends a shared weight alone; FSDP2 makes one unit of the units that share it; FSDP1 leaves
it to its root, which stays whole from forward to backward, and makes a unit of each single module.

Padding, the ranks' agreements, and the few bytes of a norm are not in it. Payload is what tensors a
rank hands over, as the measured one: a shard to a gather, everything to a reduction. Between up to
eight ranks of gloo the core hands each peer its part instead. So payloads of different engines do
not compare: what leaves a rank does, and the report shows that.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.documents import PerStep
from lightning_fsdp.core import grouping
from lightning_fsdp.core.ranks.pairs import exchanges_in_pairs
from lightning_fsdp.units import find_units

Role = Literal["first", "inner", "last", "shared"]
# Times that a unit is gathered in a micro-batch under ZeRO-3, where that is not twice.
_GATHERS: dict[str, dict[Role, int]] = {
    "scratch": {"first": 1, "last": 1}, "fsdp1": {"shared": 1}, "fsdp2": {},
}  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """Per rank and optimizer step.

    Attributes:
        collectives: Calls by kind; ``None`` where they depend on more than the model.
        payload_bytes: Bytes of the tensors passed to them, as the measured ones are counted.
        sent_bytes: Bytes that have to leave a rank, whichever way.
    """

    collectives: dict[str, int] | None = None
    payload_bytes: PerStep | None = None
    sent_bytes: PerStep | None = None


class UnitFacts(NamedTuple):
    """Parameters that travel together.

    Attributes:
        nbytes: Of the whole parameters.
        role: See above; a unit that shares a weight is without it.
        num_modules: That hold them.
        partners: Which entries FSDP2 makes one unit of, by a common number.
    """

    nbytes: int
    role: Role
    num_modules: int = 1
    partners: int = 0


def model_units(module: nn.Module) -> list[UnitFacts]:
    """Of a module that is not sharded."""
    plans = grouping.plan_units(module, find_units(module, None), set(), set())
    numbers = {id(plan): number for number, plan in enumerate(plans)}
    flat_params = grouping.cut_flat_params(plans)
    for flat_param in flat_params:
        together = {numbers[id(user)] for user in flat_param.users}
        joined = dict.fromkeys(together, min(together))
        numbers = {key: joined.get(number, number) for key, number in numbers.items()}
    order = {inner: position for position, inner in enumerate(module.modules())}
    last = max(plans, key=lambda plan: _end_of(plan, order), default=None)
    return [
        UnitFacts(
            sum(parameter.nbytes for parameter in flat_param.parameters),
            _role(flat_param.users, last),
            _num_modules(flat_param),
            numbers[id(flat_param.users[0])],
        )
        for flat_param in flat_params
    ]


def demand(arm: Arm, workload: Workload, units: Sequence[UnitFacts]) -> Demand:
    """What one optimizer step takes, by the table above; reductions are in the parameters' dtype.

    Args:
        arm: That trains; all but the last of its micro-batches keep their gradients on the rank.
        workload: What it does. In mixed precision weights are gathered in half the bytes.
        units: Of the model before sharding.
    """
    engine, world_size = arm.engine, arm.num_processes(workload)
    if world_size == 1:  # which has nothing to send to anybody
        return Demand({}, 0, 0)
    num_shards = arm.num_shards(workload)
    bytes_share = 0.5 if workload.precision.endswith("-mixed") else 1.0
    backend = "nccl" if workload.accelerator == "cuda" else "gloo"
    total = sum(unit.nbytes for unit in units)
    if engine == "ddp":
        return Demand(None, total, sent_bytes({"all_reduce": total}, world_size))
    gathered, calls = 0.0, dict[Hashable, int]()
    for number, unit in enumerate(units):
        times = 1 if arm.zero_stage == 2 else arm.grad_accum * _GATHERS[engine].get(unit.role, 2)
        gathered += times * unit.nbytes * bytes_share
        calls |= dict.fromkeys(_wrappers(engine, number, unit), times)
    collectives = {"all_gather": sum(calls.values()), "reduce_scatter": len(calls)}
    payload_of = {"all_gather": gathered / num_shards, "reduce_scatter": total}
    if engine == "scratch" and exchanges_in_pairs(backend, num_shards):
        payload_of = {"send": (gathered + total) * (num_shards - 1) / num_shards}
    if num_shards < world_size:  # then each shard is averaged over the replicas, once a step
        collectives["all_reduce"] = len(calls)
        payload_of["all_reduce"] = total / num_shards
    sent = sent_bytes(payload_of, world_size, shard_size=num_shards)
    return Demand(collectives, sum(payload_of.values()), sent)


def sent_bytes(
    payload_of: dict[str, float], world_size: int, *, shard_size: int | None = None
) -> float:
    """Bytes that have to leave a rank for what it passed to collectives, by kind.

    Args:
        payload_of: By kind.
        world_size: Ranks.
        shard_size: Those that hold one model together, if not all; what is summed over all ranks
            then goes over the replicas.
    """
    num_shards = shard_size or world_size
    num_summed = world_size if num_shards == world_size else world_size // num_shards
    share = {
        "all_gather": num_shards - 1.0,
        "reduce_scatter": 1 - 1 / num_shards,
        "all_to_all": 1 - 1 / num_shards,
        "all_reduce": 2 * (1 - 1 / num_summed),
    }
    return sum(nbytes * share.get(kind, 1.0) for kind, nbytes in payload_of.items())


def _wrappers(engine: str, number: int, unit: UnitFacts) -> list[Hashable]:
    """What the engine makes of a unit, a call each; FSDP2's groups and FSDP1's root have several.

    Args:
        engine: That shards.
        number: Of the unit; the core makes one flat parameter of it.
        unit: Itself.
    """
    if engine == "fsdp2":
        return [unit.partners]
    if engine == "fsdp1":
        is_shared = unit.role == "shared"
        return ["root"] if is_shared else [(number, i) for i in range(unit.num_modules)]
    return [number]


def _end_of(plan: grouping.UnitPlan, order: dict[nn.Module, int]) -> tuple[int, int]:
    """Later for a unit whose forward ends later; an enclosing one's ends after those inside it."""
    inside = (order[inner] for module in plan.modules for inner in module.modules())
    return max(inside), -order[plan.modules[0]]


def _role(users: Sequence[grouping.UnitPlan], last: grouping.UnitPlan | None) -> Role:
    if len(users) > 1:
        return "shared"
    inside = [inner for module in users[0].modules for inner in module.modules()]
    holders = [inner for inner in inside if any(True for _ in inner.parameters(recurse=False))]
    if all(isinstance(holder, nn.Embedding) for holder in holders):
        return "first"
    return "last" if users[0] is last else "inner"


def _num_modules(flat_param: grouping.FlatParameterPlan) -> int:
    """Modules of the unit, below which the parameters are."""
    mine = set(flat_param.parameters)
    return sum(not mine.isdisjoint(module.parameters()) for module in flat_param.users[0].modules)
