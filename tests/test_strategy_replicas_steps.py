"""Steps of replicas are those of all ranks together: gradients, norms, weights, bit for bit alike.

2 x 2: ranks 0, 1 hold one model, ranks 2, 3 another; 0 and 2 hold the same shard.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

from lightning_fsdp import GradientUnavailable
from tests.support.cases import each_on_trainer_ranks
from tests.support.counting import CollectiveCounter
from tests.support.trainer import (
    SHARDED,
    Regressor,
    make_data,
    make_loader,
    make_trainer,
    seeded,
    weights_of,
    with_options,
)

pytestmark = pytest.mark.flat("chooses replicas itself")

MAX_NORM, NUM_STEPS = 0.05, 4  # two epochs of four batches on each of four ranks, two to a step


def _tokens(rank, batch_idx):
    return 1 + rank + 2 * batch_idx


class Watched(Regressor):
    """Notes what an optimizer is about to step with, and what moved between replicas for it."""

    weighs = False
    optimizer = torch.optim.SGD

    def __init__(self):
        super().__init__()
        self.states, self.steps, self.averages = [], [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        tokens = torch.tensor(_tokens(self.global_rank, batch_idx))
        return {"loss": loss, "num_tokens": tokens} if self.weighs else loss

    def on_before_backward(self, loss):
        column = self.trainer.strategy.engine.grid.mesh.get_group(0)
        self._counter = CollectiveCounter(column)
        self._counter.__enter__()

    def on_after_backward(self):
        self._counter.__exit__(None, None, None)
        self.averages.append(bool(self._counter.of("all_reduce") or self._counter.reductions()))
        gradients = self.trainer.strategy.gradients
        self.states.append({gradients[name].state for name in gradients.names()})
        if self.states[-1] == {"replica"}:
            with pytest.raises(GradientUnavailable, match="got state 'replica'"):
                _ = gradients["head.weight"].shard

    def on_before_optimizer_step(self, optimizer):
        gradients = self.trainer.strategy.gradients
        self.steps.append((dict(gradients.full()), gradients.norm(), gradients.dot(None, None)))

    def configure_optimizers(self):
        options = {"momentum": 0.9} if self.optimizer is torch.optim.SGD else {}
        return self.optimizer(self.parameters(), lr=0.05, **options)


class Weighed(Watched):
    weighs = True


class Adafactor(Watched):
    optimizer = torch.optim.Adafactor


def _in_one_process(kind):
    """The same steps of plain torch on the joined batches."""
    model, data = seeded(kind), make_data(32)
    samplers = [DistributedSampler(data, num_replicas=4, rank=rank) for rank in range(4)]
    optimizer = model.configure_optimizers()
    for epoch, first in itertools.product(range(2), (0, 2)):
        losses, weights = [], []
        for batch_idx, rank in itertools.product((first, first + 1), range(4)):
            samplers[rank].set_epoch(epoch)
            x, y = data[list(samplers[rank])[2 * batch_idx : 2 * batch_idx + 2]]
            losses.append(F.mse_loss(model(x), y))
            weights.append(_tokens(rank, batch_idx) if kind.weighs else 1)
        loss = sum(w * each for w, each in zip(weights, losses, strict=True)) / sum(weights)
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        model.steps.append((gradients, norm, norm.double() ** 2))
        optimizer.step()
    return model.steps, weights_of(model)


OVER_ALL = {"state_over": "all"}
ACCUMULATION = {Watched: "local", Weighed: "sum", Adafactor: "sum"}

# Kinds of steps meet engines, and state over all, where gradients are averaged; stages do not: each
# is there with both accumulations or with the one that the other stage has not.
CASES = {
    "scratch_fsdp_zero3": ({}, (Watched, Weighed, Adafactor)),
    "scratch_fsdp_zero2": ({}, (Watched, Weighed)),
    "state over all": (OVER_ALL, (Watched, Weighed, Adafactor)),
    "fsdp1_zero3": ({}, (Watched, Adafactor)),
    "fsdp1_zero2": ({}, (Weighed,)),
    "fsdp2_zero3": ({}, (Weighed, Adafactor)),
    "fsdp2_zero2": ({}, (Watched,)),
}


def _train(rank, world_size, case, folder):
    options, kinds = CASES[case]
    found = {}
    for kind in kinds:
        model = seeded(kind)
        trainer = make_trainer(
            with_options(
                case if case in SHARDED else "scratch_fsdp_zero2",
                shard_size=2,
                accumulation=ACCUMULATION[kind],
                **options,
            ),
            folder,
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=MAX_NORM,
        )
        trainer.fit(model, make_loader(32, batch_size=2))
        assert trainer.strategy.num_replicas == (1 if options else 2)
        found[kind.__name__] = (model.steps, weights_of(model), model.states, model.averages)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By case, what each rank found."""
    return each_on_trainer_ranks(_train, 4, CASES, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def in_one_process():
    return functools.cache(_in_one_process)


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process_on_the_joined_batch(trained, in_one_process, case):
    for kind in CASES[case][1]:
        steps, weights = in_one_process(kind)
        for found in trained[case]:
            their_steps, their_weights, states, averages = found[kind.__name__]
            assert len(their_steps) == len(steps) == NUM_STEPS
            # A norm is clipped after it was noted.
            torch.testing.assert_close(their_steps, steps, atol=2e-6, rtol=1e-4, check_dtype=False)
            torch.testing.assert_close(their_weights, weights, atol=2e-6, rtol=1e-4)
            assert their_steps[0][1] > MAX_NORM, "nothing was clipped"
            torch.testing.assert_close(
                their_weights, trained[case][0][kind.__name__][1], atol=0, rtol=0
            )  # the bits of each other
            is_late = kind is Watched or not case.startswith("fsdp1")
            assert averages == ([False, True] if is_late else [True, True]) * NUM_STEPS
            first = {"local"} if kind is Watched else {"replica"} if is_late else {"reduced"}
            assert states == [first, {"reduced"}] * NUM_STEPS
