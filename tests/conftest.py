"""Fixtures that fail a test for what it leaves behind: a process group, a process, an environment
variable.
"""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import inductor, ranks, selection
from tests.support.on_device import OnDevice

# Set by pytest for itself, and by torch and Lightning when some of their parts are first imported.
NOT_OURS = {
    "CUDA_DEVICE_ORDER",  # Lightning's CUDAAccelerator
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}

# As on the ranks: with another number of threads a matrix product may have other last bits.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault",
        metavar="NAME",
        help="break the core on every rank in one of the ways of tests/support/faults.py",
    )
    parser.addoption(
        "--transport",
        choices=[ranks.PLAIN, ranks.PAIRS, "late", "early", "mixed", "staged"],
        help="run every collective of ranks over one of the groups of tests/support/transports.py, "
        "or over gloo without reading memory (pairs)",
    )
    parser.addoption(
        "--once",
        action="store_true",
        help="leave out what is slow, and cases of a test whose parameters' values others have",
    )
    parser.addoption(
        "--write-seconds", action="store_true", help="write tests/seconds.json after all tests"
    )
    parser.addoption(
        "--replicas",
        action="store_true",
        help="let strategies of the Trainer hold two replicas where a test says nothing of them",
    )
    parser.addoption("--programs", type=int, default=33, help="how many random programs to run")
    parser.addoption("--first-program", type=int, default=0, help="seed of the first")
    parser.addoption("--seed", type=int, default=0, help="of --transport mixed")
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where ranks compute: one over NCCL, several on the one device over staged copies",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-seconds") and not hasattr(config, "workerinput"):
        if config.option.file_or_dir or config.option.keyword or config.getoption("--once"):
            raise pytest.UsageError("--write-seconds: expected all tests. Leave out what selects")
        config.pluginmanager.register(selection.Record())
    if config.pluginmanager.hasplugin("hypothesispytest"):  # not on every machine with a GPU
        import hypothesis

        # The same examples in every run, however slow the machine is.
        hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
        hypothesis.settings.load_profile("suite")
    ranks.active_fault = config.getoption("--fault")
    ranks.active_transport = config.getoption("--transport")
    ranks.active_seed = config.getoption("--seed")
    ranks.active_replicas = config.getoption("--replicas")
    ranks.active_device = config.getoption("--device")
    if ranks.active_device == "cuda":
        if ranks.active_transport is not None:
            raise pytest.UsageError("--transport moves tensors of the CPU: leave out --device cuda")
        # Otherwise the question for a device leaves a process from which no rank can be forked.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: expected a CUDA device, found none")


_ENDS_S = 20.0  # reached only where one is left; a killed process may be giving memory back

ALL_ITEMS = pytest.StashKey[list[pytest.Item]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.mark_and_sort(items)
    config.stash[ALL_ITEMS] = list(items)
    for item in items if config.getoption("--replicas") else ():
        if (flat := item.get_closest_marker("flat")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"--replicas: {flat.args[0]}"))
    if config.getoption("--once"):
        kept = selection.each_value_once(items)
        ids = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
        items[:] = [item for item in items if id(item) in ids]


@pytest.fixture
def all_items(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """What was collected, also what ``--once`` leaves out."""
    return pytestconfig.stash[ALL_ITEMS]


@pytest.fixture(autouse=True)
def computes_on_the_device() -> Iterator[None]:
    """References are computed where the ranks compute."""
    if ranks.active_device == "cpu":
        yield
        return
    torch.backends.cudnn.allow_tf32 = False
    with OnDevice(ranks.active_device):
        yield


@pytest.fixture(scope="module")
def kept_ranks() -> Iterator[None]:
    """One start of ranks for all tests of a file; see ``tests/support/ranks.py``."""
    with ranks.kept_ranks():
        yield


@pytest.fixture(scope="session", autouse=True)
def keeps_compiled_code_that_is_whole() -> Iterator[None]:
    with inductor.kept_code() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        # Otherwise each rank starts a process to compile in, which imports torch anew.
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and name not in NOT_OURS
    )
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test changed environment variables: {changed}. Use monkeypatch."


@pytest.fixture(autouse=True)
def no_leaked_process_group() -> Iterator[None]:
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")


@pytest.fixture(autouse=True)
def no_leaked_process() -> Iterator[None]:
    before = _descendants()
    yield
    deadline = time.monotonic() + _ENDS_S
    while (leaked := _descendants() - before - _servers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = [f"{pid} {_text_of(Path(f'/proc/{pid}/cmdline'))!r}" for pid in sorted(leaked)]
    for pid in leaked:
        os.kill(pid, signal.SIGKILL)
    assert not leaked, f"the test left processes behind: {', '.join(commands)}"


@pytest.fixture(autouse=True)
def one_seed_and_one_dtype() -> Iterator[None]:
    """Every test starts from the same random state, and none changes the default dtype for the
    next.
    """
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    changed = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    assert changed == dtype, f"the test left {changed} as the default dtype"


def _servers() -> set[int]:
    """Processes of multiprocessing's own that live as long as pytest does."""
    pids = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return {pid for pid in pids if pid is not None} | ranks.kept_pids()


def _descendants() -> set[int]:
    """Living processes below this one; empty where ``/proc`` does not list children."""
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        for path in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            new = {int(pid) for pid in _text_of(path).split() if not _is_over(pid)}
            found |= new
            todo.extend(new)
    return found


def _is_over(pid: str) -> bool:
    """Whether a process has ended, or waits for nothing but to be asked how."""
    return _text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] in ([], ["Z"])


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""
