"""The probe against plain gradients, and against gradients that leak on purpose."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from lightning_fsdp import GradientAccessProbe, GradientNoiseScale, MicrobatchIsolationProbe
from lightning_fsdp.callbacks.microbatch_isolation import _dot
from tests.support.cases import each_on_trainer_ranks
from tests.support.trainer import (
    SHARDED,
    STRATEGIES,
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
)
from tests.support.trainer import weights_of as weights_of_module


def _strategy(name):
    """A strategy by name; with ``+sum`` one that reduces every micro-batch."""
    if not name.endswith("+sum"):
        return name
    import lightning_fsdp

    return lightning_fsdp.ScratchFSDPStrategy(zero_stage=3, accumulation="sum")


class _PlainNorms(pl.Callback):
    """Norms and cosines of this rank's micro-batches from a plain copy of the model, in fp64."""

    def __init__(self):
        self.steps, self.parts = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        model = seeded(Regressor).double()
        access = getattr(trainer.strategy, "weights", None)
        weights = dict(module.named_parameters()) if access is None else dict(access.full())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        (model.loss([t.double() for t in batch]) / trainer.accumulate_grad_batches).backward()
        self.parts.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        total = sum(self.parts)
        cosines = [torch.cosine_similarity(g, total, dim=0).item() for g in self.parts]
        self.steps.append(([g.norm().item() for g in self.parts], cosines))
        self.parts = []


def _watched(rank, world_size, strategy, precision, folder, max_epochs=2):
    weights = []
    for is_watched in (False, True):
        probe, plain = MicrobatchIsolationProbe(steps=2), _PlainNorms()
        model = seeded(Regressor)
        trainer = make_trainer(
            _strategy(strategy),
            Path(folder),
            precision=precision,
            accumulate_grad_batches=3,
            max_epochs=max_epochs,
            callbacks=[probe, plain] if is_watched else [],
        )
        trainer.fit(model, make_loader(56))  # 7 micro-batches on a rank: 3 3 1
        weights.append(weights_of_module(model))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert [report.step for report in probe.reports] == list(range(0, trainer.global_step, 2))
    tolerance = 1e-4 if precision == "32-true" else 0.05
    for report in probe.reports:
        norms, cosines = plain.steps[report.step]
        torch.testing.assert_close(report.norms[rank], norms, rtol=tolerance, atol=0)
        torch.testing.assert_close(report.cosines[rank], cosines, rtol=0, atol=tolerance)


def test_norms_and_cosines_are_right_and_training_ends_in_the_same_bits(tmp_path):
    strategies = (*STRATEGIES, "scratch_fsdp_zero3+sum")
    each_on_trainer_ranks(_watched, 2, strategies, "32-true", str(tmp_path), 1)


# Each engine in each precision.
@pytest.mark.parametrize(
    ("precision", "strategies"), [("bf16-true", SHARDED[::2]), ("bf16-mixed", SHARDED[1::2])]
)
def test_rounding_is_no_leak(tmp_path, precision, strategies):
    each_on_trainer_ranks(_watched, 2, strategies, precision, str(tmp_path), 1)


class _WithStatistics(Regressor):
    """A norm that computes with weights in fp32, whatever was gathered."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, x):
        return super().forward(self.norm(x))


def _watched_statistics(rank, world_size, strategy, folder):
    probe = MicrobatchIsolationProbe(steps=1)
    options = {"precision": "bf16-mixed", "callbacks": [probe], "max_epochs": 1}
    trainer = make_trainer(_strategy(strategy), Path(folder), **options)
    trainer.fit(seeded(_WithStatistics), make_loader())
    assert len(probe.reports) == trainer.global_step


def test_rounding_of_weights_that_a_norm_widens_is_no_leak(tmp_path):
    each_on_trainer_ranks(_watched_statistics, 2, SHARDED[::2], str(tmp_path))


def test_products_of_gradients_in_16_bits_are_taken_in_more():
    large = torch.full((100,), 3e3, dtype=torch.float16)  # its square is past what fp16 holds
    assert _dot(large, large) == 100 * 9e6
    many = torch.full((100_000,), 0.5, dtype=torch.bfloat16)
    assert _dot(many, many.float()) == _dot(many, many) == 25_000


class _Weighed(Regressor):
    """The number of tokens says what equal micro-batches and ranks do without it."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "num_tokens": 3}


def _tokens(rank, world_size, strategy, folder):
    reports = []
    for kind in (Regressor, _Weighed):
        probe = MicrobatchIsolationProbe()
        trainer = make_trainer(
            _strategy(strategy), Path(folder), accumulate_grad_batches=2, callbacks=[probe]
        )
        trainer.fit(seeded(kind), make_loader(32))
        reports.append(probe.reports)
    for without, weighed in zip(*reports, strict=True):
        torch.testing.assert_close(weighed.norms, without.norms, rtol=1e-4, atol=0)


