"""Shards, reduced gradients and optimizer state on the host: the same bits as without, and between
host and device nothing moves but one shard in per gather and one out per reduction.

Machines without an accelerator have one memory; ``TwoPlaces`` tells two in it.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import (
    ZERO2,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    gradients,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    shard_model,
    weights,
)
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.sharded_module import units_in
from tests.support.counting import CollectiveCounter
from tests.support.late_copies import LateCopies
from tests.support.memory import optimizer_tensors
from tests.support.models import TASKS, causal_lm, mlp, shard_lm_by_hand
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    adamw,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    on_host,
    train_on_rank,
    train_reference,
)
from tests.support.places import DEVICE, HOST, TwoPlaces
from tests.support.ranks import PLAIN, errors_on_ranks, run_on_ranks
from tests.test_core_parity import batches_for, optional_batch, optional_loss
from tests.test_core_wrong_use import assert_errors

POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
    "bf16 reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
# Every two of a plan, a precision and a way to accumulate.
COMBINATIONS = [
    ("zero2", "fp32", "local"),
    ("zero2", "bf16", "sum"),
    ("zero2", "bf16 reduce", "local"),
    ("zero3", "fp32", "sum"),
    ("zero3", "bf16", "local"),
    ("zero3", "bf16 reduce", "sum"),
]
CLIP = (0.3, 2.0)  # below the norms here


def flat_params_of(model):
    return list(dict.fromkeys(s for unit in units_in(model) for s in unit.flat_params))


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


# --- values ---


def train_each_way(
    rank, world_size, task_name, offload, mesh_shape, clip, combinations=COMBINATIONS
):
    """A trace for each combination."""
    task, traces = TASKS[task_name], {}
    mesh = None
    if mesh_shape is not None:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    for plan, precision, accumulation in combinations:
        model = shard_model(
            task.build(),
            PLANS[plan],
            mesh=mesh,
            mp_policy=POLICIES[precision],
            offload_policy=offload,
        )
        traces[plan, precision, accumulation] = train_on_rank(
            model,
            batches_for(task_name, world_size, num_steps=2),
            task.loss,
            adamw(model.parameters()),
            rank,
            accumulation=accumulation,
            clip=clip,
        )
    return traces


def _train_offloaded(*args):
    with TwoPlaces() as places:
        traces = train_each_way(*args)
    assert places.mixtures == []
    return traces


def _train(rank, world_size, task_name, *how):
    """Offloaded, and resident."""
    offloaded = _train_offloaded(rank, world_size, task_name, OFFLOAD, *how)
    return offloaded, train_each_way(rank, world_size, task_name, None, *how)


SEPARATE, SUMMED = COMBINATIONS[::2], COMBINATIONS[1::2]


@pytest.mark.parametrize(
    ("task_name", "world_size", "backend", "mesh_shape", "clip", "combinations"),
    [
        ("mlp", 1, "gloo", None, CLIP, SUMMED),
        ("mlp", 2, "gloo", None, CLIP, COMBINATIONS),
        ("mlp", 2, PLAIN, None, None, SUMMED),
        ("mlp", 4, "gloo", (2, 2), None, SEPARATE),
        ("tied_lm", 2, "gloo", None, CLIP, SEPARATE),
        ("tied_lm", 4, "gloo", (2, 2), CLIP, SUMMED[:2]),
    ],
)
def test_training_offloaded_gives_the_same_bits(
    task_name, world_size, backend, mesh_shape, clip, combinations
):
    how = (mesh_shape, clip, combinations)
    offloaded, resident = zip(
        *run_on_ranks(_train, world_size, task_name, *how, backend=backend), strict=True
    )
    task = TASKS[task_name]
    for combination in combinations:
        traces = [traces[combination] for traces in offloaded]
        assert_ranks_agree(traces, str(combination))
        assert_traces_match(traces[0], resident[0][combination], atol=0, what=str(combination))
        if combination[1] == "fp32":
            batches = batches_for(task_name, world_size, num_steps=2)
            expected = train_reference(task.build(), batches, task.loss, adamw, clip=clip)
            assert_traces_match(traces[0], expected, atol=task.atol, what=str(combination))


def _train_with_late_copies(rank, world_size, mesh_shape):
    with LateCopies() as copies:
        traces = _train_offloaded(rank, world_size, "mlp", OFFLOAD, mesh_shape, CLIP)
        assert copies.num_queued
    return traces


@pytest.mark.parametrize(
    ("backend", "mesh_shape"), [(PLAIN, None), ("late", None), ("early", (2, 1))]
)
def test_copies_that_run_late_change_no_bit(backend, mesh_shape):
    late = run_on_ranks(_train_with_late_copies, 2, mesh_shape, backend=backend)
    resident = _trained_resident(mesh_shape)
    for combination in COMBINATIONS:
        assert_traces_match(late[0][combination], resident[combination], atol=0)


@functools.cache
def _trained_resident(mesh_shape):
    return run_on_ranks(train_each_way, 2, "mlp", None, mesh_shape, CLIP)[0]


def _write_after_forward(rank, world_size, plan):
    """Nothing between a gather and a write to the shard waits for the device."""
    with LateCopies():
        model = shard_model(mlp(), PLANS[plan], offload_policy=OFFLOAD)
        with torch.no_grad():
            before = model(torch.ones(1, 7))
            for parameter in model.parameters():
                parameter.zero_()
            after = model(torch.ones(1, 7))
    assert before.any()
    assert not after.any()


@pytest.mark.parametrize("plan", PLANS)
def test_a_write_to_weights_leaves_a_copy_on_its_way_alone(plan):
    run_on_ranks(_write_after_forward, 2, plan)


def _train_with_optional_parameter(rank, world_size, offload):
    batches = make_batches(
        optional_batch(USERS), num_steps=len(USERS), num_micro_batches=1, world_size=world_size
    )
    model = shard_model(mlp(), offload_policy=offload)
    return train_on_rank(model, batches, optional_loss, adamw(model.parameters()), rank)


USERS = [{1}, set(), {0, 1}]


def test_a_parameter_that_no_rank_used_has_no_gradient():
    offloaded, resident = (
        run_on_ranks(_train_with_optional_parameter, 2, offload)[0] for offload in (OFFLOAD, None)
    )
    assert resident.gradients[1]["bonus"] is None
    assert_traces_match(offloaded, resident, atol=0)


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


def stages_of(flat_param):
    """How many stages of its reduction are to come (the copy is the last); ``None``: it landed."""
    return None if flat_param._reduction is None else len(flat_param._reduction.stages)


def _see_states(rank, world_size):
    """At each reduction, how far the two before it are."""
    model = shard_lm_by_hand(causal_lm(), fully_shard, offload_policy=OFFLOAD)
    task, order, seen = TASKS["lm"], [], []
    reduce = FlatParameter.reduce

    def noting(self):
        seen.append([stages_of(flat_param) for flat_param in order[-2:]])
        order.append(self)
        return reduce(self)

    FlatParameter.reduce = noting
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


# --- what surrounds a step ---


def _access(rank, world_size, offload):
    task, seen = TASKS["mlp"], []
    with TwoPlaces() if offload else contextlib.nullcontext() as places:
        model = shard_model(task.build(), offload_policy=offload)
        g = gradients(model)

        def on_reduced(name, shard, micro_batch):
            assert offload is None or places.place_of(shard) in (HOST, None)
            seen.append((name, shard.clone(), micro_batch))
            shard.mul_(2)

        g.on_reduced(on_reduced)
        with g.micro_batches("separate"):
            for micro_batch in range(2):
                task.loss(model, task.make_batch(0, micro_batch, rank)).backward()
        results = {
            "norm": g.norm(),
            "dot": g.dot(0, 1),
            **{f"{name} of 1": whole for name, whole in g.full(micro_batch=1)},
            **{f"whole {name}": g[name].full() for name in g},
            **{f"weight {name}": whole for name, whole in weights(model).full()},
            **{f"{name} as it came {n}": shard for name, shard, n in seen},
        }
        with g.micro_batches("local"):
            task.loss(model, task.make_batch(0, 2, rank)).backward()
        results.update({f"then {name}": g[name].full() for name in g})
    assert offload is None or places.mixtures == []
    return results


def test_gradients_and_weights_are_accessed_as_without_offloading():
    offloaded, resident = (run_on_ranks(_access, 2, offload) for offload in (OFFLOAD, None))
    for ours, theirs in zip(offloaded, resident, strict=True):
        assert_same_tensors(ours, theirs, atol=0)


def _save_and_load(rank, world_size, offload):
    task = TASKS["lm"]
    with TwoPlaces() if offload else contextlib.nullcontext() as places:
        model = shard_model(task.build(), offload_policy=offload)
        optimizer = adamw(model.parameters())
        batches = batches_for("lm", world_size, num_steps=3)
        train_on_rank(model, batches[:2], task.loss, optimizer, rank)
        state, optimizer_state = full_state_dict(model), full_optimizer_state_dict(optimizer)
        again = shard_model(causal_lm(seed=5), ZERO2, offload_policy=offload)
        resumed = adamw(again.parameters())
        load_full_state_dict(again, state)
        load_full_optimizer_state_dict(resumed, optimizer_state)
        traces = [
            train_on_rank(each, batches[2:], task.loss, its_optimizer, rank)
            for each, its_optimizer in ((model, optimizer), (again, resumed))
        ]
    assert offload is None or places.mixtures == []
    moments = {n: s["exp_avg"] for n, s in optimizer_state["state"].items()}
    return state, moments, traces


def test_state_is_saved_and_loaded_as_without_offloading():
    (offloaded, _), (resident, _) = (
        run_on_ranks(_save_and_load, 2, offload) for offload in (OFFLOAD, None)
    )
    for ours, theirs in zip(offloaded[:2], resident[:2], strict=True):
        assert_same_tensors(ours, theirs, atol=0)
    for trace in offloaded[2]:
        assert_traces_match(trace, resident[2][0], atol=0)


class _Failing(nn.Module):
    """Three layers; the backward fails in the first while gradients of the last come home."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.fails = False

    def forward(self, inputs):
        for index, layer in enumerate(self.layers):
            inputs = layer(inputs)
            if index == 0 and self.fails:
                inputs.register_hook(_fail)
        return inputs


