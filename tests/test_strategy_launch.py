"""Names, ways to start, ways to end: script, torchrun, exceptions, Ctrl-C; nothing is left."""

import importlib
import json
import os
import signal
import socket
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from torchmetrics import MeanSquaredError

import lightning_fsdp
from lightning_fsdp import FSDP1Strategy, FSDP2Strategy, ScratchFSDPStrategy
from lightning_fsdp.config import ZERO2, ZERO3
from lightning_fsdp.strategies import lightning_internals, registry
from tests.support.jobs import Job
from tests.support.ranks import run_snippet
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


# -- names -----------------------------------------------------------------------------------------


def test_each_name_gives_its_strategy(tmp_path):
    for name, (cls, plan) in PLAN_OF_NAME.items():
        for spelling in (name, name.upper()):
            strategy = make_trainer(spelling, tmp_path, devices=1).strategy
            assert type(strategy) is cls
            assert strategy.engine.plan == plan
    assert set(PLAN_OF_NAME) == set(registry.NAMES)


def test_names_are_registered_once_and_again_is_harmless():
    before = {name: StrategyRegistry[name] for name in PLAN_OF_NAME}
    registry.register()
    importlib.reload(lightning_fsdp)
    for name in PLAN_OF_NAME:
        assert StrategyRegistry[name] is before[name]
        assert StrategyRegistry[name]["description"]
        assert not any(family in name for family in ("ddp", "deepspeed"))


@pytest.mark.parametrize(
    "imports",
    ["import lightning_fsdp, lightning.pytorch", "import lightning.pytorch, lightning_fsdp"],
)
def test_importing_is_light_and_names_are_known_in_any_order(imports):
    result = run_snippet(
        f"""
        import sys
        first = "{imports}".split()[1].strip(",")
        if first == "lightning_fsdp":
            import lightning_fsdp, importlib
            importlib.reload(lightning_fsdp)
            assert "torch" not in sys.modules and "lightning" not in sys.modules
        {imports}
        from lightning.pytorch.strategies import StrategyRegistry
        assert [n for n in StrategyRegistry if n in {set(PLAN_OF_NAME)}] == {list(PLAN_OF_NAME)}
        ours = [f for f in sys.meta_path if type(f).__module__.startswith("lightning_fsdp")]
        assert [f.name for f in ours] == ["pytorch_lightning.strategies"], "not imported yet"
        assert "lightning_fsdp.strategies.scratch" not in sys.modules
        assert lightning_fsdp.ScratchFSDPStrategy.__name__ == "ScratchFSDPStrategy"
        """
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_fsdp, pytorch_lightning as pl",
        "import pytorch_lightning as pl, lightning_fsdp",
        "import lightning.pytorch, lightning_fsdp, pytorch_lightning as pl",
    ],
)
def test_the_trainer_of_the_other_package_is_told_what_to_import(imports):
    result = run_snippet(
        f"""
        import sys, warnings
        {imports}
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
        """
    )
    assert result.returncode == 0, result.stderr


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


# -- units -----------------------------------------------------------------------------------------


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


# -- devices and backends --------------------------------------------------------------------------


def test_cuda_takes_nccl_and_its_own_device(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("GROUP_RANK", "1")):
        monkeypatch.setenv(name, value)
    strategy = ScratchFSDPStrategy(
        parallel_devices=[torch.device("cuda", 0), torch.device("cuda", 1)],
        cluster_environment=TorchElasticEnvironment(),
        timeout=timedelta(seconds=5),
    )
    strategy.num_nodes = 2
    assert strategy.root_device == torch.device("cuda", 1)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}
    assert strategy.is_distributed
    assert strategy.world_size == 4
    assert not strategy.is_global_zero

    calls = []
    monkeypatch.setattr(
        lightning_internals, "_init_dist_connection", lambda *a, **k: calls.append((a[1:], k))
    )

    class Accelerator:
        def setup_device(self, device):
            calls.append(device)

    strategy.accelerator = Accelerator()
    strategy.setup_environment()
    assert calls[0] == torch.device("cuda", 1)
    assert calls[1] == (
        ("nccl",),
        {"timeout": timedelta(seconds=5), "device_id": torch.device("cuda", 1)},
    )
    gloo = ScratchFSDPStrategy(
        parallel_devices=[torch.device("cpu")] * 2,
        cluster_environment=TorchElasticEnvironment(),
        process_group_backend=None,
    )
    gloo.accelerator = Accelerator()
    gloo.setup_environment()
    assert calls[-1][0] == ("gloo",)
    assert calls[-1][1]["device_id"] is None
    lightning_internals.set_rank_zero(0)