def test_the_mean_over_tokens_is_no_leak(tmp_path):
    strategies = (*STRATEGIES[1:-1], "scratch_fsdp_zero3+sum")
    each_on_trainer_ranks(_tokens, 2, strategies, str(tmp_path))


class _Branches(Regressor):
    """Its second block is used by every other micro-batch, the last one left out."""

    def training_step(self, batch, batch_idx):
        x = self.blocks[0](self.inlet(batch[0]))
        if batch_idx % 2 == 0:
            x = self.blocks[1](x)
        return F.mse_loss(self.head(x), batch[1])


def _branching(rank, world_size, folder):
    estimates = []
    for strategy in ("ddp_find_unused_parameters_true", "scratch_fsdp_zero3"):
        noise, access = GradientNoiseScale(smoothing=0.0), GradientAccessProbe(steps=1)
        trainer = make_trainer(
            strategy,
            Path(folder),
            accumulate_grad_batches=2,
            max_steps=1,
            callbacks=[MicrobatchIsolationProbe(), noise, access],
        )
        trainer.fit(seeded(_Branches), make_loader())
        assert set(access.records[-1].states.values()) == {"reduced"}, strategy
        estimates.append([noise.estimate().signal, noise.estimate().noise])
    torch.testing.assert_close(*estimates, rtol=1e-4, atol=0)


def test_a_parameter_that_the_last_micro_batch_does_not_use_is_no_leak_under_ddp(tmp_path):
    on_trainer_ranks(_branching, 2, str(tmp_path))


def test_a_single_device_works(tmp_path):
    on_trainer_ranks(_watched, 1, "auto", "32-true", str(tmp_path))


# -- leaks -----------------------------------------------------------------------------------------


class _Leaks(Regressor):
    """Does something to a gradient that training without the probe would not notice."""

    leak = ""

    def on_train_batch_start(self, batch, batch_idx):
        self.batch_idx = batch_idx

    def on_before_backward(self, loss):
        """After the probe has looked; what is added now counts to nobody."""
        if self.leak == "micro-batch" and self.batch_idx == 1 and self.trainer.global_rank == 1:
            access = getattr(self.trainer.strategy, "gradients", None)
            parameter = self.head.weight
            waiting = parameter.grad if access is None else access["head.weight"].local()
            waiting.add_(waiting)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if self.leak == "step" and batch_idx > 0:
            return  # as when nobody clears
        optimizer.zero_grad()
        if self.leak == "parameter" and batch_idx > 0:
            parameter = dict(self.named_parameters())["blocks.1.up.bias"]
            parameter.grad = self.kept

    def on_before_optimizer_step(self, optimizer):
        if self.leak == "parameter":
            self.kept = dict(self.named_parameters())["blocks.1.up.bias"].grad


def _leaking(rank, world_size, strategy, leak, message, folder):
    from lightning_fsdp.callbacks.microbatch_isolation import GradientsLeaked

    model = seeded(_Leaks)
    model.leak = leak
    trainer = make_trainer(
        strategy,
        Path(folder),
        accumulate_grad_batches=2,
        callbacks=[MicrobatchIsolationProbe()],
    )
    with pytest.raises(GradientsLeaked, match=message) as caught:
        trainer.fit(model, make_loader())
    return str(caught.value)


def _assert_named(strategies, leak, message, folder):
    found = each_on_trainer_ranks(_leaking, 2, strategies, leak, message, str(folder))
    for strategy, (first, second) in found.items():
        assert first == second, strategy


def test_a_micro_batch_that_leaks_into_the_next_is_named(tmp_path):
    message = r"'head.weight' \(rank 0, step 0\): expected the sum of micro-batches \[0, 1\]"
    _assert_named([*STRATEGIES, "fsdp1_zero2", "fsdp2_zero2"], "micro-batch", message, tmp_path)


@pytest.mark.parametrize("leak", ["step", "parameter"])
def test_a_step_that_leaks_into_the_next_is_named(tmp_path, leak):
    name = {"step": "", "parameter": "blocks.1.up.bias"}[leak]
    message = rf"{name}' \(rank 0, step 1\): expected nothing before the first micro-batch"
    # FSDP1 does not show single gradients under their names.
    left_out = {"step": (), "parameter": ("fsdp1_zero3",)}[leak]
    _assert_named([s for s in STRATEGIES if s not in left_out], leak, message, tmp_path)