def _fail(gradient):
    raise ArithmeticError("in the middle of a backward")


def _go_on_after_failure(rank, world_size, offload, fails):
    torch.manual_seed(1)
    model = shard_model(_Failing(), units=["Linear"], offload_policy=offload)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for model.fails in [fails, False]:
        optimizer.zero_grad()
        try:
            model(torch.full((2, 5), 1.0 + rank)).square().mean().backward()
        except ArithmeticError:
            assert offload is None or 0 in map(stages_of, flat_params_of(model))
    optimizer.step()
    return full_state_dict(model)


def test_after_an_exception_the_next_step_is_right():
    expected = run_on_ranks(_go_on_after_failure, 2, None, False)
    assert_same_tensors(
        run_on_ranks(_go_on_after_failure, 2, OFFLOAD, True)[0], expected[0], atol=0
    )


# --- what is refused ---


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def _wrong(rank, world_size, what):
    model = mlp()
    if what == "no policy":
        fully_shard(model, offload_policy="cpu")
    elif what == "pinned":
        fully_shard(model, offload_policy=CPUOffloadPolicy())
    elif what == "pinned, torch's":
        fully_shard(model, offload_policy=torch_fsdp.CPUOffloadPolicy())
    elif what == "ranks differ":
        fully_shard(model, offload_policy=OFFLOAD if rank == 0 else None)
    elif what == "tied":
        tied = _Tied()
        fully_shard(tied.first, offload_policy=OFFLOAD)
        fully_shard(tied.second)
    elif what == "moved":
        fully_shard(model, offload_policy=OFFLOAD).to("meta")(torch.ones(2, 7))


