"""A command that is run, and where it believes that it runs."""

import json
import sys

import pytest

from lightning_fsdp.harness.processes import run_command

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
