"""Gradients are those of the mean over all tokens of an optimizer step.

Judged against one process that runs the joined, unpadded batch of the step through plain torch.
"""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.support.cases import each_on_trainer_ranks
from tests.support.token_mean import LENGTHS, Sequences, Tokens, loader, reference
from tests.support.trainer import SHARDED, fit, on_trainer_ranks, seeded, weights_of, with_options

FEW = ("scratch_fsdp_zero3", "fsdp2_zero2")
BOTH_OF_CORE = (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3")

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _net_of(model):
    return {name.removeprefix("net."): value for name, value in weights_of(model).items()}


def _compare(
    rank, world_size, accumulation, folder, names, options, trainer_options, says="num_tokens"
):
    expected, losses = reference(
        world_size, accumulation, clip=trainer_options.get("gradient_clip_val")
    )
    for name in names:
        _, model = fit(
            with_options(name, **options),
            folder,
            seeded(lambda: Tokens(says)),
            loader(),
            accumulate_grad_batches=accumulation,
            use_distributed_sampler=False,
            **trainer_options,
        )
        torch.testing.assert_close(
            _net_of(model), expected, atol=2e-6, rtol=2e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
        torch.testing.assert_close(model.step_losses, losses, atol=1e-6, rtol=1e-5)


def _compare_by(rank, world_size, accumulation, folder, names_by_accumulation):
    names = names_by_accumulation[accumulation]
    _compare(rank, world_size, accumulation, folder, names, {}, {})


# Every engine and stage accumulates, whole windows or with a shorter last one; the numbers of ranks
# meet one and several micro-batches.
@pytest.mark.parametrize(
    ("world_size", "names_by_accumulation"),
    [
        (1, {2: FEW}),
        (2, {1: FEW, 2: SHARDED[::2], 4: SHARDED[1::2]}),
        (3, {1: FEW, 4: FEW}),
        (4, {2: FEW}),
    ],
    ids=[1, 2, 3, 4],
)
def test_a_step_is_that_of_one_process_on_the_joined_unpadded_batch(
    tmp_path, world_size, names_by_accumulation
):
    """With micro-batches and ranks without a token, and a last window that is shorter."""
    each_on_trainer_ranks(
        _compare_by, world_size, names_by_accumulation, tmp_path, names_by_accumulation,
        timeout_s=200,
    )  # fmt: skip


@pytest.mark.parametrize("clip", [0.05])
def test_the_norm_that_is_clipped_is_that_of_the_final_gradient(tmp_path, clip):
    on_trainer_ranks(_compare, 2, 2, tmp_path, BOTH_OF_CORE, {}, {"gradient_clip_val": clip})


def test_reduced_micro_batches_are_weighed_alike(tmp_path):
    on_trainer_ranks(_compare, 2, 4, tmp_path, BOTH_OF_CORE, {"accumulation": "sum"}, {})


@pytest.mark.parametrize("key", ["counts", "weight"])
def test_the_number_comes_from_a_key_of_the_batch_or_of_the_dictionary(tmp_path, key):
    says = key if key == "weight" else "nothing"
    names = ("scratch_fsdp_zero3", "fsdp1_zero3")
    on_trainer_ranks(_compare, 2, 2, tmp_path, names, {"weigh_by": key}, {}, says)


class _Whole(Tokens):
    """Momentum that takes a step of the whole matrix: an optimizer that needs whole tensors."""

    def configure_optimizers(self):
        return _Normalised(self.parameters(), lr=self.lr)


class _Normalised(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (1 + p.grad.norm()))


def _whole_tensors(rank, world_size, folder):
    expected, _ = reference(world_size, 2, make=_Normalised)
    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        _, model = fit(
            name,
            folder,
            seeded(_Whole),
            loader(),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
        )
        torch.testing.assert_close(_net_of(model), expected, atol=2e-6, rtol=2e-5)


def test_optimizers_over_whole_tensors_get_the_weighed_gradient(tmp_path):
    on_trainer_ranks(_whole_tensors, 2, tmp_path)


def _narrow(rank, world_size, folder, precision):
    expected, losses = reference(world_size, 2)
    for name in ("scratch_fsdp_zero3", "fsdp2_zero2"):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if precision == "16-mixed" else None
        _, model = fit(
            name,
            folder,
            seeded(Tokens),
            loader(),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
            plugins=[MixedPrecision(precision, "cpu", scaler)],
        )
        torch.testing.assert_close(model.step_losses, losses, atol=0.03, rtol=0.02)
        start, found = dict(seeded(Tokens).net.state_dict()), _net_of(model)
        moved = _distance(expected, start)
        assert _distance(found, expected) < 0.05 * moved, (name, moved)


def _distance(one, other):
    return sum((one[name] - other[name]).square().sum() for name in one).sqrt()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_narrow_gradients_keep_their_magnitude(tmp_path, precision):
    on_trainer_ranks(_narrow, 2, tmp_path, precision)


class _KeepsApart(pl.Callback):
    def on_train_start(self, trainer, module):
        self.context = trainer.strategy.gradients.micro_batches("separate")
        self.context.__enter__()


def _apart_without_reductions(rank, world_size, folder):
    for name in SHARDED[::2]:
        options = {"callbacks": [_KeepsApart()], "accumulate_grad_batches": 2}
        with pytest.raises(RuntimeError, match=r"micro_batches\('separate'\).*accumulation='sum'"):
            fit(name, folder, seeded(Tokens), loader(), **options)


def test_micro_batches_that_are_not_reduced_cannot_be_kept_apart(tmp_path):
    on_trainer_ranks(_apart_without_reductions, 2, tmp_path)


def _apart(rank, world_size, folder):
    class Keeps(_KeepsApart):
        parts = None

        def on_before_optimizer_step(self, trainer, module, optimizer):
            gradient = trainer.strategy.gradients["net.head.bias"]
            self.parts, self.total = [gradient.full(m) for m in (0, 1)], gradient.full()

    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        keeps = Keeps()
        fit(
            with_options(name, accumulation="sum"),
            folder,
            seeded(Tokens),
            loader(),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
            callbacks=[keeps],
            max_steps=1,
        )
        keeps.context.__exit__(None, None, None)
        torch.testing.assert_close(sum(keeps.parts), keeps.total, atol=1e-7, rtol=1e-5)
        net = seeded(Tokens).net
        rows = range(4 * world_size)
        num_tokens = sum(LENGTHS[r] for r in rows)
        first, data = list(rows)[: 2 * world_size], Sequences()
        loss = sum(
            F.cross_entropy(net(data[r]["x"]), data[r]["labels"], reduction="sum") for r in first
        )
        (loss / num_tokens).backward()
        torch.testing.assert_close(keeps.parts[0], net.head.bias.grad, atol=1e-6, rtol=1e-5)


def test_a_micro_batch_kept_apart_is_its_share_of_the_mean(tmp_path):
    on_trainer_ranks(_apart, 2, tmp_path)