no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="memory can be pinned here"
)


@pytest.mark.parametrize(
    ("what", "types", "words"),
    [
        ("no policy", "TypeError", ["offload_policy", "CPUOffloadPolicy", "'cpu'"]),
        pytest.param("pinned", "ValueError", ["pin_memory=False"], marks=no_accelerator),
        pytest.param("pinned, torch's", "ValueError", ["pin_memory=False"], marks=no_accelerator),
        ("ranks differ", "RuntimeError", ["ranks disagree", "CPUOffloadPolicy", "not offloaded"]),
        ("tied", "ValueError", ["unit 'Linear'", "one offload_policy", "CPUOffloadPolicy", "None"]),
        ("moved", "RuntimeError", ["mix", "that was sharded", "another object"]),
    ],
)
def test_what_cannot_be_offloaded_is_named(what, types, words):
    assert_errors(errors_on_ranks(_wrong, 2, what), types, *words)


# --- on an accelerator ---


def _train_on_gpu(rank, world_size, offload, precision):
    task = TASKS["mlp"]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = shard_model(task.build(), mp_policy=POLICIES[precision], offload_policy=offload)
    optimizer = adamw(model.parameters())
    batches = [
        [[{key: value.cuda() for key, value in rank.items()} for rank in micro] for micro in step]
        for step in batches_for("mlp", 1, num_steps=3)
    ]
    trace = train_on_rank(model, batches, task.loss, optimizer, 0, accumulation="sum", clip=CLIP)
    task.loss(model, batches[0][0][0]).backward()
    is_pinned = offload is not None and offload.pin_memory
    device = "cuda" if offload is None else "cpu"
    with pytest.raises(RuntimeError, match="keeps its dtype and device"):
        model.to("cuda" if device == "cpu" else "cpu")
    # A gradient that travels in the reduce dtype is widened where it arrives.
    is_widened = precision == "bf16 reduce"
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            assert tensor.device.type == tensor.to_local().device.type == device
        assert parameter.to_local().is_pinned() == is_pinned
        assert parameter.grad.to_local().is_pinned() == (is_pinned and not is_widened)
    assert {s.buffer.flat.device.type for s in flat_params_of(model)} == {"cuda"}
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == device
    return on_host(trace)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", list(POLICIES))
@pytest.mark.parametrize("pin_memory", [True, False])
def test_on_a_gpu_shards_are_in_pinned_memory_and_values_are_equal(pin_memory, precision):
    """The optimizer steps on another processor: its last bits may differ."""
    offload = CPUOffloadPolicy(pin_memory=pin_memory)
    offloaded, resident = (
        run_on_ranks(_train_on_gpu, 1, each, precision, backend=None)[0] for each in (offload, None)
    )
    assert_traces_match(offloaded, resident, atol=1e-6 if precision == "fp32" else 1e-3)
