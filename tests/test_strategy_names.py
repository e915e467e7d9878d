"""Names of strategies, what importing makes known, and options in a configuration file."""

import importlib
import re
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_fsdp
from lightning_fsdp import FSDP1Strategy, FSDP2Strategy, ScratchFSDPStrategy
from lightning_fsdp.config import ZERO2, ZERO3
from lightning_fsdp.engines.rank_grid import GridChoice
from lightning_fsdp.strategies import registry
from tests.support.processes import run_snippet
from tests.support.trainer import (
    Regressor,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)

PLAN_OF_NAME = {
    "scratch_fsdp": (ScratchFSDPStrategy, ZERO3),
    "scratch_fsdp_zero3": (ScratchFSDPStrategy, ZERO3),
    "scratch_fsdp_zero2": (ScratchFSDPStrategy, ZERO2),
    "fsdp1_zero3": (FSDP1Strategy, ZERO3),
    "fsdp1_zero2": (FSDP1Strategy, ZERO2),
    "fsdp2_zero3": (FSDP2Strategy, ZERO3),
    "fsdp2_zero2": (FSDP2Strategy, ZERO2),
}


def test_each_name_gives_its_strategy(tmp_path):
    for name, (cls, plan) in PLAN_OF_NAME.items():
        for spelling in (name, name.upper()):
            strategy = make_trainer(spelling, tmp_path, devices=1).strategy
            assert type(strategy) is cls
            assert strategy.engine.plan == plan
    assert set(PLAN_OF_NAME) == set(registry.NAMES)


def test_what_an_error_says_to_use_instead_is_a_name():
    engines = (Path(lightning_fsdp.__file__).parent / "engines").glob("*.py")
    code = " ".join(" ".join(path.read_text().split()) for path in engines)
    named = set(re.findall(r"\b(?:use|or) ((?:fsdp|scratch_fsdp)\w*)", code))
    assert {"scratch_fsdp", "fsdp2_zero3"} <= named <= registry.NAMES.keys()


def test_names_are_registered_once_and_again_is_harmless():
    before = {name: StrategyRegistry[name] for name in PLAN_OF_NAME}
    registry.register()
    importlib.reload(lightning_fsdp)
    for name in PLAN_OF_NAME:
        assert StrategyRegistry[name] is before[name]
        assert StrategyRegistry[name]["description"]
        assert not any(family in name for family in ("ddp", "deepspeed"))


# Each in a fork of one interpreter, which has imported what takes long in all but the first. They
# end at once: to take apart all that was imported takes longer than what is tried.
IN_FORKS = f"""
import os, sys, traceback

def forked(check, *arguments):
    if (pid := os.fork()) == 0:
        try:
            check(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(check.__name__, *arguments, "ended", status, sep="|", flush=True)

def is_light():
    import lightning_fsdp, importlib
    importlib.reload(lightning_fsdp)
    assert "torch" not in sys.modules and "lightning" not in sys.modules

def knows_names(imports):
    names = {{}}
    exec(imports, names)
    from lightning.pytorch.strategies import StrategyRegistry
    assert [n for n in StrategyRegistry if n in {set(PLAN_OF_NAME)}] == {list(PLAN_OF_NAME)}
    ours = [f for f in sys.meta_path if type(f).__module__.startswith("lightning_fsdp")]
    assert [f.name for f in ours] == ["pytorch_lightning.strategies"], "not imported yet"
    assert "lightning_fsdp.strategies.scratch" not in sys.modules
    assert names["lightning_fsdp"].ScratchFSDPStrategy.__name__ == "ScratchFSDPStrategy"

def tells_the_other(imports):
    names = {{}}
    exec(imports, names)
    lightning_fsdp, pl = names["lightning_fsdp"], names["pl"]
    assert not any(type(f).__module__ == "lightning_fsdp.strategies.registry"
                   and f.name == "pytorch_lightning.strategies" for f in sys.meta_path)
    for name in {list(PLAN_OF_NAME)}:
        try:
            pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False)
        except TypeError as error:
            assert "`import lightning.pytorch as pl` in place of" in str(error), error
            assert repr(name) in str(error), error
        else:
            raise AssertionError("taken")
    try:
        strategy = lightning_fsdp.ScratchFSDPStrategy()
        pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    except ValueError as error:
        assert "<ScratchFSDPStrategy, for the Trainer of lightning.pytorch>" in str(error)
    else:
        raise AssertionError("taken")
    import lightning.pytorch
    trainer = lightning.pytorch.Trainer(
        strategy="scratch_fsdp", accelerator="cpu", devices=1, logger=False
    )
    assert type(trainer.strategy) is lightning_fsdp.ScratchFSDPStrategy

forked(is_light)
import torch, torch._dynamo, torch.distributed.checkpoint, torchmetrics
for check, orders in ((knows_names, ORDERS), (tells_the_other, ORDERS_WITH_THE_OTHER)):
    for imports in orders:
        assert not {{"lightning", "lightning_fsdp", "pytorch_lightning"}} & set(sys.modules)
        forked(check, imports)
os._exit(0)
"""
ORDERS = [
    "import lightning_fsdp, lightning.pytorch",
    "import lightning.pytorch, lightning_fsdp",
]
ORDERS_WITH_THE_OTHER = [
    "import lightning_fsdp, pytorch_lightning as pl",
    "import pytorch_lightning as pl, lightning_fsdp",
    "import lightning.pytorch, lightning_fsdp, pytorch_lightning as pl",
]


