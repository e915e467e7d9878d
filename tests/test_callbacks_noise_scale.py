"""The noise scale of a problem that has it in closed form.

A linear loss w . x has the gradient x, whatever w is. With x drawn from N(mu, sigma^2 I) in d
dimensions, |G|^2 = |mu|^2, tr(Sigma) = d sigma^2, and their ratio is the simple noise scale.
"""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fsdp import GradientAccessProbe, GradientNoiseScale
from lightning_fsdp.callbacks.noise_scale import _first_dimension
from tests.support.trainer import Regressor, make_loader, make_trainer, on_trainer_ranks, seeded

DIMENSIONS, SIGMA, SIGNAL = 40, 0.5, 0.4
NOISE = DIMENSIONS * SIGMA**2  # tr(Sigma) = 10, so that the noise scale is 25 samples


class _Linear(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(DIMENSIONS, 1, bias=False)

    def training_step(self, batch, batch_idx):
        return self.weight(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _samples(num):
    generator = torch.Generator().manual_seed(1)
    mean = torch.full((DIMENSIONS,), (SIGNAL / DIMENSIONS) ** 0.5)
    return mean + SIGMA * torch.randn(num, DIMENSIONS, generator=generator)


def _plain_estimates(batches):
    """Of one step, from the gradients of its micro-batches, which are the means of its samples."""
    means = torch.stack([batch.double().mean(0) for batch in batches])
    small = means.square().sum(1).mean()
    big = means.mean(0).square().sum()
    b = len(batches) / sum(1 / len(batch) for batch in batches)
    n = len(batches)
    signal = (n * b * big - b * small) / (n * b - b)
    noise = (small - big) / (1 / b - 1 / (n * b))
    return signal.item(), noise.item()


def _estimated(rank, world_size, strategy, folder, accumulate, steps):
    """Asserts that it is what the gradients of plain torch give."""
    batch = 4
    samples = _samples(world_size * accumulate * batch * steps)
    probe = GradientNoiseScale(smoothing=0.999)
    trainer = make_trainer(
        strategy,
        Path(folder),
        accumulate_grad_batches=accumulate,
        callbacks=[probe],
        gradient_clip_val=1e-3,
        use_distributed_sampler=False,
    )
    loader = DataLoader(TensorDataset(samples[rank::world_size]), batch_size=batch)
    trainer.fit(seeded(_Linear), loader)
    assert trainer.global_step == steps
    mine = [samples[r::world_size].split(batch) for r in range(world_size)]
    averages, weight = [0.0, 0.0], 0.0
    for step in range(steps):
        parts = [m for r in mine for m in r[step * accumulate : (step + 1) * accumulate]]
        estimates = _plain_estimates(parts)
        averages = [0.999 * a + 0.001 * e for a, e in zip(averages, estimates, strict=True)]
        weight = 0.999 * weight + 0.001
    found = probe.estimate()
    expected = [average / weight for average in averages]
    torch.testing.assert_close([found.signal, found.noise], expected, rtol=1e-4, atol=0)
    return found.signal, found.noise, found.simple


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        ("scratch_fsdp_zero2", 2),
        ("scratch_fsdp_zero3", 1),
        ("fsdp1_zero3", 2),
        ("fsdp2_zero3", 1),
        ("fsdp2_zero3", 2),
        ("ddp", 2),
    ],
)
def test_the_estimate_is_that_of_plain_gradients(tmp_path, strategy, accumulate):
    first, second = on_trainer_ranks(_estimated, 2, strategy, str(tmp_path), accumulate, 12)
    assert first == second


def test_a_known_noise_scale_is_found(tmp_path):
    first, second = on_trainer_ranks(_estimated, 2, "scratch_fsdp_zero2", str(tmp_path), 2, 120)
    assert first == second
    signal, noise, simple = first
    assert signal == pytest.approx(SIGNAL, rel=0.15)
    assert noise == pytest.approx(NOISE, rel=0.05)
    assert simple == pytest.approx(NOISE / SIGNAL, rel=0.2)


def test_one_device_with_accumulation_is_enough(tmp_path):
    on_trainer_ranks(_estimated, 1, "auto", str(tmp_path), 3, 12)


