"""Replicas of a model, each sharded over some of the ranks, train as all ranks together.

2 x 2: ranks 0, 1 hold one model, ranks 2, 3 another; 0 and 2 hold the same shard."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_fsdp import (
    FSDP1Strategy,
    FSDP2Strategy,
    GradientAccessProbe,
    GradientNoiseScale,
    MemoryProbe,
    MicrobatchIsolationProbe,
    NonfiniteGradient,
    ScratchFSDPStrategy,
    ShardedEMA,
)
from lightning_fsdp.engines.rank_grid import GridChoice, open_grid
from tests.support.ranks import assert_errors, errors_on_ranks
from tests.support.trainer import (
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

pytestmark = pytest.mark.flat("chooses replicas itself")

OVER_ALL = {"state_over": "all"}


# -- as a flat mesh does ---------------------------------------------------------------------------


class Overflowing(Regressor):
    """Infinite in one micro-batch of one rank."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_now = self.global_rank == 3 and batch_idx == 2
        return loss * (float("inf") if is_now else 1.0)


def _features(strategy, folder, **grid):
    """What callbacks and options say of a run, which replicas do not change."""
    callbacks = [
        access := GradientAccessProbe(),
        isolation := MicrobatchIsolationProbe(),
        noise := GradientNoiseScale(every_n_steps=1),
        MemoryProbe(),
        ShardedEMA(decay=0.5),
    ]
    accumulation = grid.pop("accumulation", "sum")
    model = seeded(Regressor)
    trainer = make_trainer(
        with_options(strategy, accumulation=accumulation, cpu_offload=True, **grid),
        folder,
        callbacks=callbacks,
        accumulate_grad_batches=2,
        precision="bf16-mixed",
    )
    trainer.fit(model, make_loader(32, batch_size=2), make_loader(12, batch_size=2))
    warnings.filterwarnings("ignore", r"Skipped \(skip 1 of this fit\)")
    skipping = seeded(Overflowing)
    strategy_ = with_options(strategy, on_nonfinite="skip", accumulation=accumulation, **grid)
    make_trainer(strategy_, folder, accumulate_grad_batches=2).fit(
        skipping, make_loader(32, batch_size=2)
    )
    if grid:  # otherwise see test_strategy_nonfinite.py
        raising = with_options(strategy, on_nonfinite="raise", accumulation=accumulation, **grid)
        with pytest.raises(NonfiniteGradient, match=r"on rank 3 in micro-batch 0"):
            make_trainer(raising, folder, accumulate_grad_batches=2).fit(
                seeded(Overflowing), make_loader(32, batch_size=2)
            )
    noise_scale = noise.estimate()
    last = {record.step: record.norms for record in access.records}
    return {
        "weights": weights_of(model),
        "noise": [noise_scale.signal, noise_scale.noise],
        "norms": last,
        "parts": [report.norms for report in isolation.reports],
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "skipped": strategy_.num_skipped_steps,
        "weights after a skip": weights_of(skipping),
    }


def _as_flat(rank, world_size, folder):
    flat = _features("scratch_fsdp_zero3", folder)
    assert flat["skipped"] == 1
    for strategy, options in (
        ("scratch_fsdp_zero3", {}),
        ("scratch_fsdp_zero3", OVER_ALL),
        ("fsdp2_zero2", {}),
        ("fsdp1_zero3", {}),
    ):
        torch.testing.assert_close(
            _features(strategy, folder, shard_size=2, **options),
            flat,
            atol=1e-5,
            rtol=1e-3,
            msg=lambda text, s=strategy, o=options: f"{s} {o}: {text}",
        )


def test_callbacks_and_options_say_what_they_say_of_a_flat_mesh(tmp_path):
    on_trainer_ranks(_as_flat, 4, tmp_path, timeout_s=240.0)


# -- which ranks -----------------------------------------------------------------------------------


def _shard_numels(strategy, folder, **options):
    """Which ranks hold a model, how many elements this one does; the weights after a fit."""

    class Looking(Regressor):
        def on_train_start(self):
            self.numel = sum(w.shard.numel() for w in self.trainer.strategy.weights.values())

    model, built = seeded(Looking), with_options(strategy, **options)
    trainer = make_trainer(built, folder)
    trainer.fit(model, make_loader())
    mesh = built.engine.grid.mesh
    rows = None if mesh is None else mesh.mesh.tolist()
    trainer.fit(model, make_loader())  # by the groups of the first
    assert built.engine.grid.mesh is mesh
    return rows, model.numel, weights_of(model)


