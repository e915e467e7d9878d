"""Ways to freed parameters beside a unit's outputs: right, or a Python error, never a crash.

Every rank is a process: one that ends by a signal fails its test.
"""

import copy
import logging
import weakref

import pytest
import torch
from torch import nn

from lightning_fsdp import shard_model
from lightning_fsdp.core import torch_internals
from tests.support.memory import StorageTracker
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

REFUSED = "invalid|out of bounds for storage of size 0"  # torch's own words


class Block(nn.Module):
    """Two layers and a norm; ``run`` says what it computes, and keeps."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, inputs):
        return self.run(self, inputs)


def plain(block, x):
    return block.last(block.norm(torch.tanh(block.first(x))))


def of_a_weight(block, x):
    outputs = plain(block, x)
    block.aux = block.first.weight.pow(2).sum()
    return outputs


def after_the_outputs(block, x):
    hidden = torch.tanh(block.first(x))
    outputs = block.last(hidden)
    block.aux = (block.norm(hidden) * block.first.weight[0]).pow(2).sum()
    return outputs


def beside_detached_outputs(block, x):
    hidden = torch.tanh(block.first(x))
    block.aux = block.last(block.norm(hidden)).pow(2).sum()
    return hidden.detach()


AUXILIARY = {run.__name__: run for run in (of_a_weight, after_the_outputs, beside_detached_outputs)}


def build(run):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(run) for _ in range(3)))


def shard(run, plan):
    return shard_model(build(run), PLANS[plan], units=lambda m: isinstance(m, Block))


def data_of(rank):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(rank))


def assert_trains_as(model, reference, world_size, rank, loss_of, num_steps=2):
    """Steps of the model on this rank's data are steps of the reference on all."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    for _ in range(num_steps):
        loss_of(model, data_of(rank))
        for each in range(world_size):
            loss_of(reference, data_of(each), 1 / world_size)
        for name, parameter in reference.named_parameters():
            ours = model.get_parameter(name).grad
            assert (ours is None) == (parameter.grad is None), name
            if ours is not None:
                torch.testing.assert_close(ours.full_tensor(), parameter.grad, rtol=0, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _auxiliary(rank, world_size, plan, name, alone):
    def backward(model, x, factor=1.0):
        loss = model(x).pow(2).mean()
        total = sum(block.aux for block in model)
        if not alone and loss.requires_grad:
            total = total + loss
        (total * factor).backward()

    model, reference = shard(AUXILIARY[name], plan), build(AUXILIARY[name])
    assert_trains_as(model, reference, world_size, rank, backward)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("alone", [False, True], ids=["with the loss", "alone"])
@pytest.mark.parametrize("name", AUXILIARY)
def test_an_auxiliary_loss_kept_on_a_module_is_right(name, alone, plan):
    run_on_ranks(_auxiliary, 2, plan, name, alone)


def of_the_first_call(block, x):
    outputs = plain(block, x)
    if not hasattr(block, "aux"):
        block.aux = outputs.pow(2).sum()
    return outputs


def _kept_over_calls(rank, world_size):
    model = shard(of_the_first_call, "zero3")
    for _ in range(4):
        model(torch.ones(2, 6))
    return [list(map(len, block.aux.grad_fn.metadata.values())) for block in model]


def test_a_loss_that_is_kept_over_several_calls_is_announced_once():
    assert run_on_ranks(_kept_over_calls, 1) == [[[1]] * 3]


def penalty_of_input(model, x, factor=1.0):
    x.requires_grad_()
    loss = model(x).pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    model(x.detach()).sum()  # a forward between frees nothing that the graph needs
    ((loss + gradient.pow(2).sum()) * factor).backward()


def penalty_in_rows(model, x, factor=1.0):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).pow(2).mean(), x, create_graph=True)
    for row in gradient:
        (row.pow(2).sum() * factor).backward(retain_graph=True)


def _double_backward(rank, world_size, plan, backward):
    model = shard(plain, plan)
    assert_trains_as(model, build(plain), world_size, rank, backward)
    with StorageTracker(model) as tracker:
        backward(model, data_of(rank))
        is_whole = bool(tracker.whole_sizes())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not tracker.whole_sizes(), "the step frees"
    assert is_whole, "they stay whole for the graph"
    if plan == "zero3":
        with StorageTracker(model) as tracker:
            model(data_of(rank)).sum().backward()
            assert not tracker.whole_sizes(), "a backward without a graph frees again"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backward", [penalty_of_input, penalty_in_rows])
def test_double_backward_is_right_and_whole_copies_go_with_the_step(backward, plan):
    run_on_ranks(_double_backward, 2, plan, backward)


