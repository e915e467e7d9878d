"""Ways to start and to end: script, torchrun, notebook, exceptions, Ctrl-C; nothing is left."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torchmetrics import MeanSquaredError

from lightning_fsdp import ScratchFSDPStrategy
from lightning_fsdp.strategies import lightning_internals, registry
from tests.support.jobs import BY_TORCHRUN, Job
from tests.support.processes import run_snippet


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
    monkeypatch.setattr(ScratchFSDPStrategy, "_open_grid", lambda strategy: None)  # of no ranks
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
        if mode == f"raise on {self.global_rank}" and batch_idx == 1:
            raise ValueError("only this rank says no")
        if mode == "wait" and batch_idx == 1:
            print("TRAINING", flush=True)
            time.sleep(0.1 if self.trainer.current_epoch else 0)

if __name__ == "__main__":
    atexit.register(lambda: os.write(1, f"GROUP AT EXIT: {dist.is_initialized()}\\n".encode()))
    result, kept = {}, []
    for name in sys.argv[3:] or ["scratch_fsdp_zero3"]:
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


# Every engine by each: a stage is nothing to how processes start.
STARTED = {
    "script": ("scratch_fsdp", "scratch_fsdp_zero2", "fsdp1_zero3", "fsdp2_zero2"),
    "torchrun": ("scratch_fsdp_zero3", "fsdp1_zero2", "fsdp2_zero3"),
}


def test_every_strategy_is_started():
    assert sorted(name for names in STARTED.values() for name in names) == sorted(registry.NAMES)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("launcher", STARTED)
def test_started_by_script_or_torchrun_it_trains_as_ddp_and_leaves_no_thread(tmp_path, launcher):
    arguments = BY_TORCHRUN if launcher == "torchrun" else []
    job = Job(tmp_path, arguments, SCRIPT, "run", *STARTED[launcher], "ddp")
    status, output = job.wait()
    assert status == 0, output
    result = json.loads((tmp_path / "result.json").read_text())
    for name in STARTED[launcher]:
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
@pytest.mark.parametrize(("launcher", "rank"), [("script", 1), ("torchrun", 0)])
def test_an_exception_on_one_rank_ends_all_of_them(tmp_path, launcher, rank):
    job = Job(tmp_path, BY_TORCHRUN if launcher == "torchrun" else [], SCRIPT, f"raise on {rank}")
    status, output = job.wait()
    assert status != 0
    assert "only this rank says no" in output


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_ctrl_c_ends_all_ranks(tmp_path):
    job = Job(tmp_path, [], SCRIPT, "wait")
    job.wait_for("TRAINING")
    time.sleep(0.5)
    os.killpg(job.process.pid, signal.SIGINT)  # as the terminal does, to every process
    status, output = job.wait()
    assert "KeyboardInterrupt" in output
    # Every five seconds Lightning looks for children that died, and kills itself if there is one:
    # after Ctrl-C too, if that comes before its end.
    if "Forcefully terminating all other processes" in output:
        assert status == -signal.SIGKILL, output
    else:
        assert status == 1, output
        assert "GROUP AT EXIT: False" in output


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
            strategy=name, accelerator="cpu", devices=2, max_epochs=1, callbacks=[keep],
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
