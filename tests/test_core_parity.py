"""Training with the core equals training without it: parameters and gradients, after every step, on
every rank.

The reference is plain torch in one process on the joined batch (W=1: bit for bit), and torch's own
FSDP2 with the same units (W=2, fp32: bit for bit). Every rank has data of its own.
"""

import copy
import itertools

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import fully_shard, shard_model
from tests.support import ranks
from tests.support.models import (
    TASKS,
    CausalLM,
    LMShape,
    causal_lm,
    mlp,
    mlp_batch,
    mlp_loss,
    shard_lm_by_hand,
    tied_lm,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_losses_match,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    sgd,
    train_reference,
    whole,
)
from tests.support.ranks import PLAIN, run_on_ranks

COMBINATIONS = list(itertools.product(PLANS, OPTIMIZERS))
EACH_ONCE = [("zero2", "sgd"), ("zero3", "adamw")]


def batches_for(task_name, world_size, *, num_steps=3, num_micro_batches=2):
    return make_batches(
        TASKS[task_name].make_batch,
        num_steps=num_steps,
        num_micro_batches=num_micro_batches,
        world_size=world_size,
    )


def _train_combinations(rank, world_size, task_name, num_micro_batches, combinations):
    task, traces = TASKS[task_name], {}
    batches = batches_for(task_name, world_size, num_micro_batches=num_micro_batches)
    for plan, optimizer in combinations:
        model = shard_model(task.build(), PLANS[plan])
        traces[plan, optimizer] = train_on_rank(
            model, batches, task.loss, OPTIMIZERS[optimizer](model.parameters()), rank
        )
    return traces


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "task_name"),
    [
        *((1, 1, name) for name in TASKS),
        *((1, 2, name) for name in ("mlp", "tied_lm")),
        *((2, 2, name) for name in TASKS),
        *((3, 2, name) for name in ("lm", "gpt2")),
        *((4, 1, name) for name in ("mlp", "tied_lm")),
    ],
)
def test_training_equals_one_process_on_the_joined_batch(task_name, world_size, num_micro_batches):
    """On one rank bit for bit, but for a tied weight over several micro-batches: autograd adds use
    after use within each micro-batch, the core adds up each use over the micro-batches.
    """
    task = TASKS[task_name]
    combinations = COMBINATIONS if (world_size, task_name) == (2, "mlp") else EACH_ONCE
    by_rank = run_on_ranks(
        _train_combinations, world_size, task_name, num_micro_batches, combinations
    )
    batches = batches_for(task_name, world_size, num_micro_batches=num_micro_batches)
    is_exact = world_size == 1 and (num_micro_batches == 1 or task_name in ("mlp", "lm"))
    for combination in combinations:
        traces = [traces[combination] for traces in by_rank]
        expected = train_reference(task.build(), batches, task.loss, OPTIMIZERS[combination[1]])
        atol = 0 if is_exact else task.atol
        assert_ranks_agree(traces, str(combination))
        assert_traces_match(traces[0], expected, atol=atol, what=str(combination))
        assert_losses_match(traces, expected, atol=atol)


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_over_plain_collectives_equals_one_process(world_size):
    """Backends that are not gloo gather and reduce with one collective each."""
    by_rank = run_on_ranks(_train_combinations, world_size, "tied_lm", 2, EACH_ONCE, backend=PLAIN)
    for combination in EACH_ONCE:
        expected = train_reference(
            tied_lm(),
            batches_for("tied_lm", world_size),
            TASKS["lm"].loss,
            OPTIMIZERS[combination[1]],
        )
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=5e-6, what=str(combination))


def _loss_in_float64(model, batch):
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _train_in_float64(rank, world_size):
    model = shard_model(causal_lm().double())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return train_on_rank(model, batches_for("lm", world_size), _loss_in_float64, optimizer, rank)


def test_float64_trains_as_in_one_process():
    traces = run_on_ranks(_train_in_float64, 2)
    model, batches = causal_lm().double(), batches_for("lm", 2)
    expected = train_reference(model, batches, _loss_in_float64, OPTIMIZERS["sgd"])
    assert_traces_match(traces[0], expected, atol=1e-14)


