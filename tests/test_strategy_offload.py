"""Offloaded runs are those of DDP, or refused."""

from contextlib import nullcontext

import pytest

from lightning_fsdp import FSDP1Strategy, ScratchFSDPStrategy
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from tests.support.trainer import (
    AdamwRegressor,
    Regressor,
    assert_each_like_ddp,
    fit,
    on_trainer_ranks,
    outcome_of,
    seeded,
    with_options,
)


def _offloaded(strategy, folder, rank, **options):
    """Two fits, the second from the first one's checkpoint."""
    for max_epochs in (1, 2):
        trainer, model = fit(
            with_options(strategy, cpu_offload=True, **options),
            folder,
            seeded(AdamwRegressor),
            ckpt_path=folder / "first.ckpt" if max_epochs == 2 else None,
            max_epochs=max_epochs,
            gradient_clip_val=0.05,
            accumulate_grad_batches=2,
        )
        trainer.save_checkpoint(folder / "first.ckpt")
    return outcome_of(trainer, model)


def _offloaded_with_sums(strategy, folder, rank):
    return _offloaded(strategy, folder, rank, accumulation="sum")


def _offloads(rank, world_size, folder):
    seen = []

    class Looks(Regressor):
        def on_before_optimizer_step(self, optimizer):
            homes = {p.spec.home for p in self.parameters() if hasattr(p, "spec")}
            seen.append([home.traffic["to_host"].calls for home in homes if home.policy])

    fit(ScratchFSDPStrategy(cpu_offload=True), folder, seeded(Looks))
    return seen


def test_an_offloaded_run_and_its_checkpoint_are_those_of_ddp(tmp_path):
    scenarios = [_offloaded, _offloaded_with_sums]
    assert_each_like_ddp(scenarios, tmp_path)


def _offloaded_sums_on_an_accelerator(rank, world_size, folder):
    class AsOnCuda(FSDP1Engine):
        def before_backward(self):
            self._is_offloaded = True
            super().before_backward()

    for accumulation in ("local", "sum"):
        strategy = FSDP1Strategy(cpu_offload=True, accumulation=accumulation)
        strategy.engine.__class__ = AsOnCuda
        expected = (
            pytest.raises(NotImplementedError, match=r"'.*weight' has a reduced gradient.*'local'")
            if accumulation == "sum"
            else nullcontext()
        )
        with expected:
            fit(strategy, folder, accumulate_grad_batches=2)


def test_sums_that_fsdp1_would_lose_when_it_offloads_are_refused(tmp_path):
    """torch copies each reduced gradient over the one on the host; seen in its source."""
    on_trainer_ranks(_offloaded_sums_on_an_accelerator, 2, tmp_path)


def test_cpu_offload_brings_each_reduced_gradient_to_the_host(tmp_path):
    for seen in on_trainer_ranks(_offloads, 2, tmp_path):
        calls = [calls for (calls,) in seen]
        assert calls[0] > 0
        assert calls == [calls[0] * (step + 1) for step in range(len(calls))]
