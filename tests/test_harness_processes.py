"""A command that is run, and where it believes that it runs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp.harness.processes import empty_folder, run_command, run_module
from lightning_fsdp.harness.ranks import run_ranks_apart

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize(
    "name",
    [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS",
        "TORCHELASTIC_RUN_ID", "LSB_JOBID", "JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE",
    ],
)  # fmt: skip
def test_a_command_starts_ranks_of_its_own(name, monkeypatch, tmp_path):
    """Of the launcher that started this process it is told nothing; the rest stays."""
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    log = tmp_path / "log.txt"
    assert run_command([sys.executable, "-c", SHOW], log=log, timeout_s=60) is None
    told = json.loads(log.read_text())
    assert name not in told
    assert told["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_command_that_was_killed_says_so(tmp_path):
    kills = "import os; print('harmless', flush=True); os.kill(os.getpid(), 9)"
    failure = run_command([sys.executable, "-c", kills], log=tmp_path / "log.txt", timeout_s=60)
    assert failure is not None
    assert failure.says == "exit code -9: killed, as the system does when memory runs out"


def test_a_module_runs_with_its_log_in_a_folder_without_what_was_there(tmp_path):
    folder = tmp_path / "runs" / "arm"
    (empty_folder(folder) / "rank0.json").touch()
    assert list(empty_folder(folder).iterdir()) == []
    assert run_module(["json.tool", "--help"], folder, timeout_s=60) is None
    assert "json.tool" in (folder / "log.txt").read_text()
    failure = run_module(["json.tool", "nowhere.json"], folder, timeout_s=60)
    assert failure is not None
    assert "nowhere.json" in failure.says


def _note(rank, folder, number):
    shares = torch.tensor([rank + number])
    dist.all_reduce(shares)
    Path(folder, f"{rank}.txt").write_text(f"{shares.item()}")
    dist.barrier()
    raise ValueError(f"rank {rank} of {dist.get_world_size()}: that is all")


def test_ranks_below_a_process_of_their_own_get_what_is_given_and_fail_with_their_error(tmp_path):
    """``test_bench_report.py`` has some that do not fail."""
    failure = run_ranks_apart(_note, 2, str(tmp_path), 10, folder=tmp_path / "ranks", timeout_s=200)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["21", "21"]
    assert failure is not None
    assert re.search(r"rank [01] of 2: that is all", failure.says)


COMMAND = """
import sys
from pathlib import Path
from lightning_fsdp.harness.command_line import exit_with
from lightning_fsdp.harness.processes import run_command
child, log = sys.argv[1:]
exit_with(lambda: run_command([sys.executable, "-c", child], log=Path(log), timeout_s=60))
"""
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
STAYS = "import signal; signal.signal(15, lambda *_: print('asked', flush=True)); " + WAITS


def _wait_for(text, log, command):
    """Until a process below the command has printed it."""
    while not (log.exists() and text in log.read_text()) and command.poll() is None:
        time.sleep(0.02)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("child", [WAITS, STAYS], ids=["first", "second"])
def test_a_command_that_is_asked_to_end_ends_what_it_started(tmp_path, kind, child):
    """At the first interrupt; or at the second one, where the child goes on after the first."""
    log = tmp_path / "log.txt"
    given = [sys.executable, "-c", COMMAND, child, str(log)]
    command = subprocess.Popen(given, stderr=subprocess.PIPE)
    _wait_for("\n", log, command)
    if child == STAYS:
        command.send_signal(kind)
        _wait_for("asked", log, command)
    began = time.perf_counter()
    command.send_signal(kind)
    _, says = command.communicate(timeout=30)
    assert (command.returncode, b"interrupted; nothing is left running" in says) == (130, True)
    assert time.perf_counter() - began < 4, "as long as the first may take"
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().split()[0]), 0)


STARTS = """
import signal, subprocess, sys
kind = int(sys.argv.pop())
class Interrupted(subprocess.Popen):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        print(self.pid, flush=True)
        signal.raise_signal(kind)
subprocess.Popen = Interrupted
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_what_is_being_started_at_an_interrupt_is_ended_too(tmp_path, kind):
    given = [
        sys.executable,
        "-c",
        STARTS + COMMAND,
        WAITS,
        str(tmp_path / "log.txt"),
        str(int(kind)),
    ]
    command = subprocess.run(given, capture_output=True, text=True, timeout=50)
    assert command.returncode == 130, command.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(command.stdout), 0)
