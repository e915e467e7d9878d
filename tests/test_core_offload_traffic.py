"""Offloading: what moves between host and device, when, and where things are."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp

from lightning_fsdp import (
    full_state_dict,
    fully_shard,
    gradients,
    shard_model,
)
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from tests.support.counting import CollectiveCounter
from tests.support.memory import optimizer_tensors
from tests.support.models import TASKS, causal_lm, mlp, shard_lm_by_hand
from tests.support.offloaded import OFFLOAD, POLICIES, flat_params_of, stages_of
from tests.support.parity import (
    PLANS,
    adamw,
    make_batches,
    train_on_rank,
)
from tests.support.places import DEVICE, HOST, TwoPlaces
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def traffic_of(model):
    """Calls and bytes to the device, and to the host."""
    homes = {flat_param.home for flat_param in flat_params_of(model)}
    return {
        way: (
            sum(home.traffic[way].calls for home in homes),
            sum(home.traffic[way].sent_bytes for home in homes),
        )
        for way in ("to_device", "to_host")
    }


def moved_since(before, model):
    after = traffic_of(model)
    return {
        way: tuple(a - b for a, b in zip(after[way], before[way], strict=True)) for way in after
    }


# --- what passes the door ---


def _count(rank, world_size, plan, precision, num_micro_batches):
    task, policy = TASKS["lm"], POLICIES[precision]
    model = shard_model(
        task.build(), PLANS[plan], units=["Block"], mp_policy=policy, offload_policy=OFFLOAD
    )
    optimizer = adamw(model.parameters())
    batches = make_batches(
        task.make_batch,
        num_steps=3,
        num_micro_batches=num_micro_batches,
        world_size=world_size,
    )
    train_on_rank(model, batches[:1], task.loss, optimizer, rank)
    before = traffic_of(model)
    with CollectiveCounter() as counter:
        for micro_batch in batches[1][:-1]:
            with model.no_sync():
                task.loss(model, micro_batch[rank]).backward()
        task.loss(model, batches[1][-1][rank]).backward()
        optimizer.step()
    moved = moved_since(before, model)
    gathered = counter.num_gathers(world_size), counter.gathered_bytes(world_size)
    num_reductions = counter.num_reductions(world_size)
    numels = [flat_param.layout.shard_numel for flat_param in flat_params_of(model)]
    return moved, gathered, num_reductions, numels


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("precision", "gather_bytes", "reduce_bytes"), [("fp32", 4, 4), ("bf16", 2, 4)]
)
def test_one_shard_goes_in_per_gather_and_one_comes_out_per_reduction(
    precision, gather_bytes, reduce_bytes, num_micro_batches
):
    """In the dtype of the whole copy, and of the reduction: in bf16 half the bytes travel."""
    for plan in PLANS:
        for moved, gathered, num_reductions, numels in run_on_ranks(
            _count, 2, plan, precision, num_micro_batches, backend=PLAIN
        ):
            # Two ranks: what came from the other one is as large as the own shard.
            assert moved["to_device"] == gathered, plan
            assert moved["to_host"] == (num_reductions, sum(numels) * reduce_bytes), plan
            assert num_reductions == len(numels), plan
            if plan == "zero2":  # whole from the first forward to the step
                assert moved["to_device"] == (len(numels), sum(numels) * gather_bytes)


def _count_resident(rank, world_size):
    model = shard_model(mlp(), offload_policy=torch_fsdp.OffloadPolicy())
    TASKS["mlp"].loss(model, TASKS["mlp"].make_batch(0, 0, rank)).backward()
    assert flat_params_of(model)[0].home.policy is None
    return traffic_of(model)


def test_without_offloading_nothing_is_copied():
    nothing = {"to_device": (0, 0), "to_host": (0, 0)}
    assert run_on_ranks(_count_resident, 2) == [nothing] * 2


def _see_states(rank, world_size):
    """At each reduction, how far the two before it are."""
    model = shard_lm_by_hand(causal_lm(), fully_shard, offload_policy=OFFLOAD)
    task, order, seen = TASKS["lm"], [], []
    reduce = FlatParameter.reduce

    def noting(self):
        seen.append([stages_of(flat_param) for flat_param in order[-2:]])
        order.append(self)
        return reduce(self)

    with mock.patch.object(FlatParameter, "reduce", noting):
        task.loss(model, task.make_batch(0, 0, rank)).backward()
    assert {stages_of(flat_param) for flat_param in order} == {None}
    return seen


def test_a_copy_to_the_host_is_waited_for_one_reduction_later():
    (seen, _) = run_on_ranks(_see_states, 2)
    assert seen[2:] == [[None, 0]] * (len(seen) - 2)
    assert len(seen) == 7


# --- where things are ---


def _see_places(rank, world_size, policy, from_meta):
    task, found = TASKS["lm"], {}
    with TwoPlaces() as places:
        torch.manual_seed(3)
        with torch.device("meta" if from_meta else "cpu"):
            model = causal_lm()
        shard_model(model, offload_policy=policy)
        optimizer = adamw(model.parameters())
        with model.no_sync():
            task.loss(model, task.make_batch(0, 0, rank)).backward()
        found["local gradient"] = {places.place_of(g.local()) for g in gradients(model).values()}
        task.loss(model, task.make_batch(0, 1, rank)).backward()
        optimizer.step()
        found["parameter"] = {places.place_of(p) for p in model.parameters()}
        found["gradient"] = {places.place_of(p.grad) for p in model.parameters()}
        found["optimizer state"] = {places.place_of(t) for t in optimizer_tensors(optimizer)}
        found["whole copy"] = {places.place_of(s.buffer.flat) for s in flat_params_of(model)}
        found["whole"] = {places.place_of(whole) for _, whole in gradients(model).full()}
        found["whole"] |= {places.place_of(value) for value in full_state_dict(model).values()}
    assert places.mixtures == []
    return {what: place - {None} for what, place in found.items()}  # a slice may be empty


@pytest.mark.parametrize("from_meta", [False, True])
@pytest.mark.parametrize(
    "policy", [OFFLOAD, torch_fsdp.CPUOffloadPolicy(pin_memory=False)], ids=["ours", "torch's"]
)
def test_what_stays_is_on_the_host_and_what_computes_is_on_the_device(policy, from_meta):
    for found in run_on_ranks(_see_places, 2, policy, from_meta):
        assert found == {
            "local gradient": {DEVICE},
            "parameter": {HOST},
            "gradient": {HOST},
            "optimizer state": {HOST},
            "whole copy": {DEVICE},
            "whole": {HOST},
        }


def _see_mixtures(rank, world_size):
    with TwoPlaces() as places:
        model = shard_model(mlp(), offload_policy=OFFLOAD)
        flat_param = flat_params_of(model)[0]
        flat_param.unshard(model)
        flat_param.buffer.flat[: flat_param.shard.numel()].copy_(flat_param.shard)
        dist.all_reduce(flat_param.shard)
    return places.mixtures


def test_the_meter_sees_copies_beside_the_door_and_collectives_on_the_host():
    assert run_on_ranks(_see_mixtures, 1) == [["copy_", "allreduce_"]]
