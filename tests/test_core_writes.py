"""What is written to parameters between micro-batches is what the next forward computes with; to
gradients, what backwards add to.

ZeRO-2 keeps whole copies from one micro-batch to the next, so each way of writing must make them
stale. The unsharded model beside it is written to in the same way.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import load_full_state_dict, shard_model
from tests.support import ranks
from tests.support.models import TASKS, lm_loss, tied_lm, token_batch
from tests.support.one_exchange import wholes
from tests.support.optimizers import Normed
from tests.support.parity import OPTIMIZERS, PLANS, assert_same_tensors, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _other_state():
    return {name: 0.5 * value for name, value in tied_lm(seed=2).state_dict().items()}


def load_state_dict(model):
    model.load_state_dict(_other_state())


def load_full_state(model):
    is_sharded = hasattr(model, "no_sync")
    (load_full_state_dict if is_sharded else nn.Module.load_state_dict)(model, _other_state())


def load_one_block(model):
    block = TASKS["tied_lm"].build().blocks[0]
    model.blocks[1].load_state_dict(block.state_dict())
    model.blocks[2].up.load_state_dict(block.up.state_dict())


def load_own_state_of_before(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(token_batch(0, 0, 0)["tokens"][:, :9])  # with gradients: ZeRO-2 keeps the zeros
    model.load_state_dict({name: 0.5 * value for name, value in state.items()})


def assign_data(model):
    for parameter in model.parameters():
        parameter.data = 0.5 * parameter.data


def write_into_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
        parameter.data.copy_(1.5 * parameter.data)


def write_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.lerp_(torch.zeros_like(parameter), 0.5)


def write_lists(model):
    with torch.no_grad():
        torch._foreach_mul_([*model.parameters()], 0.5)


def write_slices(model):
    """Through what ``to_local`` gives; a plain parameter is its own slice."""
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(0.5)


def write_unseen_and_reshard(model):
    """In a way that torch does not count."""
    for parameter in model.parameters():
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).data.mul_(0.5)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def initialise(model):
    nn.init.zeros_(model.blocks[0].down.weight)
    nn.init.constant_(model.norm.weight, 0.5)
    nn.init.ones_(model.blocks[1].norm_2.bias)


def average_and_swap(model):
    """EMA: an average is put in, looked at, and taken out again; then it is put in to stay."""
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.lerp_(0.25 * parameter, 0.5)
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for values in (averages, kept, averages):
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.data.copy_(value)
            loss = lm_loss(model.eval(), token_batch(5, 0, 0))
        model.train()
    return loss


WRITES = {
    write.__name__: write
    for write in (
        load_state_dict,
        load_full_state,
        load_one_block,
        load_own_state_of_before,
        assign_data,
        write_into_data,
        write_unseen_and_reshard,
        write_in_place,
        write_lists,
        write_slices,
        initialise,
        average_and_swap,
    )
}


def _validate(model, reference):
    with torch.no_grad():
        losses = [lm_loss(each.eval(), token_batch(6, 0, 0)) for each in (model, reference)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    model.train()
    reference.train()
    return losses[1].item()


def _gradients_of(model):
    named = {name: p.grad for name, p in model.named_parameters()}
    return dict(zip(named, wholes([*named.values()]), strict=True))


def _write_between_micro_batches(
    rank, world_size, plan, accumulation, writes=WRITES, over_hosts=False
):
    mesh = init_device_mesh(ranks.active_device, (2, 2)) if over_hosts else None
    options = {"mesh": mesh, "state_over": "all"} if over_hosts else {}
    for index, (name, write) in enumerate(writes.items()):
        written_after = (
            index + (accumulation == "sum")
        ) % 2  # after each of the two in one of them
        models = model, reference = shard_model(tied_lm(), PLANS[plan], **options), tied_lm()
        optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in models]
        for micro_batch in range(3):
            model.set_requires_gradient_sync(micro_batch == 2 or accumulation == "sum")
            lm_loss(model, token_batch(0, micro_batch, rank)).backward()
            for r in range(world_size):
                (lm_loss(reference, token_batch(0, micro_batch, r)) / world_size).backward()
            before = _validate(model, reference)
            if micro_batch == written_after:
                for each in models:
                    write(each)
                assert abs(_validate(model, reference) - before) > 1e-3, f"{name} changes nothing"
        assert_same_tensors(*map(_gradients_of, models), atol=5e-6, what=f"{name}: gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _validate(model, reference)
        parameters = [
            dict(zip(names, wholes(values), strict=True))
            for names, values in (zip(*m.named_parameters(), strict=True) for m in models)
        ]
        assert_same_tensors(*parameters, atol=5e-6, what=f"{name}: parameter")


@pytest.mark.parametrize(
    ("plan", "accumulation", "first"),
    [("zero2", "local", 0), ("zero2", "sum", 1), ("zero3", "local", 1), ("zero3", "sum", 0)],
)
def test_a_write_between_micro_batches_is_what_the_next_one_computes_with(
    plan, accumulation, first
):
    """Each way to write with both plans and both accumulations, and after both micro-batches."""
    writes = dict(list(WRITES.items())[first::2])
    run_on_ranks(_write_between_micro_batches, 2, plan, accumulation, writes)


def test_a_write_is_what_hosts_gather_next():
    # How a write is noticed is not a question of hosts: every third is enough.
    writes = dict(list(WRITES.items())[::3])
    run_on_ranks(_write_between_micro_batches, 4, "zero3", "local", writes, True)


def _write_to_what_is_gathered_ahead(rank, world_size, plan):
    model, reference = shard_model(tied_lm(), PLANS[plan]), tied_lm()
    for unit in (model, model.blocks[1], model.head):  # the head's weight is the embedding's, too
        unit.unshard(async_op=True)
        for each in (model, reference):
            write_in_place(each)
        _validate(model, reference)


@pytest.mark.parametrize("backend", ["gloo", "late"])  # the second sees what nobody waits for
@pytest.mark.parametrize("plan", PLANS)
def test_a_write_after_unshard_is_what_the_forward_computes_with(plan, backend):
    run_on_ranks(_write_to_what_is_gathered_ahead, 2, plan, backend=backend)


def _step_some_parameters(rank, world_size, plan):
    """An optimizer of one block steps between the micro-batches of the others."""
    model, reference = shard_model(tied_lm(), PLANS[plan]), tied_lm()
    models = (model, reference)
    parts = [OPTIMIZERS["sgd"](each.blocks[1].parameters()) for each in models]
    for step in range(3):
        for each in models:
            for r in [rank] if each is model else range(world_size):
                loss = lm_loss(each, token_batch(step, 0, r))
                (loss if each is model else loss / world_size).backward()
        for optimizer in parts:
            optimizer.step()
            optimizer.zero_grad()
        _validate(model, reference)
    assert_same_tensors(*map(_gradients_of, models), atol=5e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_of_some_parameters_may_step_while_others_accumulate(plan):
    run_on_ranks(_step_some_parameters, 2, plan)


def _swap_in_averages(rank, world_size, plan):
    """As many scripts keep an average: ``kept = p.data; p.data = average; ...; p.data = kept``."""
    models = shard_model(tied_lm(), PLANS[plan]), tied_lm()
    for each in models:
        first, last = each.blocks[0].up.weight, each.head.weight
        kept = {p: (p.data, p.detach(), each.state_dict()["norm.bias"]) for p in each.parameters()}
        each.norm.bias.data = each.norm.bias.data + 1
        first.data = 0.5 * first.data
        with torch.no_grad():
            last.data.mul_(2)  # this one writes to the parameter itself
        values = [whole(t) for t in (first, last, *kept[first], *kept[last])]
        kept[first][0].data = 3 * kept[first][0].data
        values += [whole(first), whole(kept[first][0])]
        for parameter, (data, *_) in kept.items():
            parameter.data = data
        with torch.no_grad():
            first.add_(1)
        each.values = values + [whole(parameter) for parameter in each.parameters()]
    for index, (ours, theirs) in enumerate(zip(*(each.values for each in models), strict=True)):
        assert torch.equal(ours, theirs), index
    _validate(*models)


@pytest.mark.parametrize("plan", PLANS)
def test_data_that_was_kept_outlives_its_replacement(plan):
    run_on_ranks(_swap_in_averages, 2, plan)


def _set_gradients(model, seed):
    """``p.grad = whole``, as code does that keeps gradients, or starts a sum with zeros."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = value = torch.rand(parameter.shape)
        value -= 0.5  # memory is shared