def _choices(rank, world_size, folder):
    pairs = [[0, 1], [2, 3]]
    whole = sum(parameter.numel() for parameter in Regressor().parameters())
    crossed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for strategy in ("scratch_fsdp", "fsdp2_zero3", "fsdp1_zero2"):
        expected, ours = None, []
        if strategy == "scratch_fsdp":
            ours = [
                ("over all", {"shard_size": 2, **OVER_ALL}, pairs, 4),
                ("one replica", {"shard_size": 4, **OVER_ALL}, None, 4),
            ]
        written = [  # in which ways does not depend on the engine
            ("all by a host", {"shard_size": "host"}, None, 4),
            ("sizes of YAML", {"device_mesh": [1, 4]}, None, 4),
            ("a mesh", {"device_mesh": crossed}, pairs, 2),
        ]
        for what, options, rows, size in (
            ("all by a number", {"shard_size": 4}, None, 4),
            ("sizes", {"device_mesh": (2, 2)}, pairs, 2),
            ("alone", {"shard_size": 1}, [[0], [1], [2], [3]], 1),
            *(written if strategy == "scratch_fsdp" else written[-1:]),
            *ours,
        ):
            if what == "alone" and strategy == "fsdp1_zero2":
                with pytest.raises(NotImplementedError, match="2 or more ranks"):
                    _shard_numels(strategy, folder, **options)
                continue
            their_rows, numel, weights = _shard_numels(strategy, folder, **options)
            assert their_rows == rows, what
            numels = torch.zeros(4, dtype=torch.long)
            numels[rank] = numel
            dist.all_reduce(numels)
            assert numels.sum() == whole * 4 / size, what
            expected = expected or weights
            torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_a_choice_of_ranks_can_be_made_in_several_ways(tmp_path):
    on_trainer_ranks(_choices, 4, tmp_path, timeout_s=240.0)


def _open(rank, world_size, choices, hosts):
    choice = GridChoice(**choices[rank % len(choices)])
    return open_grid(choice, device_type="cpu", host=hosts[rank]).mesh


def _rows_by_host(rank, world_size):
    return [
        _open(rank, world_size, [{"shard_size": "host"}], hosts).mesh.tolist()
        for hosts in ([0, 0, 1, 1], [0, 1, 0, 1])
    ]


def test_ranks_of_a_host_hold_a_model_together_wherever_they_are():
    for found in on_trainer_ranks(_rows_by_host, 4):
        assert found == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]


@pytest.mark.parametrize(
    ("choices", "hosts", "words"),
    [
        ([{"shard_size": 3}], [0] * 4, "expected a divisor of the 4 ranks of the run, got 3"),
        ([{"shard_size": 8}], [0] * 4, "expected a divisor of the 4 ranks of the run, got 8"),
        ([{"device_mesh": (3, 2)}], [0] * 4, "product is the 4 ranks of the run, got (3, 2)"),
        ([{"shard_size": "host"}], [0, 0, 0, 1], "as many ranks on every host, got [3, 1]"),
        ([{"shard_size": 2, **OVER_ALL}, {"shard_size": 2}], [0] * 4, "state_over='all' on rank 0"),
        ([{"shard_size": 2}, {}], [0] * 4, "shard_size=2 on rank 0 and shard_size=None on rank 1"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused_on_every_rank(choices, hosts, words):
    assert_errors(errors_on_ranks(_open, 4, choices, hosts), "ValueError", words)


@pytest.mark.parametrize("cls", [ScratchFSDPStrategy, FSDP2Strategy, FSDP1Strategy])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shard_size": 0}, ValueError, "1 or more ranks, got 0"),
        ({"shard_size": True}, TypeError, "a number of ranks or 'host', got True"),
        ({"shard_size": "node"}, TypeError, "a number of ranks or 'host', got 'node'"),
        ({"shard_size": 2, "device_mesh": (2, 2)}, ValueError, "expected one of the two"),
        ({"device_mesh": (2, 0)}, ValueError, "two positive sizes"),
        ({"device_mesh": 4}, TypeError, "two positive sizes"),
        ({"state_over": "hosts"}, ValueError, "one of ('replica', 'all'), got 'hosts'"),
        ({"state_over": "all"}, ValueError, "shard_size or device_mesh with it"),
    ],
)
def test_what_is_no_choice_is_refused_at_once(cls, options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        cls(**options)


@pytest.mark.parametrize("cls", [FSDP2Strategy, FSDP1Strategy])
def test_torchs_engines_refuse_state_over_all_ranks_by_name(cls):
    with pytest.raises(NotImplementedError, match=f"{cls.__name__}.*Use ScratchFSDPStrategy"):
        cls(shard_size=2, **OVER_ALL)