def _lm_with_modules_at_two_places():
    """As peft holds the embedding of a model that it prompts once more."""
    model = causal_lm()
    model.also = nn.ModuleDict({"last": model.head, "word_embeddings": model.embedding})
    model.ends = nn.ModuleList([model.blocks[0], model.blocks[-1]])
    return model


def _train_with_modules_at_two_places(rank, world_size):
    batches, task = batches_for("lm", world_size), TASKS["lm"]
    traces = []
    for plan in PLANS.values():
        model = shard_model(_lm_with_modules_at_two_places(), plan)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank))
    return traces


def test_modules_at_two_places_of_the_tree_train_as_in_one_process():
    by_rank = run_on_ranks(_train_with_modules_at_two_places, 2)
    model, task = _lm_with_modules_at_two_places(), TASKS["lm"]
    expected = train_reference(model, batches_for("lm", 2), task.loss, OPTIMIZERS["sgd"])
    for traces in zip(*by_rank, strict=True):
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=task.atol)


def _train_beside_torch_fsdp2(rank, world_size, reshard_after_forward, num_micro_batches):
    task = TASKS["lm"]
    batches = batches_for("lm", world_size, num_steps=5, num_micro_batches=num_micro_batches)
    traces = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        model = shard_lm_by_hand(causal_lm(), engine, reshard_after_forward=reshard_after_forward)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        traces.append(train_on_rank(model, batches, task.loss, optimizer, rank, accumulation="sum"))
    assert_traces_match(*traces, atol=0, what="against torch's FSDP2")


@pytest.mark.parametrize(
    ("reshard_after_forward", "num_micro_batches"), [(True, 1), (True, 2), (False, 2), (None, 1)]
)
def test_a_script_for_fsdp2_gives_the_same_bits_with_one_import_changed(
    reshard_after_forward, num_micro_batches
):
    run_on_ranks(_train_beside_torch_fsdp2, 2, reshard_after_forward, num_micro_batches)


def _shard_found_units_beside_torch_fsdp2(rank, world_size):
    task, batches = TASKS["lm"], batches_for("lm", world_size, num_steps=5, num_micro_batches=1)
    ours, theirs = shard_model(causal_lm()), shard_lm_by_hand(causal_lm(), torch_fsdp.fully_shard)
    traces = [
        train_on_rank(m, batches, task.loss, OPTIMIZERS["adamw"](m.parameters()), rank)
        for m in (ours, theirs)
    ]
    assert_traces_match(*traces, atol=0, what="shard_model against torch's FSDP2")


def test_units_found_by_shard_model_give_the_same_bits_as_fsdp2():
    run_on_ranks(_shard_found_units_beside_torch_fsdp2, 2)


# --- parts, nesting, ties ---


def _shard_as(model, how):
    if how == "one unit":
        return fully_shard(model)
    if how == "blocks and root":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if how == "blocks of blocks":
        for block in model.blocks:
            fully_shard(block.up)
            fully_shard(block)
        return fully_shard(model, reshard_after_forward=True)
    if how == "several modules in one unit":
        fully_shard([model.norm, model.head])
        return fully_shard(model)
    assert how == "units of shard_model"
    return shard_model(model)


SHARDINGS = [
    "one unit",
    "blocks and root",
    "blocks of blocks",
    "several modules in one unit",
    "units of shard_model",
]


def _train_tied_lm_sharded_in_many_ways(rank, world_size):
    traces, batches = {}, batches_for("tied_lm", world_size)
    for how in SHARDINGS:
        model = _shard_as(tied_lm(), how)
        assert model.head.weight is model.embedding.weight, f"{how}: the tie is gone"
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        traces[how] = train_on_rank(model, batches, TASKS["tied_lm"].loss, optimizer, rank)
        assert model.head.weight is model.embedding.weight, f"{how}: the tie is gone after training"
    return traces


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_choice_of_units_trains_the_same(world_size):
    by_rank = run_on_ranks(_train_tied_lm_sharded_in_many_ways, world_size)
    expected = train_reference(
        tied_lm(), batches_for("tied_lm", world_size), TASKS["tied_lm"].loss, OPTIMIZERS["sgd"]
    )
    for how in SHARDINGS:
        assert_ranks_agree([traces[how] for traces in by_rank], how)
        assert_traces_match(by_rank[0][how], expected, atol=5e-6, what=how)