KEPT = {
    "view": lambda weight: weight.t(),
    "data": lambda weight: weight.data,
    "detached": lambda weight: weight.detach(),
    "parameter": lambda weight: nn.Parameter(weight),
    "row": lambda weight: weight[1],
    "without gradient": lambda weight: weight.detach().view(-1)[3:7],
}
USES = {
    "print": repr,
    "sum": lambda kept: kept.sum(),
    "arithmetic": lambda kept: kept + 1,
    "clone": lambda kept: kept.clone(),
    "matmul": lambda kept: kept.reshape(-1) @ torch.ones(kept.numel()),
    "norm": lambda kept: torch.layer_norm(torch.ones(2, 6), (6,), kept.reshape(-1)[:6]),
    "foreach": lambda kept: torch._foreach_mul([kept], 2.0),
    "list": lambda kept: kept.tolist(),
    "source": lambda kept: torch.zeros(kept.shape).copy_(kept),
    "target": lambda kept: kept.data.fill_(1.0),
    "in place": lambda kept: kept.data.add_(1.0),
    "copy": lambda kept: copy.deepcopy(kept.detach()),
}


def _read_kept(rank, world_size, plan):
    kept = {}

    def keep(block, x):
        if block is model[0]:
            kept.update({name: how(block.first.weight) for name, how in KEPT.items()})
        return plain(block, x)

    model = shard(keep, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):  # refused, and whole again, and refused
        model(data_of(rank)).sum().backward()
        optimizer.step()  # ZeRO-2 frees here
        for view in kept.values():
            for use in USES.values():
                with pytest.raises(RuntimeError, match=REFUSED):
                    use(view)
    reference = build(plain)
    with torch.no_grad():
        torch.testing.assert_close(model(data_of(rank)), reference(data_of(rank)))


@pytest.mark.parametrize("plan", PLANS)
def test_a_view_of_a_weight_answers_nothing_once_it_is_freed(plan):
    run_on_ranks(_read_kept, 2, plan)


def _captured(rank, world_size, plan, reads_a_norm):
    """A hidden that somebody put into a list: the unit does not know of it."""
    captured = []

    def capture(block, x):
        hidden = torch.tanh(block.first(x))
        captured.append(block.norm(hidden) if reads_a_norm else block.last(hidden))
        return hidden.detach()

    model = shard(capture, plan)
    model(data_of(rank))
    if plan == "zero3":
        with pytest.raises(RuntimeError, match=REFUSED):
            captured[0].pow(2).sum().backward()
    else:
        captured[0].pow(2).sum().backward()
    with torch.no_grad():  # and the next forward is right
        expected = build(capture)(data_of(rank))
        torch.testing.assert_close(model(data_of(rank)), expected)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reads_a_norm", [False, True])
def test_a_backward_from_a_captured_activation_is_right_or_an_error(reads_a_norm, plan):
    run_on_ranks(_captured, 2, plan, reads_a_norm)


def _numpy(rank, world_size, plan):
    arrays, messages = [], []

    def keep(block, x):
        if block is model[0] and not arrays:
            arrays.append(block.first.weight.detach().numpy())
        return plain(block, x)

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lightning_fsdp").addHandler(handler)
    model, reference = shard(keep, plan), build(plain)

    def backward(model, x, factor=1.0):
        (model(x).pow(2).mean() * factor).backward()

    assert_trains_as(model, reference, world_size, rank, backward, num_steps=3)
    with torch.no_grad():
        model(data_of(rank))  # gathered into the memory that the array shows
    assert torch.allclose(torch.tensor(arrays[0]), reference[0].first.weight, atol=1e-5)
    (message,) = messages
    assert "unit '0'" in message
    assert "clone().numpy()" in message


@pytest.mark.parametrize("plan", PLANS)
def test_a_numpy_array_of_a_weight_keeps_the_memory_and_is_logged(plan):
    run_on_ranks(_numpy, 2, plan)


def test_a_guarded_tensor_refuses_and_answers_again():
    tensor = torch.ones(4)
    flags = torch_internals.access_flags(tensor)
    flags[0] = flags[2] = True
    for access in (tensor.clone, lambda: tensor.fill_(2.0), lambda: tensor.add_(1)):
        with pytest.raises(RuntimeError, match="invalid"):
            access()
    flags[0] = flags[2] = False
    assert tensor.add_(1).tolist() == [2.0] * 4


def test_where_the_flags_are_not_found_nothing_is_guarded(monkeypatch):
    monkeypatch.setattr(torch_internals, "_offset_of_access_flags", lambda: None)
    assert torch_internals.access_flags(torch.ones(4)) is None


def _delete_before_the_backward(rank, world_size, plan):
    """The graph outlives the modules."""
    torch.manual_seed(0)
    block = Block(plain)
    model = nn.Sequential(block, nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    x = torch.ones(2, 6)
    shard_model(model, PLANS[plan], units=["Block"])
    parameters = dict(model.named_parameters())
    loss = model(x).square().mean()
    gone = [weakref.ref(model), weakref.ref(block)]
    del model, block
    assert [each() for each in gone] == [None, None]
    loss.backward()
    reference(x).square().mean().backward()
    for name, parameter in reference.named_parameters():
        whole = parameters[name].grad.full_tensor()
        torch.testing.assert_close(whole, parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_a_backward_may_come_after_the_model_was_deleted(plan):
    run_on_ranks(_delete_before_the_backward, 2, plan)
