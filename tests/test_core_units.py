"""Units of any kind, nested, tied or parts of a model, train as in one process."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
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
    tied_lm,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    batches_for,
    train_reference,
    whole,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


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


def _lm_with_a_layer_in_two_blocks():
    model = tied_lm()
    model.blocks[1].up = model.blocks[0].up
    return model


def _train_a_layer_in_two_blocks(rank, world_size):
    traces, task = {}, TASKS["tied_lm"]
    for how in ("blocks and root", "units of shard_model"):
        model = _shard_as(_lm_with_a_layer_in_two_blocks(), how)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        batches = batches_for("tied_lm", world_size)
        traces[how] = train_on_rank(model, batches, task.loss, optimizer, rank)
    return traces


def test_a_layer_in_two_blocks_is_whole_in_both():
    by_rank = run_on_ranks(_train_a_layer_in_two_blocks, 2)
    model, batches = _lm_with_a_layer_in_two_blocks(), batches_for("tied_lm", 2)
    expected = train_reference(model, batches, TASKS["tied_lm"].loss, OPTIMIZERS["sgd"])
    for how in by_rank[0]:
        assert_ranks_agree([traces[how] for traces in by_rank], how)
        assert_traces_match(by_rank[0][how], expected, atol=5e-6, what=how)


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