def test_metrics_are_moved_to_the_device():
    module = torch.nn.ModuleDict({"metric": MeanSquaredError(), "other": torch.nn.Linear(1, 1)})
    lightning_internals.move_metrics(module, torch.device("meta"))
    assert module["metric"].sum_squared_error.device.type == "meta"
    assert module["other"].weight.device.type == "cpu"


def test_two_hosts_count_ranks_over_both():
    environment = LightningEnvironment()
    strategy = ScratchFSDPStrategy(
        parallel_devices=[torch.device("cpu")] * 2, cluster_environment=environment
    )
    strategy.num_nodes = 2
    environment.node_rank = lambda: 1
    strategy.set_world_ranks()
    assert (strategy.global_rank, strategy.world_size) == (2, 4)
    lightning_internals.set_rank_zero(0)


# -- starting and ending ---------------------------------------------------------------------------

SCRIPT = """
import atexit, json, os, sys, time

def tell_threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    line = " ".join(["THREADS AT EXIT:", *sorted({name.strip() for name in names})])
    os.write(1, f"{line}\\n".encode())  # at once: the other rank writes as well

atexit.register(tell_threads)  # the first to be registered is the last to be called
import torch, torch.distributed as dist
import lightning_fsdp
from tests.support.trainer import Regressor, make_loader, make_trainer, seeded, weights_of

torch.set_num_threads(1)
out, mode = sys.argv[1], sys.argv[2]

class Model(Regressor):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if mode == "raise" and self.global_rank == 1 and batch_idx == 1:
            raise ValueError("only rank 1 says no")
        if mode == "wait" and batch_idx == 1:
            print("TRAINING", flush=True)
            time.sleep(0.1 if self.trainer.current_epoch else 0)

if __name__ == "__main__":
    atexit.register(lambda: os.write(1, f"GROUP AT EXIT: {dist.is_initialized()}\\n".encode()))
    result, kept = {}, []
    strategies = ["scratch_fsdp_zero3"] if mode != "run" else [
        "scratch_fsdp_zero3", "scratch_fsdp_zero2", "scratch_fsdp",
        "fsdp1_zero3", "fsdp1_zero2", "fsdp2_zero3", "fsdp2_zero2", "ddp"]
    for name in strategies:
        model = seeded(Model)
        epochs = 10_000 if mode == "wait" else 1
        trainer = make_trainer(name, out, devices=2, max_epochs=epochs)
        trainer.fit(model, make_loader(), make_loader(8, seed=1))
        predicted = trainer.predict(model, make_loader(9, batch_size=2))
        if name != "ddp":
            kept.append(trainer)  # what it holds must not keep the group alive
        result[name] = [sum(w.double().sum().item() for w in weights_of(model).values()),
                        trainer.callback_metrics["val_loss"].item() if predicted is None else
                        sum(p.sum().item() for p in predicted), trainer.world_size]
    if trainer.is_global_zero:
        json.dump(result, open(f"{out}/result.json", "w"))
"""


def _torchrun() -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port)),
    ]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("launcher", ["script", "torchrun"])
