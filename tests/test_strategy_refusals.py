"""Options, precisions and plugins that do not work are refused when they are given."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision

from lightning_fsdp import FSDP1Strategy, FSDP2Strategy, ScratchFSDPStrategy
from lightning_fsdp.strategies.precision import ShardedPrecision
from tests.support.trainer import SHARDED, make_trainer

STRATEGY = SHARDED[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"zero_stage": 1}, ValueError, r"zero_stage: expected 2 .* or 3 .*, got 1"),
        ({"checkpoint": "best"}, ValueError, r"checkpoint: expected 'full'.*'sharded'.*'best'"),
        ({"async_save": True}, NotImplementedError, r"async_save=True: .*'sharded'.*got .*'full'"),
        ({"accumulation": "separate"}, ValueError, r"accumulation: expected 'local'.*'separate'"),
        ({"units": True}, TypeError, r"units: expected a list of class names.*got True"),
        ({"units": "Block"}, TypeError, r"units: expected a list of class names.*got 'Block'"),
        ({"units": []}, TypeError, r"units: expected a list of class names.*got \[\]"),
        ({"units": 0}, ValueError, r"units: expected a positive number.*got 0"),
        ({"cpu_offload": "no"}, TypeError, r"cpu_offload: expected True or False, got 'no'"),
        ({"compile": "inductor"}, TypeError, r"compile: expected True or False, got 'inductor'"),
        ({"comm": "fast"}, ValueError, r"comm: expected one of \('auto', .*got 'fast'"),
        ({"timeout": 5}, TypeError, r"timeout: expected a datetime.timedelta.*got 5"),
    ],
)
def test_an_option_that_does_not_work_is_refused_when_it_is_given(options, error, message):
    with pytest.raises(error, match=message):
        ScratchFSDPStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_size": 4}, "shard_size: expected a divisor of the 6 ranks of the run, got 4"),
        (
            {"device_mesh": (2, 4)},
            r"device_mesh: .*product is the 6 ranks .*, got \(2, 4\)",
        ),
    ],
)
def test_replicas_that_do_not_fit_are_refused_before_a_process_is_started(
    tmp_path, options, message
):
    strategy = ScratchFSDPStrategy(**options)
    with pytest.raises(ValueError, match=message):
        make_trainer(strategy, tmp_path, devices=3, num_nodes=2)
    make_trainer(ScratchFSDPStrategy(shard_size="host"), tmp_path, devices=3, num_nodes=2)


@pytest.mark.parametrize("strategy", [ScratchFSDPStrategy, FSDP1Strategy, FSDP2Strategy])
@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, r"='FULL_SHARD'. Use zero_stage=3 for FULL_SHARD, "),
        ({"reshard_after_forward": True}, "=True. Use zero_stage=3 for True, zero_stage=2 for F"),
        ({"reshard_after_forward": 8}, "=8. Use .*shard_size='host', state_over='all' for a numb"),
        ({"mixed_precision": "bf16"}, r"='bf16'. Use Trainer\(precision='bf16-mixed'\)\."),
        ({"auto_wrap_policy": {int}}, r"=.* Use units, such as units=\['Block'\]\."),
        ({"limit_all_gathers": True}, "=True. Leave it out."),
    ],
)
def test_an_option_of_another_strategy_is_refused_with_what_takes_its_place(
    strategy, options, cure
):
    (name,) = options
    expected = f"^{strategy.__name__}: expected an option of its own, got {name}{cure}"
    with pytest.raises(TypeError, match=expected):
        strategy(**options)


@pytest.mark.parametrize(
    ("precision", "cure"),
    [("16-true", r".*scaler.*Use '16-mixed'"), ("64-true", r".*Use '32-true'; or fully_shard")],
)
def test_a_precision_that_does_not_work_is_refused_by_the_trainer(tmp_path, precision, cure):
    supported = "'32-true', 'bf16-true', 'bf16-mixed', '16-mixed'"
    with pytest.raises(ValueError, match=rf"{supported}, got '{precision}'{cure}"):
        make_trainer(STRATEGY, tmp_path, precision=precision)


def test_what_is_refused_by_name_is_in_the_limits():
    page = (Path(__file__).parents[1] / "docs" / "limits.md").read_text()
    listed = page.split("## What is refused")[1]
    for name in (
        *("64-true", "16-true", "ModelPruning", "EMA", "SWA"),
        *("LBFGS", "Prodigy", "SAM", "Lookahead"),
    ):
        assert name in listed, name


@pytest.mark.parametrize(
    ("plugin", "got"),
    [
        (lambda: HalfPrecision("16-true"), r"got '16-true'.*scaler"),
        (DoublePrecision, r"got '64-true' \(DoublePrecision\)"),
    ],
)
def test_a_precision_plugin_that_does_not_work_is_refused(tmp_path, plugin, got):
    with pytest.raises(ValueError, match=got):
        ScratchFSDPStrategy(precision_plugin=plugin())
    with pytest.raises(ValueError, match=got):
        make_trainer(STRATEGY, tmp_path, plugins=[plugin()])


def test_own_precision_is_checked_and_taken(tmp_path):
    with pytest.raises(ValueError, match="expected one of '32-true'"):
        ShardedPrecision("8-bit")
    with pytest.raises(ValueError, match=r"scaler: expected None with precision 'bf16-mixed', got"):
        ShardedPrecision("bf16-mixed", torch.amp.GradScaler("cpu"))
    plugin = ShardedPrecision("bf16-mixed")
    trainer = make_trainer(ScratchFSDPStrategy(precision_plugin=plugin), tmp_path)
    assert trainer.precision_plugin is plugin
    assert trainer.precision == "bf16-mixed"
