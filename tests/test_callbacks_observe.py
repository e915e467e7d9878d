"""With any callback on, training ends in the weights that it ends in without, bit for bit."""

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

import lightning_fsdp
from tests.support.cases import each_on_trainer_ranks
from tests.support.trainer import (
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)

# Each engine, and steps that a scaler skips under the core and one of torch's, at either stage.
STRATEGIES = {
    "32-true": ["scratch_fsdp_zero3", "fsdp1_zero2", "fsdp2_zero3", "ddp"],
    "16-mixed": ["scratch_fsdp_zero2", "fsdp2_zero2"],
}


class _Drops(Regressor):
    """Draws random numbers in every forward, so that a callback that draws some as well shows."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return super().forward(self.dropout(x))


def _callbacks():
    """Each alone, looking at every step, with a way to tell that it has seen something."""
    access = lightning_fsdp.GradientAccessProbe(steps=1)
    isolation = lightning_fsdp.MicrobatchIsolationProbe(steps=1)
    noise = lightning_fsdp.GradientNoiseScale()
    memory = lightning_fsdp.MemoryProbe(steps=[0, 2])
    throughput = lightning_fsdp.ThroughputMonitor(
        num_tokens=lambda batch: len(batch[0]), flops_per_token="count", peak_flops=1e12
    )
    return {
        access: lambda: access.records,
        isolation: lambda: isolation.reports,
        noise: lambda: noise.estimate().noise,
        memory: lambda: memory.reports,
        throughput: lambda: throughput.flops_per_token,
    }


def _trained(strategy, precision, folder, callbacks):
    options = {"precision": "32-true"}
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        options = {"plugins": [MixedPrecision(precision, "cpu", scaler)]}
    model = seeded(_Drops)
    trainer = make_trainer(
        strategy,
        Path(folder),
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        max_epochs=2,
        log_every_n_steps=1,
        callbacks=callbacks,
        logger=TensorBoardLogger(folder, name=None),
        **options,
    )
    trainer.fit(model, make_loader(24, shuffle=True))
    assert trainer.global_step == 4
    assert trainer.precision == precision
    return weights_of(model)


# Where each callback is tried alone as well, so that none hides what another does.
ALONE = "scratch_fsdp_zero3"


def _observed(rank, world_size, case, folder):
    strategy, precision = case
    expected = _trained(strategy, precision, folder, [])
    together = _callbacks()
    alone = _callbacks() if strategy == ALONE else {}
    for observers in (*({callback: seen} for callback, seen in alone.items()), together):
        found = _trained(strategy, precision, folder, list(observers))
        names = [type(callback).__name__ for callback in observers]
        assert all(seen() for seen in observers.values()), names
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, msg=lambda text, names=names: f"{names}: {text}"
        )


def test_a_callback_changes_no_bit(tmp_path):
    cases = [(each, precision) for precision, names in STRATEGIES.items() for each in names]
    each_on_trainer_ranks(_observed, 2, cases, str(tmp_path), timeout_s=280)


def _compiled_steps(folder, callbacks):
    """Those in which a block's compiled code ran."""
    steps = []

    def backend(graph, inputs):
        def run(*args):
            steps.append(trainer.global_step)
            return graph.forward(*args)

        return run

    torch.compiler.reset()
    model = seeded(Regressor)
    model.blocks[0].compile(backend=backend)
    trainer = make_trainer("auto", Path(folder), callbacks=callbacks, max_steps=4)
    trainer.fit(model, make_loader())
    return steps


def _counts():
    return lightning_fsdp.ThroughputMonitor(
        num_tokens=lambda batch: len(batch[0]), flops_per_token="count"
    )


def _watched_in_turn(rank, world_size, folder):
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    memory, every = lightning_fsdp.MemoryProbe, [0, 1, 2, 3]
    assert _compiled_steps(folder, [memory(steps=[0])]) == every[1:]
    assert _compiled_steps(folder, [memory(steps=[2])]) == [0, 1, 3]
    assert _compiled_steps(folder, [_counts()]) == every[1:]
    assert _compiled_steps(folder, [_counts(), memory(steps=[0])]) == every[1:]


def test_only_what_is_watched_runs_uncompiled(tmp_path):
    on_trainer_ranks(_watched_in_turn, 1, str(tmp_path))


@pytest.mark.parametrize("steps", [0, -1, True, None, 1.5, "all", [], [-1], ["first"]])
@pytest.mark.parametrize(
    "kind",
    [
        lightning_fsdp.GradientAccessProbe,
        lightning_fsdp.MicrobatchIsolationProbe,
        lightning_fsdp.MemoryProbe,
    ],
)
def test_steps_that_never_come_are_refused(kind, steps):
    with pytest.raises(ValueError, match=rf"^{kind.__name__}\(steps=...\): expected a period"):
        kind(steps=steps)
