"""Two hosts with a network between them, here as network namespaces, with two ranks on each.

They meet by torchrun's rendezvous, train as one process, and keep checkpoints in a shared folder. A
host vanishes; the other ends by itself, and ranks that are told of as many hosts go on to the same
bits.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler

from lightning_fsdp.harness.command_line import INTERRUPTED
from tests.support import on_hosts
from tests.support.hosts import PREFIX, REPOSITORY, Hosts, NoHosts, processes_with
from tests.support.ranks import run_on_ranks
from tests.support.trainer import Regressor, make_data, seeded, weights_of

WORLD_SIZE = on_hosts.NUM_HOSTS * on_hosts.NUM_RANKS
LIMIT_S = 200.0

pytestmark = pytest.mark.timeout(600)


def _namespaces(pid):
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return re.findall(rf"^{PREFIX}-{pid}-\S+", found.stdout, re.MULTILINE)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    try:
        with Hosts():
            pass
    except NoHosts as error:
        pytest.skip(f"no hosts: {error}")
    yield
    assert _namespaces(os.getpid()) == []
    assert processes_with(str(tmp_path)) == {}


def _start(hosts, folder):
    arguments = ["-m", "tests.support.on_hosts", str(folder)]
    for host in range(on_hosts.NUM_HOSTS):
        log = folder / f"whole{host}.log"
        yield hosts.torchrun(host, arguments, nproc=on_hosts.NUM_RANKS, log=log)


def _wait(condition, jobs, folder):
    """Until a condition holds; not longer than jobs run, or than a limit."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        is_over = any(job.poll() is not None for job in jobs)
        if is_over or time.monotonic() > deadline:
            logs = "\n".join(log.read_text()[-4000:] for log in folder.glob("*.log"))
            pytest.fail(f"ended {[job.poll() for job in jobs]}: {logs}")
        time.sleep(0.05)


def _read(folder, name):
    return [torch.load(folder / f"{name}{rank}.pt") for rank in range(WORLD_SIZE)]


def _in_one_process():
    """Plain torch on the joined batches."""
    model, data = seeded(Regressor), make_data(32)
    samplers = [DistributedSampler(data, WORLD_SIZE, rank) for rank in range(WORLD_SIZE)]
    optimizer = model.configure_optimizers()
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        numbers = [list(sampler) for sampler in samplers]
        for first in range(0, len(numbers[0]), 2):
            batches = [data[of_rank[first : first + 2]] for of_rank in numbers]
            optimizer.zero_grad()
            sum(F.mse_loss(model(x), y) / WORLD_SIZE for x, y in batches).backward()
            optimizer.step()
    return weights_of(model)


def test_hosts_train_as_one_process_and_go_on_after_one_has_vanished(tmp_path):
    with Hosts(on_hosts.NUM_HOSTS) as hosts:
        first, second = jobs = list(_start(hosts, tmp_path))
        waits = [tmp_path / f"waits{rank}" for rank in range(WORLD_SIZE)]
        _wait(lambda: all(path.exists() for path in waits), jobs, tmp_path)
        hosts.cut(1)
        (tmp_path / "cut").touch()
        cut_s = time.monotonic()
        assert second.wait(LIMIT_S) != 0
        assert first.wait(LIMIT_S) != 0
        took_s = time.monotonic() - cut_s
    grids = {(tmp_path / f"grid{rank}").read_text() for rank in range(WORLD_SIZE)}
    assert grids == {"[[0, 1], [2, 3]]"}
    expected = _in_one_process()
    for found in _read(tmp_path, "values"):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)
    # Beside the timeout: torchrun's end, and what a busy machine adds.
    assert took_s < on_hosts.TIMEOUT_S + 60
    # Where they agree on what comes, or in what moves; whichever is first.
    named = r"to take part within the group's timeout"
    assert re.search(rf"RuntimeError: .*({named})", (tmp_path / "whole0.log").read_text())

    resumed = run_on_ranks(on_hosts.resumed, WORLD_SIZE, tmp_path)
    for found, whole in zip(resumed, _read(tmp_path, "whole"), strict=True):
        torch.testing.assert_close(found, whole, atol=0, rtol=0)


HELD = """
import sys, time
from pathlib import Path
from lightning_fsdp.harness.command_line import exit_with
from tests.support.hosts import Hosts

folder = Path(sys.argv[1])

def main():
    with Hosts(mbit_s=100) as hosts:
        for host in range(2):
            hosts.start(host, ["tail", "-f", str(folder / "log")], log=folder / "log")
        (folder / "ready").touch()
        time.sleep(100)

exit_with(main)
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_hosts_however_they_end(tmp_path, ending):
    (tmp_path / "log").touch()
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL) as job:
        _wait(lambda: (tmp_path / "ready").exists(), [job], tmp_path)
        assert len(_namespaces(job.pid)) == 3
        # What has just been started is still on its way into its namespace.
        _wait(lambda: len(processes_with(f"tail\0-f\0{tmp_path}")) == 2, [job], tmp_path)
        job.send_signal(ending)
        assert job.wait(LIMIT_S) == (-ending if ending == signal.SIGKILL else INTERRUPTED)
    if ending == signal.SIGKILL:  # which leaves all of it to whoever comes next
        names = _namespaces(job.pid)
        assert len(names) == 3
        # One that is about to enter a namespace is in none, and goes on when that is deleted.
        words = ["-c", "import time; time.sleep(100)", "netns", "exec", names[0], str(tmp_path)]
        with subprocess.Popen([sys.executable, *words]) as entering:
            # A process that has just been started has no command to be found by yet.
            _wait(lambda: entering.pid in processes_with(names[0]), [entering], tmp_path)
            with Hosts():
                assert entering.wait(LIMIT_S) == -signal.SIGKILL
    assert _namespaces(job.pid) == []
    assert processes_with(str(tmp_path)) == {}