def _train_tied_across_units_by_hand(rank, world_size):
    task, model = TASKS["tied_lm"], tied_lm()
    for module in (model.embedding, *model.blocks, model.head):
        fully_shard(module)
    fully_shard(model)
    assert model.head.weight is model.embedding.weight
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return train_on_rank(model, batches_for("tied_lm", world_size), task.loss, optimizer, rank)


def test_a_weight_tied_across_units_that_are_sharded_one_by_one():
    traces = run_on_ranks(_train_tied_across_units_by_hand, 2)
    expected = train_reference(
        tied_lm(), batches_for("tied_lm", 2), TASKS["tied_lm"].loss, OPTIMIZERS["sgd"]
    )
    assert_ranks_agree(traces)
    assert_traces_match(traces[0], expected, atol=5e-6)


def _gradient_of_tied_weight(rank, world_size, plan, how):
    """Beside a model with the same weights that are not tied: the gradients of both uses."""
    task, model, untied = TASKS["tied_lm"], tied_lm(), causal_lm()
    untied.load_state_dict(model.state_dict())
    shard_model(model, PLANS[plan], units=None if how == "across units" else lambda m: m is model)
    for r in range(world_size):
        (task.loss(untied, task.make_batch(0, 0, r)) / world_size).backward()
    task.loss(model, task.make_batch(0, 0, rank)).backward()
    assert model.head.weight is model.embedding.weight
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    assert (untied.head.weight.grad - expected).abs().max() > 1e-3 < expected.abs().max()
    torch.testing.assert_close(
        model.head.weight.grad.full_tensor(), expected, rtol=0, atol=task.atol
    )
    names = [name for name, _ in model.named_parameters()]
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.step()
    assert "head.weight" not in names
    assert len(optimizer.state) == len(names) == len(list(untied.parameters())) - 1


