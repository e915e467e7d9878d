"""Optimizers that cannot be right over whole tensors are named, on every rank and in time."""

import pytest
import torch

from lightning_fsdp import full_state_dict, shard_model
from tests.support.models import causal_lm, mlp, mlp_batch, mlp_loss
from tests.support.optimizers import Normed
from tests.support.parity import assert_same_tensors
from tests.support.ranks import assert_errors, errors_on_ranks
from tests.support.whole_tensors import Descent, backward


class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


class Clipping(Normed):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.param_groups[0]["max_grad_norm"] = 1.0


REFUSED = {
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters()),
    "outer": lambda model: Outer(torch.optim.SGD(model.parameters(), lr=0.1)),
    "clipping": lambda model: Clipping(model.parameters()),
}
NAMED = {"lbfgs": "LBFGS", "outer": ".inner", "clipping": "max_grad_norm=1.0"}


def _refused(rank, world_size, name):
    model = shard_model(mlp())
    optimizer = REFUSED[name](model)
    before = full_state_dict(model)

    def closure():
        loss = mlp_loss(model, mlp_batch(0, 0, rank))
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    finally:
        assert_same_tensors(full_state_dict(model), before, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_with_all_tensors_at_once_is_refused_by_name(name):
    errors = errors_on_ranks(_refused, 2, name)
    assert_errors(errors, "NotImplementedError", NAMED[name])


class _Writes(Descent):
    """Keeps the slices that it got when it was built."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.kept = [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.kept:
                parameter.sub_(0.1)


def _writes_to_slices(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _Writes(model.parameters())
    backward(model, rank)
    optimizer.step()


class _Several(torch.optim.Optimizer):
    def __init__(self, optimizers):
        super().__init__([g for each in optimizers for g in each.param_groups], {})
        self.optimizers = optimizers

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


def _steps_several(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _Several([torch.optim.AdamW(model.parameters())])
    backward(model, rank)
    optimizer.step()


class ScheduleFreeAdamW(Descent):
    """By name, one whose eval() and train() write to parameters."""


def _is_schedule_free(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = ScheduleFreeAdamW(model.parameters())
    backward(model, rank)
    optimizer.step()


class _Sums(Descent):
    def __init__(self, parameters):
        super().__init__(parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)


def _allocates_beside_slices(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _Sums(model.parameters())
    backward(model, rank)
    optimizer.step()


def _in_another_order(rank, world_size):
    model = shard_model(causal_lm())
    equal = [block.up.weight for block in model.blocks]
    optimizer = Descent(equal[::-1] if rank else equal)
    backward(model, rank)
    optimizer.step()


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (_writes_to_slices, "RuntimeError", "has written to the slices of 'embedding.weight'"),
        (_steps_several, "NotImplementedError", "steps another optimizer, .optimizers"),
        (_is_schedule_free, "NotImplementedError", "elementwise_optimizer"),
        (_allocates_beside_slices, "RuntimeError", "'sum' of 'embedding.weight'"),
        (_in_another_order, "RuntimeError", "Descent steps blocks.0.up.weight"),
    ],
)
def test_what_cannot_be_right_is_named_on_every_rank(case, error, message):
    assert_errors(errors_on_ranks(case, 2), error, message)


def _step_others(rank, world_size, as_many):
    model = shard_model(mlp())
    stop = rank + 1 if as_many else None
    optimizer = Normed([model.first.weight, model.second.weight][rank:stop])
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    with pytest.raises(RuntimeError, match="Normed steps"):
        optimizer.step()
    optimizer.step()  # no sooner than ranks agree


@pytest.mark.parametrize("as_many", [True, False])
def test_ranks_that_step_other_parameters_are_told(as_many):
    errors = errors_on_ranks(_step_others, 2, as_many)
    assert_errors(errors, "RuntimeError", "Normed steps")