def _train_from_gradients_set_by_hand(rank, world_size, plan, accumulation, make_optimizer):
    models = model, reference = shard_model(tied_lm(), PLANS[plan]), tied_lm()
    optimizers = [make_optimizer(each.parameters()) for each in models]
    for step in range(2):
        for each in models:
            _set_gradients(each, seed=step)
        for micro_batch in range(2):
            model.set_requires_gradient_sync(micro_batch == 1 or accumulation == "sum")
            lm_loss(model, token_batch(step, micro_batch, rank)).backward()
            for r in range(world_size):
                (lm_loss(reference, token_batch(step, micro_batch, r)) / world_size).backward()
        assert_same_tensors(*map(_gradients_of, models), atol=5e-6, what="gradient")
        if step == 1:  # which are stepped as they are
            for each in models:
                _set_gradients(each, seed=2)
        norms = model.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
        _validate(model, reference)


@pytest.mark.parametrize(
    ("plan", "accumulation", "make_optimizer"),
    [
        ("zero2", "local", OPTIMIZERS["sgd"]),
        ("zero2", "sum", Normed),
        ("zero3", "local", Normed),
        ("zero3", "sum", OPTIMIZERS["sgd"]),
    ],
)
def test_a_whole_gradient_that_is_set_by_hand_is_as_one_of_a_backward(
    plan, accumulation, make_optimizer
):
    args = plan, accumulation, make_optimizer
    run_on_ranks(_train_from_gradients_set_by_hand, 2, *args)