@pytest.mark.parametrize("how", ["inside a unit", "across units"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_tied_weight_has_one_gradient_of_both_uses_and_one_state(plan, how):
    run_on_ranks(_gradient_of_tied_weight, 2, plan, how)


def _train_two_models_in_one_graph(rank, world_size):
    """An encoder and a head, sharded and stepped apart, in one backward."""
    torch.manual_seed(3)
    encoder, head = torch.nn.Linear(7, 7), mlp()
    pairs = [(fully_shard(encoder), shard_model(head))]
    torch.manual_seed(3)
    pairs.append((torch.nn.Linear(7, 7), mlp()))
    traces = []
    for is_sharded, (first, second) in zip((True, False), pairs, strict=True):
        optimizers = [
            OPTIMIZERS["sgd"](first.parameters()),
            OPTIMIZERS["adamw"](second.parameters()),
        ]
        for step in range(3):
            ranks = [rank] if is_sharded else range(world_size)
            for each in ranks:
                batch = mlp_batch(step, 0, each)
                outputs = second(torch.tanh(first(batch["inputs"])))
                loss = 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])
                (loss / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        traces.append(
            {
                n: whole(p)
                for m in (first, second)
                for n, p in m.named_parameters(prefix=type(m).__name__)
            }
        )
    assert_same_tensors(*traces, atol=1e-7)


def test_two_sharded_models_in_one_graph():
    run_on_ranks(_train_two_models_in_one_graph, 2)


def _train_on_half_of_the_ranks(rank, world_size):
    """Two groups of two ranks, each sharding a model of its own."""
    mesh = torch.distributed.init_device_mesh(
        ranks.active_device, (2, 2), mesh_dim_names=("copy", "shard")
    )
    model = fully_shard(mlp(), mesh=mesh["shard"])
    batches = batches_for("mlp", world_size)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return train_on_rank(model, batches, mlp_loss, optimizer, rank)


def test_a_mesh_may_hold_some_of_the_ranks():
    traces = run_on_ranks(_train_on_half_of_the_ranks, 4)
    batches = batches_for("mlp", 4)
    for group in ([0, 1], [2, 3]):
        theirs = [[[micro[rank] for rank in group] for micro in step] for step in batches]
        expected = train_reference(mlp(), theirs, mlp_loss, OPTIMIZERS["sgd"])
        for rank in group:
            assert_traces_match(traces[rank], expected, atol=1e-7, what=f"rank {rank}")


def _shard_only_the_blocks(rank, world_size):
    """Gradients of what stays unsharded are the rank's own, as in torch's FSDP2."""
    results = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        model = causal_lm()
        for block in model.blocks:
            engine(block)
        TASKS["lm"].loss(model, TASKS["lm"].make_batch(0, 0, rank)).backward()
        results.append(
            {
                name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                for name, p in model.named_parameters()
            }
        )
    ours, theirs = results
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_part_of_a_model_may_stay_unsharded():
    run_on_ranks(_shard_only_the_blocks, 2)


class _Transposed(torch.nn.Module):
    """Parameters that are not contiguous in memory."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(7, 5)
        self.second = torch.nn.Parameter(torch.rand(3, 5).t() - 0.5)
        self.third = torch.nn.Parameter((torch.rand(4, 3, 2) - 0.5).permute(2, 0, 1)[:, ::2])

    def forward(self, inputs):
        return (self.first(inputs).tanh() @ self.second) * self.third.sum(dim=(0, 1))


def _transposed():
    torch.manual_seed(1)
    return _Transposed()


def _train_transposed(rank, world_size):
    model, batches = shard_model(_transposed()), batches_for("mlp", world_size)
    return train_on_rank(model, batches, mlp_loss, OPTIMIZERS["sgd"](model.parameters()), rank)


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_that_are_not_contiguous_train(world_size):
    traces = run_on_ranks(_train_transposed, world_size)
    batches = batches_for("mlp", world_size)
    expected = train_reference(_transposed(), batches, mlp_loss, OPTIMIZERS["sgd"])
    assert_ranks_agree(traces)
    assert_traces_match(traces[0], expected, atol=1e-7)


class _Checkpointed(CausalLM):
    """Recomputes each block in the backward."""

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.norm(hidden))


def _checkpointed():
    torch.manual_seed(1)
    return _Checkpointed(LMShape())


def _train_checkpointed(rank, world_size):
    traces, batches = {}, batches_for("lm", world_size)
    for plan in PLANS:
        model = shard_model(_checkpointed(), PLANS[plan])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        traces[plan] = train_on_rank(model, batches, TASKS["lm"].loss, optimizer, rank)
    return traces


def test_units_that_are_recomputed_in_the_backward_train_the_same():
    by_rank = run_on_ranks(_train_checkpointed, 2)
    expected = train_reference(
        _checkpointed(), batches_for("lm", 2), TASKS["lm"].loss, OPTIMIZERS["sgd"]
    )
    for plan in PLANS:
        assert_traces_match(by_rank[0][plan], expected, atol=5e-6, what=plan)


# --- unused parameters ---


def optional_batch(users):
    """``users[step]``: the ranks that use ``bonus`` in that step."""

    def make(step, micro_batch, rank):
        return {**mlp_batch(step, micro_batch, rank), "use_bonus": rank in users[step]}

    return make


def optional_loss(model, batch):
    outputs = model(batch["inputs"], batch["use_bonus"])
    return 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])


# Used by one rank, by the other, by none, by all, and by none again, where momentum and moments
# exist.
USERS = [{0}, {1}, set(), {0, 1, 2}, set()]
CLIP = (0.3, 2.0)


def _train_with_optional_parameter(rank, world_size):
    traces = {}
    batches = make_batches(
        optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
    )
    for plan, optimizer in COMBINATIONS:
        model = shard_model(mlp(), PLANS[plan])
        traces[plan, optimizer] = train_on_rank(
            model, batches, optional_loss, OPTIMIZERS[optimizer](model.parameters()), rank
        )
    return traces


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parameter_may_be_unused_by_some_ranks_or_by_all(world_size):
    """Unused by some: zeros in the mean. Unused by all: no gradient, so weight decay leaves the
    parameter alone.
    """
    by_rank = run_on_ranks(_train_with_optional_parameter, world_size)
    batches = make_batches(
        optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
    )
    for combination in COMBINATIONS:
        expected = train_reference(
            mlp(), batches, optional_loss, OPTIMIZERS[combination[1]], joined=False
        )
        assert expected.gradients[2]["bonus"] is None
        traces = [traces[combination] for traces in by_rank]
        assert_ranks_agree(traces)
        assert_traces_match(traces[0], expected, atol=1e-7, what=str(combination))


def _train_with_a_default_device(rank, world_size, plan):
    model, batches = (
        mlp(),
        make_batches(
            optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=world_size
        ),
    )
    with torch.device("meta"):
        shard_model(model, PLANS[plan])
        return train_on_rank(
            model, batches, optional_loss, sgd(model.parameters()), rank, clip=CLIP
        )


@pytest.mark.parametrize("plan", PLANS)
def test_where_the_user_makes_new_tensors_does_not_matter(plan):
    """What ranks tell each other stays on the host under any default device."""
    batches = make_batches(optional_batch(USERS), num_steps=5, num_micro_batches=1, world_size=2)
    expected = train_reference(mlp(), batches, optional_loss, sgd, clip=CLIP, joined=False)
    for trace in run_on_ranks(_train_with_a_default_device, 2, plan):
        assert_traces_match(trace, expected, atol=1e-7)


class _LeavesOut(nn.Module):
    """Blocks that pass their inputs on, and a last parameter of the root, as a rank likes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.blocks = nn.Linear(7, 7), nn.ModuleList(_Droppable() for _ in range(3))
        self.last, self.scale = nn.Linear(7, 3), nn.Parameter(torch.ones(3))

    def forward(self, inputs, dropped, is_scaled):
        hidden = self.first(inputs)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, index == dropped)
        outputs = self.last(hidden)
        return outputs * self.scale if is_scaled else outputs


