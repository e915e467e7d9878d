"""What is said of a step that is not finite: large, masked, compiled, of two optimizers."""

import functools
import warnings
from collections import Counter

import pytest
import torch

from lightning_fsdp import GradientAccessProbe, NonfiniteGradient
from tests.support.nonfinite import RANK, Broken
from tests.support.trainer import (
    AdamwRegressor,
    fit,
    make_loader,
    on_trainer_ranks,
    seeded,
    with_options,
)


def _large(rank, world_size, folder):
    class Large(AdamwRegressor):
        def on_train_start(self):
            self.trainer.strategy.gradients.on_local(self._fill)

        def _fill(self, name, gradient, micro_batch):
            if name == "blocks.0.up.weight":
                gradient.fill_(1e38)

    message = "Each gradient is finite; their norm is too large for fp32"
    strategy = with_options("scratch_fsdp_zero3", on_nonfinite="raise")
    with pytest.raises(NonfiniteGradient, match=message):
        fit(strategy, folder, seeded(Large), make_loader(8))


def test_large_gradients_whose_sum_overflows_are_finite(tmp_path):
    on_trainer_ranks(_large, 2, tmp_path)


class _Mask(torch.nn.Module):
    def forward(self, x):
        return torch.where(torch.arange(7) < 6, 0.0, float("-inf"))


class Masked(Broken):
    """With what is infinite on purpose: a frozen parameter, and the output of a module."""

    def __init__(self, where):
        super().__init__(where)
        self.bias = torch.nn.Parameter(_Mask()(None), requires_grad=False)
        self.mask = _Mask()

    def forward(self, x):
        x = self.inlet(x)
        x = x * (x + self.bias + self.mask(x)).softmax(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _masked(rank, world_size, folder, accumulation, where, message):
    for name in ("scratch_fsdp_zero3", "fsdp1_zero3"):
        model = seeded(lambda: Masked(where))
        strategy = with_options(name, on_nonfinite="raise")
        with pytest.raises(NonfiniteGradient, match=message) as caught:
            fit(
                strategy,
                folder,
                model,
                make_loader(48),
                accumulate_grad_batches=accumulation,
                callbacks=[GradientAccessProbe(steps=[99])],
            )
        assert "'mask'" not in str(caught.value)


def _compiled(rank, world_size, folder):
    warnings.simplefilter("ignore")  # what the compiler does raises warnings
    compiler, operations = torch.compile, []

    def noting(graph, inputs):
        operations.extend(n.target for n in graph.graph.nodes if n.op.startswith("call"))
        return graph

    torch.compile = functools.partial(compiler, backend=noting)
    found = []
    for callbacks in ([], [GradientAccessProbe(steps=[99])]):
        torch.compiler.reset()
        strategy = with_options("scratch_fsdp_zero3", on_nonfinite="raise", compile=True)
        fit(strategy, folder, seeded(AdamwRegressor), make_loader(16), callbacks=callbacks)
        found.append(Counter(map(str, operations)))
        operations.clear()
    torch.compile = compiler
    assert found[1]
    assert found[1] <= found[0], "torch 2.11 compiles a unit twice where nobody looks on"


def test_with_the_probe_each_operation_is_compiled_once_as_without(tmp_path):
    on_trainer_ranks(_compiled, 2, tmp_path)


_BLAMED = {
    "local": r"in the local gradient of 'blocks\.0\.up\.weight'.*Not finite either: 'bias'\.",
    "activation": r"local gradient of 'head.*first activation: the output of 'blocks\.1\.up'",
}


@pytest.mark.parametrize("where", _BLAMED)
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 4)])
def test_what_is_infinite_on_purpose_is_not_blamed(tmp_path, world_size, accumulation, where):
    """It was so in an earlier step, or is so in another micro-batch of the first one."""
    on_trainer_ranks(_masked, world_size, tmp_path, accumulation, where, _BLAMED[where])


def _in_a_dictionary(rank, world_size, folder):
    class Divides(torch.nn.Module):
        def forward(self, x):
            return {"hidden": x / 0}

    class Model(AdamwRegressor):
        def __init__(self):
            super().__init__()
            self.divides = Divides()

        def forward(self, x):
            return self.head(self.divides(self.inlet(x))["hidden"])

    strategy = with_options("scratch_fsdp_zero3", on_nonfinite="raise")
    probes = [GradientAccessProbe(steps=[99])]
    with pytest.raises(NonfiniteGradient, match="first activation: the output of 'divides'"):
        fit(strategy, folder, seeded(Model), make_loader(8), callbacks=probes)


def test_an_activation_in_a_dictionary_is_named(tmp_path):
    """As modules of transformers return theirs."""
    on_trainer_ranks(_in_a_dictionary, 1, tmp_path)


def _clipped_twice(rank, world_size, folder):
    class ClipsTwice(Broken):
        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            self.clip_gradients(optimizer, 0.1, "norm")
            self.clip_gradients(optimizer, 0.05, "value")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = with_options("scratch_fsdp_zero3", on_nonfinite="skip")
        model = seeded(lambda: ClipsTwice("local"))
        trainer, _ = fit(strategy, folder, model, make_loader(48), accumulate_grad_batches=2)
    assert trainer.strategy.num_skipped_steps == 1


def test_a_step_that_is_clipped_twice_is_skipped_once(tmp_path):
    on_trainer_ranks(_clipped_twice, 2, tmp_path)


def _two_optimizers(rank, world_size, folder):
    class Two(AdamwRegressor):
        """One backward, and a step of each; what the second one has is broken."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            rest = [*self.inlet.parameters(), *self.blocks.parameters()]
            return [torch.optim.SGD(p, lr=0.1) for p in (list(self.head.parameters()), rest)]

        def on_train_start(self):
            self.trainer.strategy.gradients.on_local(self._break)

        def _break(self, name, gradient, micro_batch):
            if name == "blocks.0.up.weight" and self.trainer.global_rank == RANK:
                gradient.view(-1)[0] = float("nan")

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        with pytest.raises(NonfiniteGradient, match=r"local gradient of 'blocks\.0\.up\.weight'"):
            fit(with_options(name, on_nonfinite="raise"), folder, seeded(Two), make_loader(8))


def test_the_step_of_another_optimizer_forgets_nothing(tmp_path):
    on_trainer_ranks(_two_optimizers, 2, tmp_path)
