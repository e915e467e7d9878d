"""Optimizers that were built before torch's FSDP2 or this core sharded the model.

Judged by plain training in one process with the same optimizer.
"""

import copy
import itertools

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_fsdp import ShardedTensor, optimizers_follow
from tests.support.built_before import SHARDERS, params, shard
from tests.support.cases import each_on_ranks
from tests.support.models import TASKS, causal_lm, lm_loss, token_batch
from tests.support.parity import (
    OPTIMIZERS,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    train_on_rank,
    train_reference,
    whole,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

KINDS = {"fsdp2": DTensor, "core": ShardedTensor}

STEPS = 3


def _batches(world_size, first=0, num_steps=STEPS):
    return make_batches(
        token_batch, num_steps=first + num_steps, num_micro_batches=1, world_size=world_size
    )[first:]


def _assert_holds(optimizer, model, kind):
    """Every parameter of the model once, and nothing else; state under them and sharded."""
    assert sorted(map(id, params(optimizer))) == sorted(map(id, model.parameters()))
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    assert all(isinstance(p, kind) for p in params(optimizer))
    for state in optimizer.state.values():
        for key, value in state.items():
            assert isinstance(value, kind) or key == "step", (key, type(value))


def _train(rank, world_size, case, name, meta):
    engine, optimizer_name = case
    build = TASKS[name].build
    batches, make_optimizer = _batches(world_size), OPTIMIZERS[optimizer_name]
    reference = build()
    start = copy.deepcopy(reference.state_dict())
    if meta:
        with torch.device("meta"):
            model = build()
    else:
        model = build()
    optimizer = make_optimizer(model.parameters())
    groups = list(optimizer.param_groups)
    with optimizers_follow(model, optimizer):
        shard(model, engine)
        if meta == "inside":
            model.to_empty(device="cpu")
    if meta == "outside":
        model.to_empty(device="cpu")
    if meta:
        with torch.no_grad():
            for key, value in model.state_dict().items():
                sharded = fsdp_tensor(value, start[key])
                value.copy_(sharded)
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    _assert_holds(optimizer, model, KINDS[engine])
    trace = train_on_rank(model, batches, lm_loss, optimizer, rank)
    _assert_holds(optimizer, model, KINDS[engine])
    expected = train_reference(reference, batches, lm_loss, make_optimizer)
    assert_traces_match(trace, expected, atol=5e-6, what=f"{engine} {name}")
    for key, value in trace.parameters[-1].items():
        assert not torch.equal(value, start[key]), f"{key} did not train"
    return trace


def fsdp_tensor(like, value):
    return torch.distributed.tensor.distribute_tensor(
        value, like.device_mesh, like.placements, src_data_rank=None
    )


@pytest.mark.parametrize("name", ["lm", "tied_lm", "gpt2"])
def test_an_optimizer_built_before_trains_as_in_one_process(name):
    every = itertools.product(SHARDERS, OPTIMIZERS)
    cases = tuple(every) if name == "tied_lm" else tuple(zip(SHARDERS, OPTIMIZERS, strict=False))
    for case, traces in each_on_ranks(_train, 2, cases, name, None).items():
        assert_ranks_agree(traces, str(case))


@pytest.mark.parametrize(
    ("where", "name"), [("inside", "lm"), ("inside", "tied_lm"), ("outside", "tied_lm")]
)
def test_a_model_on_the_meta_device_may_be_materialized_inside_or_afterwards(name, where):
    run_on_ranks(_train, 2, ("fsdp2", "adamw"), name, where)


def _continue(rank, world_size, engine, mesh_shape, offloads):
    """Two groups, a scheduler and a scaler; some steps whole, then some sharded."""
    before, after = _batches(world_size), _batches(world_size, STEPS, 4)
    traces = []
    for is_sharded in (True, False):
        model = causal_lm(tied=True)
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.5, "name": "decayed"},
                {"params": others, "lr": 1e-2, "betas": (0.8, 0.9)},
            ],
            lr=1e-3,
            eps=1e-6,
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        train_reference(model, before, lm_loss, lambda _: optimizer)  # noqa: B023
        if is_sharded:
            options = {}
            if mesh_shape:
                options["mesh"] = init_device_mesh(
                    "cpu", mesh_shape, mesh_dim_names=("replicate", "shard")
                )
            if offloads:
                options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=False)
            with optimizers_follow(model, optimizer):
                shard(model, engine, **options)
            _assert_holds(optimizer, model, KINDS[engine])
            assert [len(g["params"]) for g in optimizer.param_groups] == [len(decayed), len(others)]
            assert settings == [
                {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
            ]
            _assert_state_is_cut(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in after:
            batches = [step[0][rank]] if is_sharded else step[0]
            loss = sum(lm_loss(model, batch) for batch in batches) / len(batches)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        steps = {state["step"].item() for state in optimizer.state.values()}
        assert steps == {STEPS + len(after)}
        assert (
            schedule.get_last_lr() == [g["lr"] for g in optimizer.param_groups] == [2.5e-4, 2.5e-3]
        )
        moments = {
            f"{name} {key}": whole(optimizer.state[parameter][key])
            for name, parameter in model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }
        traces.append(({n: whole(p) for n, p in model.named_parameters()}, moments))
    (ours, our_moments), (theirs, their_moments) = traces
    # Adam at 1e-2 enlarges rounding; state that was lost or cut wrongly shows from 1e-4 on.
    assert_same_tensors(ours, theirs, atol=2e-5, what="parameter")
    assert_same_tensors(our_moments, their_moments, atol=5e-6, what="state")


def _assert_state_is_cut(optimizer):
    """Each rank holds its part, and no entry is a view of the whole that it was cut from."""
    moments = [v for s in optimizer.state.values() for key, v in s.items() if key != "step"]
    locals_ = [moment.to_local() for moment in moments]
    assert all(local.untyped_storage().nbytes() == local.nbytes for local in locals_)
    assert sum(map(torch.numel, locals_)) < 0.7 * sum(moment.numel() for moment in moments)


@pytest.mark.parametrize(
    ("engine", "world_size", "mesh_shape", "offloads"),
    [
        ("fsdp2", 3, None, False),
        ("fsdp2", 2, None, True),
        ("fsdp2", 4, (2, 2), False),
        ("core", 2, None, False),
        ("core", 4, (2, 2), False),
    ],
)
def test_state_groups_schedule_and_scaler_go_on(engine, world_size, mesh_shape, offloads):
    run_on_ranks(_continue, world_size, engine, mesh_shape, offloads)


def _several(rank, world_size):
    """Two optimizers over parts of a model, one given twice over nothing in common."""
    model, reference = causal_lm(), causal_lm()

    def build(of):
        blocks = list(of.blocks.parameters())
        inner = {id(p) for p in blocks}
        rest = [p for p in of.parameters() if id(p) not in inner]
        return torch.optim.SGD(blocks, lr=0.1), torch.optim.AdamW(rest, lr=1e-3, eps=1e-6)

    ours, theirs = build(model), build(reference)
    with optimizers_follow(model, *ours):
        shard(model, "fsdp2")
    for step in _batches(world_size):
        lm_loss(model, step[0][rank]).backward()
        (sum(lm_loss(reference, batch) for batch in step[0]) / world_size).backward()
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_tensors(
        {n: whole(p) for n, p in model.named_parameters()},
        {n: whole(p) for n, p in reference.named_parameters()},
        atol=5e-6,
    )


def test_several_optimizers_follow_together():
    run_on_ranks(_several, 2)


def _frees(rank, world_size):
    """Sharding frees each whole parameter at once: the optimizer holds none of them."""
    model = causal_lm()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    storages = [p.untyped_storage()._weak_ref() for p in model.parameters()]
    with optimizers_follow(model, optimizer):
        for block in model.blocks:
            fsdp.fully_shard(block)
        alive = [not torch.UntypedStorage._expired(s) for s in storages]
        num_in_blocks = sum(1 for _ in model.blocks.parameters())
        assert sum(alive) == len(storages) - num_in_blocks
        fsdp.fully_shard(model)
        assert all(torch.UntypedStorage._expired(s) for s in storages)
    for storage in storages:
        torch.UntypedStorage._free_weak_ref(storage)


def test_whole_parameters_are_freed_while_sharding():
    run_on_ranks(_frees, 2)