class _Droppable(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 7)

    def forward(self, inputs, is_dropped):
        return inputs if is_dropped else inputs + self.down(torch.tanh(self.up(inputs)))


def leave_out_batch(step, micro_batch, rank):
    choice = {"dropped": (step + 2 * rank) % 4, "is_scaled": (step + rank) % 3 == 0}
    return {**mlp_batch(step, micro_batch, rank), **choice}


def leave_out_loss(model, batch):
    outputs = model(batch["inputs"], batch["dropped"], batch["is_scaled"])
    return 0.25 * torch.nn.functional.mse_loss(outputs, batch["targets"])


def _train_leaving_out(rank, world_size, plan):
    batches = make_batches(leave_out_batch, num_steps=5, num_micro_batches=2, world_size=world_size)
    model = shard_model(_LeavesOut(), PLANS[plan])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return train_on_rank(model, batches, leave_out_loss, optimizer, rank, accumulation="sum")


@pytest.mark.parametrize("plan", PLANS)
def test_what_ends_a_unit_may_differ_between_ranks(plan):
    traces = run_on_ranks(_train_leaving_out, 2, plan)
    batches = make_batches(leave_out_batch, num_steps=5, num_micro_batches=2, world_size=2)
    expected = train_reference(
        _LeavesOut(), batches, leave_out_loss, OPTIMIZERS["sgd"], joined=False
    )
    assert_ranks_agree(traces)
    assert_traces_match(traces[0], expected, atol=2e-7, what=plan)


# --- optimizers ---

ELEMENTWISE = {
    "adamw plain": lambda p: torch.optim.AdamW(
        p, lr=1e-3, weight_decay=0.1, eps=1e-6, foreach=False
    ),
    "adamw foreach": lambda p: torch.optim.AdamW(
        p, lr=1e-3, weight_decay=0.1, eps=1e-6, foreach=True
    ),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, eps=1e-6, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-6, amsgrad=True),
    "sgd nesterov foreach": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-6),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-6),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-6),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-6),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-6, foreach=True),
    "rprop foreach": lambda p: torch.optim.Rprop(p, lr=1e-3, foreach=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, foreach=True),
    "nadam foreach": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-6, foreach=True),
    "radam foreach": lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-6, foreach=True),
    "adamax foreach": lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-6, foreach=True),
    "amsgrad foreach": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-6, amsgrad=True, foreach=True),
    "amsgrad fused": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-6, amsgrad=True, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-6, fused=True),
    "asgd foreach": lambda p: torch.optim.ASGD(p, lr=1e-2, foreach=True),
    "adadelta foreach": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def _train_with_every_optimizer(rank, world_size):
    traces, batches = {}, batches_for("mlp", world_size, num_micro_batches=1)
    for name, make_optimizer in ELEMENTWISE.items():
        for built in ("before", "after"):
            model = mlp()
            if built == "before":
                optimizer = make_optimizer(model.parameters())
                shard_model(model)
            else:
                shard_model(model)
                optimizer = make_optimizer(model.parameters())
            try:
                traces[name, built] = train_on_rank(model, batches, mlp_loss, optimizer, rank)
            except RuntimeError as error:
                traces[name, built] = f"{name}, built {built}: {error}"
    return traces