def test_a_micro_batch_without_samples_counts_for_nothing(tmp_path):
    samples = [_samples(6)[:3], torch.zeros(1, DIMENSIONS), _samples(6)[3:]]
    probe = GradientNoiseScale(smoothing=0.0, num_samples=lambda batch: batch[0].any(1).sum())
    trainer = make_trainer(
        "auto", tmp_path, devices=1, accumulate_grad_batches=3, callbacks=[probe]
    )
    trainer.fit(seeded(_Linear), DataLoader([(x,) for x in samples], batch_size=None))
    signal, noise = _plain_estimates([samples[0], samples[2]])
    assert (probe.estimate().signal, probe.estimate().noise) == pytest.approx((signal, noise), 1e-4)


class _Fused(_Linear):
    """Its optimizer divides gradients by the scale itself, in its step."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, fused=True)


def _scaled(rank, world_size, folder):
    found = []
    for make, scale in ((_Linear, 1.0), (_Linear, 8.0), (_Fused, 8.0)):
        noise, access = GradientNoiseScale(smoothing=0.0), GradientAccessProbe(steps=1)
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", scale))
        trainer = make_trainer(
            "auto",
            Path(folder),
            accumulate_grad_batches=2,
            callbacks=[noise, access],
            plugins=[precision],
        )
        trainer.fit(seeded(make), DataLoader(TensorDataset(_samples(8)), batch_size=4))
        found.append((noise.estimate(), access.records[-1].norms["weight.weight"]))
    for estimate, norm in found[1:]:
        assert estimate.signal == pytest.approx(found[0][0].signal, rel=1e-2)
        assert estimate.noise == pytest.approx(found[0][0].noise, rel=1e-2)
        assert norm == pytest.approx(found[0][1], rel=1e-2)


def test_gradients_that_the_optimizer_unscales_are_unscaled(tmp_path):
    on_trainer_ranks(_scaled, 1, str(tmp_path))


class _Sizes(pl.Callback):
    """Asserts the estimates of each step with micro-batches of unequal number and size."""

    def __init__(self, probe):
        self.probe, self.parts, self.found = probe, [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.parts.append(batch[0].clone())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step > len(self.found):
            self.found.append(self.probe.estimate())
            signal, noise = _plain_estimates(self.parts)
            assert self.found[-1].signal == pytest.approx(signal, rel=1e-3)
            assert self.found[-1].noise == pytest.approx(noise, rel=1e-3)
            self.parts = []


def test_a_last_step_of_fewer_and_smaller_micro_batches_is_right(tmp_path):
    probe = GradientNoiseScale(smoothing=0.0)
    sizes = _Sizes(probe)
    trainer = make_trainer(
        "auto", tmp_path, devices=1, accumulate_grad_batches=3, callbacks=[probe, sizes]
    )
    loader = DataLoader(TensorDataset(_samples(18)), batch_size=4)  # 4 4 4 | 4 2
    trainer.fit(seeded(_Linear), loader)
    assert len(sizes.found) == 2


class _Counts(_Linear):
    """Says how many samples its loss is the mean of."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "num_tokens": len(batch[0])}


def _weighed(rank, world_size, folder, sizes, num_equal):
    """Micro-batches of these sizes on each rank, two to a step; the last one is alone."""
    samples = list(_samples(world_size * sum(sizes)).split(sizes * world_size))
    mine = [samples[rank * len(sizes) + i] for i in range(len(sizes))]
    found = {}
    for kind in (_Linear, _Counts):
        probe = GradientNoiseScale(smoothing=0.0)
        trainer = make_trainer(
            "scratch_fsdp_zero3",
            Path(folder),
            accumulate_grad_batches=2,
            callbacks=[probe],
            max_steps=num_equal,
            use_distributed_sampler=False,
        )
        trainer.fit(seeded(kind), DataLoader([(x,) for x in mine], batch_size=None))
        found[kind] = probe.estimate()
    last = [samples[r * len(sizes) + i] for r in range(world_size) for i in range(len(sizes))]
    return found, last


def _weighed_alike(rank, world_size, folder):
    found, _ = _weighed(rank, world_size, folder, [3, 3, 3], 2)
    with_counts, without = found[_Counts], found[_Linear]
    assert with_counts.signal == pytest.approx(without.signal, rel=1e-5)
    assert with_counts.noise == pytest.approx(without.noise, rel=1e-5)