def test_started_by_script_or_torchrun_it_trains_as_ddp_and_leaves_no_thread(tmp_path, launcher):
    job = Job(tmp_path, _torchrun() if launcher == "torchrun" else [], SCRIPT, "run")
    status, output = job.wait(timeout_s=120)
    assert status == 0, output
    result = json.loads((tmp_path / "result.json").read_text())
    for name in PLAN_OF_NAME:
        assert result[name] == pytest.approx(result["ddp"], abs=1e-4)
        assert result[name][2] == 2
    assert output.count("GROUP AT EXIT: False") == 2
    assert "terminate called" not in output
    assert "Traceback" not in output
    # A thread of gloo that is left would touch Python's objects, and abort the process at times.
    lines = [line for line in output.splitlines() if "THREADS AT EXIT" in line]
    assert len(lines) == 2, output
    threads = {name for line in lines for name in line.split()}
    left = {name for name in threads if "gloo" in name or name.startswith("pt_")}
    assert not {name for name in left if not name.startswith("pt_autograd")}, lines


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_an_exception_on_one_rank_ends_all_of_them(tmp_path):
    job = Job(tmp_path, [], SCRIPT, "raise")
    status, output = job.wait(timeout_s=60)
    assert status != 0
    assert "only rank 1 says no" in output


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_ctrl_c_ends_all_ranks(tmp_path):
    job = Job(tmp_path, [], SCRIPT, "wait")
    assert job.process.stdout is not None
    for line in job.process.stdout:
        if "TRAINING" in line:
            break
    time.sleep(0.5)
    os.killpg(job.process.pid, signal.SIGINT)  # as the terminal does, to every process
    status, output = job.wait(timeout_s=60)
    assert "KeyboardInterrupt" in output
    # Every five seconds Lightning looks for children that died, and kills itself if there is one:
    # after Ctrl-C too, if that comes before its end.
    if "Forcefully terminating all other processes" in output:
        assert status == -signal.SIGKILL, output
    else:
        assert status == 1, output
        assert "GROUP AT EXIT: False" in output


# -- notebooks -------------------------------------------------------------------------------------

_NOTEBOOK = """
    import sys
    sys.ps1 = ">>> "  # by which Lightning knows an interactive session
    import lightning.pytorch as pl
    import torch
    import lightning_fsdp
    from lightning.pytorch.callbacks import ModelCheckpoint
    from tests.support.trainer import Regressor, make_loader, seeded

    torch.manual_seed(0)
    torch.randn(900, 900) @ torch.randn(900, 900)  # what forks has had threads of its own
    fitted = {}
    for name in ("ddp_notebook", "scratch_fsdp", "fsdp1_zero3", "fsdp2_zero2"):
        keep = ModelCheckpoint(f"FOLDER/{name}")
        torch.set_num_threads(1 if name == "ddp_notebook" else 2)  # which hangs with more
        trainer = pl.Trainer(
            strategy=name, accelerator="cpu", devices=2, max_epochs=2, callbacks=[keep],
            logger=False, enable_progress_bar=False, enable_model_summary=False,
        )
        class Model(Regressor):  # of a cell: no other process could import it
            pass
        model = seeded(Model)
        trainer.fit(model, make_loader(), make_loader(8, seed=1))
        loaded = torch.load(keep.best_model_path, weights_only=True)["state_dict"]
        torch.testing.assert_close(loaded, dict(model.state_dict()), atol=0, rtol=0)
        metrics = {n: v for n, v in trainer.callback_metrics.items()}
        fitted[name] = {**model.state_dict(), **metrics}
        trainer.save_checkpoint(f"FOLDER/{name}.ckpt")
        again = torch.load(f"FOLDER/{name}.ckpt", weights_only=True)["state_dict"]
        torch.testing.assert_close(again, loaded, atol=0, rtol=0)
        trainer.validate(model, make_loader(8, seed=1), verbose=False)
        torch.testing.assert_close(trainer.callback_metrics["val_loss"], metrics["val_loss"])
        assert not torch.distributed.is_initialized()
    for name, found in fitted.items():
        assert not torch.equal(found["head.weight"], seeded(Regressor).head.weight)
        torch.testing.assert_close(found, fitted["ddp_notebook"], atol=1e-6, rtol=1e-5)
"""


def test_a_notebook_trains_on_forked_processes(tmp_path):
    # Otherwise Lightning chooses, on a small machine one.
    threads = {"OMP_NUM_THREADS": "2"}
    result = run_snippet(_NOTEBOOK.replace("FOLDER", str(tmp_path)), timeout_s=280, env=threads)
    assert result.returncode == 0, result.stderr
