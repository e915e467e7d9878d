"""A recipe on several hosts: torchrun on each, by hand or by SLURM. Here all hosts are this one."""

import contextlib
import csv
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.texts import write_folder

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "recipes" / "slurm.sh"
TIME_LIMIT_S = 200.0

pytestmark = pytest.mark.timeout(400)

# What SLURM has, for two hosts that are both this one: `srun` runs a command once per host, with
# what tells the hosts apart.
SRUN = """#!/bin/bash
for host in 0 1; do
    (cd "host$host" && SLURM_NODEID=$host SLURM_PROCID=$host "$@") &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "${status:-0}"
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames host[0-1]" ] && echo localhost && seq 100000  # more than a pipe holds
"""


def _options(folder: Path, *more: str) -> list[str]:
    return [
        f"--data.path={folder / 'corpus'}",
        "--data.vocab_size=300",
        "--data.seq_len=16",
        "--data.batch_size=2",
        "--data.val_fraction=0.3",
        "--trainer.max_steps=4",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.val_check_interval=2",
        "--trainer.log_every_n_steps=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.name=log",
        *more,
    ]


def _environment(**more: str) -> dict[str, str]:
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("SLURM")}
    return own | {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"} | more


def _finish(command: list[str], folder: Path, env: dict[str, str]) -> str:
    """Run a command to its end; gives what it printed."""
    path = folder / "output.txt"
    with path.open("w") as output:
        job = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        code = job.wait(TIME_LIMIT_S)
    finally:
        if job.poll() is None:
            # torchrun ends its ranks, which have sessions of their own, when it is asked to.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
            watchdog = threading.Timer(20.0, os.killpg, (job.pid, signal.SIGKILL))
            watchdog.start()
            job.wait()
            watchdog.cancel()
    assert code == 0, path.read_text()
    return path.read_text()


def _losses(folder: Path) -> dict[str, list[float]]:
    logged: dict[str, list[float]] = {}
    newest = max((folder / "log").glob("version_*"))
    with (newest / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for key in ("train/loss", "val/loss"):
                if row[key]:
                    logged.setdefault(key, []).append(float(row[key]))
    return logged


def _of_one_process(folder: Path, config: str) -> dict[str, list[float]]:
    one = ["--trainer.strategy=auto", "--trainer.devices=1", "--data.batch_size=4"]
    folder.mkdir()
    (folder / "corpus").symlink_to(folder.parent / "corpus")
    path = REPOSITORY / "recipes" / f"{config}.yaml"
    command = [sys.executable, "-m", "recipes.train", "fit", f"--config={path}"]
    options = _options(folder, *one, "--trainer.enable_checkpointing=false")
    log = folder / "output.txt"
    failure = warm.run_command(
        [*command, *options, "--trainer.callbacks=[]"], log=log, timeout_s=TIME_LIMIT_S, cwd=folder
    )
    assert failure is None, log.read_text()
    return _losses(folder)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_two_hosts_train_like_one_process_and_slurm_goes_on(tmp_path: Path) -> None:
    """Begun on one host; then the script starts two, which find the checkpoint of before."""
    write_folder(tmp_path / "corpus")
    expected = _of_one_process(tmp_path / "one", "qwen_zero3")
    config = str(REPOSITORY / "recipes" / "qwen_zero3.yaml")
    keep = (
        '[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": '
        f'"{tmp_path}/kept", "filename": "step{{step}}", "auto_insert_metric_name": false, '
        '"every_n_train_steps": 2, "save_top_k": -1, "save_last": "link"}}, '
        '{"class_path": "recipes.sample.SampleText"}]'
    )
    options = _options(tmp_path, f"--trainer.callbacks={keep}")
    log = tmp_path / "begun.txt"
    command = [sys.executable, "-m", "recipes.train", "fit", f"--config={config}"]
    command += ["--trainer.devices", "2", *options]
    failure = warm.run_command(command, log=log, timeout_s=TIME_LIMIT_S, cwd=tmp_path)
    assert failure is None, log.read_text()
    found = _losses(tmp_path)
    assert len(found["train/loss"]) == 4
    for name, losses in expected.items():
        assert found[name] == pytest.approx(losses, abs=2e-5), name
    # As if the job had been stopped after its third step.
    kept = tmp_path / "kept"
    (kept / "step4.ckpt").unlink()
    (kept / "last.ckpt").unlink()
    (kept / "last.ckpt").symlink_to("step2.ckpt")
    env = _slurm(tmp_path / "bin")
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
    printed = _finish(["bash", str(SCRIPT), config, *options], tmp_path, env)
    assert "MEMBER: 2/2" in printed
    assert "Sample of rank 1: 'import " in printed
    assert _losses(tmp_path)["train/loss"] == pytest.approx(expected["train/loss"][2:], abs=2e-5)


def _slurm(commands: Path) -> dict[str, str]:
    """What SLURM tells a job, and a folder with its commands."""
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return _environment(
        PATH=f"{commands}:{os.environ['PATH']}",
        PYTHON=sys.executable,
        SLURM_NNODES="2",
        SLURM_JOB_NODELIST="host[0-1]",
        SLURM_JOB_ID=str(_free_port() % 10000),
        SLURM_NTASKS="2",  # as many as ranks: Lightning could take SLURM for the launcher
        SLURM_JOB_NAME="recipe",
        SLURM_NTASKS_PER_NODE="1",
    )


def test_the_slurm_script_says_what_is_missing(tmp_path: Path) -> None:
    found = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode != 0
    assert "usage: sbatch" in found.stderr