def test_imports_are_light_know_all_names_in_any_order_and_tell_the_other_trainer():
    orders = f"ORDERS, ORDERS_WITH_THE_OTHER = {ORDERS}, {ORDERS_WITH_THE_OTHER}\n"
    result = run_snippet(orders + IN_FORKS, timeout_s=280)
    assert result.returncode == 0, result.stderr
    ends = [line.rpartition("|ended|") for line in result.stdout.splitlines() if "|ended|" in line]
    assert {what: status for what, _, status in ends} == {
        "is_light": "0",
        **{f"knows_names|{imports}": "0" for imports in ORDERS},
        **{f"tells_the_other|{imports}": "0" for imports in ORDERS_WITH_THE_OTHER},
    }, result.stderr


def test_public_names_exist_and_unknown_ones_do_not():
    for name in lightning_fsdp.__all__:
        assert getattr(lightning_fsdp, name).__doc__ or name.startswith("ZERO")
        assert name in dir(lightning_fsdp)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lightning_fsdp.nothing


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_every_option_can_be_given_in_a_configuration_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config = tmp_path / "config.yaml"
    config.write_text(
        textwrap.dedent(
            f"""
            model:
              class_path: tests.support.trainer.Regressor
            trainer:
              accelerator: cpu
              devices: 1
              logger: false
              default_root_dir: {tmp_path}
              strategy:
                class_path: lightning_fsdp.ScratchFSDPStrategy
                init_args:
                  zero_stage: 2
                  units: [Block, Linear]
                  accumulation: sum
                  timeout: "00:01:30"
            """
        )
    )
    strategy = _configured(["--config", str(config)])
    assert strategy.engine.plan == ZERO2
    assert strategy.engine.units == ["Block", "Linear"]
    assert strategy._communicates_every_micro_batch
    assert strategy._timeout == timedelta(seconds=90)
    by_size = _configured(["--config", str(config), "--trainer.strategy.init_args.units=100"])
    assert by_size.engine.units == 100
    for size in (2, "host"):
        with_replicas = f"--trainer.strategy.init_args.shard_size={size}"
        strategy = _configured(["--config", str(config), "--trainer.devices=2", with_replicas])
        assert strategy._grid_choice == GridChoice(shard_size=size)
    sizes = ["--trainer.devices=8", "--trainer.strategy.init_args.device_mesh=[2,4]"]
    by_mesh = _configured(["--config", str(config), *sizes])
    assert by_mesh._grid_choice.sizes == (2, 4)
    named = _configured(["--config", str(config), "--trainer.strategy=scratch_fsdp_zero2"])
    assert type(named) is ScratchFSDPStrategy
    assert named.engine.plan == ZERO2
    torchs = "--trainer.strategy.class_path=lightning_fsdp.FSDP1Strategy"
    assert _configured(["--config", str(config), torchs]).engine.units == ["Block", "Linear"]


def _configured(args):
    cli = LightningCLI(
        run=False,
        args=args,
        save_config_callback=None,
        auto_configure_optimizers=False,
        seed_everything_default=False,
    )
    return cli.trainer.strategy


def _units(rank, world_size, folder):
    expected = {}
    for units in (None, ["Block"], ["Linear", "LayerNorm"], 60, lambda m: hasattr(m, "up")):
        model = seeded(Regressor)
        trainer = make_trainer(ScratchFSDPStrategy(units=units), folder)
        trainer.fit(model, make_loader())
        expected = expected or weights_of(model)
        torch.testing.assert_close(weights_of(model), expected, atol=1e-6, rtol=1e-5)


def test_units_can_be_chosen_by_class_size_or_function(tmp_path):
    on_trainer_ranks(_units, 2, tmp_path)