def test_equal_numbers_of_tokens_change_nothing(tmp_path):
    """Also in a last step of fewer micro-batches."""
    on_trainer_ranks(_weighed_alike, 2, str(tmp_path))


def _weighed_by_size(rank, world_size, folder):
    found, batches = _weighed(rank, world_size, folder, [5, 2], 1)
    means = torch.stack([batch.double().mean(0) for batch in batches])
    small, num = means.square().sum(1).mean(), sum(map(len, batches))
    big = torch.cat(batches).double().mean(0).square().sum()
    b = len(batches) / sum(1 / len(batch) for batch in batches)
    signal, noise = (num * big - b * small) / (num - b), (small - big) / (1 / b - 1 / num)
    assert found[_Counts].signal == pytest.approx(signal.item(), rel=1e-4)
    assert found[_Counts].noise == pytest.approx(noise.item(), rel=1e-4)


def test_a_step_that_is_the_mean_over_tokens_is_taken_with_its_weights(tmp_path):
    on_trainer_ranks(_weighed_by_size, 2, str(tmp_path))


def _logged(rank, world_size, folder):
    logger = TensorBoardLogger(folder, name=None, version="run")
    trainer = make_trainer(
        "scratch_fsdp_zero3",
        Path(folder),
        logger=logger,
        callbacks=[GradientNoiseScale(every_n_steps=2)],
    )
    trainer.fit(seeded(Regressor), make_loader())


def test_tensorboard_shows_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_trainer_ranks(_logged, 2, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    batch_sizes = events.Scalars("noise_scale/batch_size")
    assert [(event.step, event.value) for event in batch_sizes] == [(0, 8.0), (2, 8.0)]
    assert all(event.value > 0 for event in events.Scalars("noise_scale/noise"))


def test_what_cannot_be_told_is_refused(tmp_path):
    with pytest.raises(ValueError, match="smoothing"):
        GradientNoiseScale(smoothing=1.0)
    for period in (0, True, [0, 10], 2.0):
        with pytest.raises(
            ValueError, match=r"every_n_steps=...\): expected a period of at least 1"
        ):
            GradientNoiseScale(every_n_steps=period)
    trainer = make_trainer("auto", tmp_path, devices=1, callbacks=[GradientNoiseScale()])
    with pytest.raises(ValueError, match="two micro-batches"):
        trainer.fit(seeded(_Linear), make_loader())
    negative = GradientNoiseScale(num_samples=lambda batch: -1)
    trainer = make_trainer(
        "auto", tmp_path, devices=1, accumulate_grad_batches=2, callbacks=[negative]
    )
    with pytest.raises(ValueError, match=r"num_samples: .*got -1.0 for batch 0"):
        trainer.fit(seeded(_Linear), make_loader())
    module = seeded(_Linear)
    module.automatic_optimization = False
    trainer = make_trainer("auto", tmp_path, devices=1, callbacks=[GradientNoiseScale()])
    with pytest.raises(NotImplementedError, match="automatic_optimization=False"):
        trainer.fit(module, make_loader())


@pytest.mark.parametrize(
    "batch",
    [
        {"id": ["a", "b"], "x": torch.zeros(3, 4)},
        {"w": torch.tensor(1.0), "x": torch.zeros(3, 4)},
        [torch.zeros(0, 4), ([1.0], torch.zeros(3))],
    ],
    ids=["text", "a number", "empty"],
)
def test_samples_are_counted_in_the_first_tensor_that_has_some(batch):
    assert _first_dimension(batch) == 3


@pytest.mark.parametrize("batch", [{}, {"id": ["a"]}, torch.tensor(1.0), [torch.zeros(0)], 5])
def test_a_batch_without_samples_that_can_be_told_is_refused(batch):
    with pytest.raises(TypeError, match=r"^GradientNoiseScale: expected .* num_samples="):
        _first_dimension(batch)


@pytest.mark.parametrize("hides", [FSDPStrategy, DeepSpeedStrategy])
def test_a_strategy_of_lightning_that_hides_gradients_is_refused_by_name(tmp_path, hides):
    trainer = make_trainer("auto", tmp_path, devices=1, accumulate_grad_batches=2)
    trainer.strategy.__class__ = hides
    with pytest.raises(NotImplementedError, match=f"{hides.__name__}: expected a strategy whose"):
        GradientNoiseScale().on_train_start(trainer, seeded(_Linear))