def test_every_elementwise_optimizer_built_before_or_after_sharding():
    by_rank = run_on_ranks(_train_with_every_optimizer, 3)
    batches = batches_for("mlp", 3, num_micro_batches=1)
    errors = [result for result in by_rank[0].values() if isinstance(result, str)]
    assert not errors, "\n".join(errors)
    for name, make_optimizer in ELEMENTWISE.items():
        expected = train_reference(mlp(), batches, mlp_loss, make_optimizer)
        for built in ("before", "after"):
            traces = [traces[name, built] for traces in by_rank]
            assert_ranks_agree(traces, name)
            assert_traces_match(traces[0], expected, atol=1e-6, what=f"{name}, built {built}")


def _optimizer_with_groups_and_state(rank, world_size):
    """Two groups and an optimizer that has stepped before sharding: its state goes on."""
    batches = batches_for("mlp", world_size, num_steps=2, num_micro_batches=1)
    traces = []
    for is_sharded in (True, False):
        model = mlp()
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "lr": 1e-2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if is_sharded:
            shard_model(model)
            assert [p.ndim for p in decayed] == [p.ndim for p in model.parameters() if p.ndim >= 2]
            traces.append(train_on_rank(model, batches, mlp_loss, optimizer, rank))
        else:
            traces.append(train_reference(model, batches, mlp_loss, lambda _: optimizer))  # noqa: B023
    assert_traces_match(*traces, atol=1e-7)


def test_param_groups_survive_sharding():
    run_on_ranks(_optimizer_with_groups_and_state, 2)


# --- what happens around training ---


def _evaluate_between_steps(rank, world_size, plan):
    task, batches = TASKS["lm"], batches_for("lm", world_size, num_micro_batches=1)
    plain_trace = train_on_rank(
        model := shard_model(causal_lm(), PLANS[plan]),
        batches,
        task.loss,
        OPTIMIZERS["sgd"](model.parameters()),
        rank,
    )
    model = shard_model(causal_lm(), PLANS[plan])
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    traces = []
    for step in batches:
        with torch.no_grad():
            before = task.loss(model.eval(), step[0][rank])
            again = task.loss(model, step[0][rank])
        trace = train_on_rank(model.train(), [step], task.loss, optimizer, rank)
        assert before.item() == again.item() == trace.losses[0]
        traces.append(trace)
    assert [t.losses[0] for t in traces] == plain_trace.losses
    final = copy.deepcopy(traces[-1])
    plain_trace.gradients, plain_trace.parameters = (
        plain_trace.gradients[-1:],
        plain_trace.parameters[-1:],
    )
    assert_traces_match(final, plain_trace, atol=0)


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_between_steps_changes_nothing(plan):
    run_on_ranks(_evaluate_between_steps, 2, plan)


def _edit_parameters_in_place(rank, world_size, plan):
    """Weights changed without an optimizer are what the next forward uses."""
    model, reference = shard_model(mlp(), PLANS[plan]), mlp()
    batch = mlp_batch(0, 0, 0)
    with torch.no_grad():
        model(batch["inputs"])
    for edited in (model, reference):
        with torch.no_grad():
            for parameter in edited.parameters():
                parameter.mul_(0.5)
    with torch.no_grad():
        assert torch.equal(model(batch["inputs"]), reference(batch["inputs"]))
    for edited in (model, reference):
        loss = mlp_loss(edited, batch)
        loss.backward()
        with torch.no_grad():
            for parameter in edited.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    with torch.no_grad():
        difference = (model(batch["inputs"]) - reference(batch["inputs"])).abs().max()
    assert difference < 1e-6, difference


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_edited_in_place_are_used_by_the_next_forward(plan):
    run_on_ranks(_edit_parameters_in_place, 2, plan)
