"""Run a function on several ranks, each a process of its own, and collect what happened on all.

    parent (pytest)                     a process per rank, forked from a server that has torch
    -----------------------------       -------------------------------------------------------
    start, wait with a time limit       init_process_group(file://...), fn(rank, world_size, *args)
    <- done, result | error, text       report, stay alive until the parent has heard every rank
    leave ->                            destroy_process_group, exit

A rank that failed or finished stays alive until every rank was heard, so no peer is disturbed by a
closed socket and reports an error that is only an echo. A rank that does not answer in time is
asked for its stacks (faulthandler writes them from a signal handler, also when the rank is stuck in
C++) and killed. Nothing outlives the call, but ranks that are kept (``kept_ranks``): the next call
that wants as many, of the same backend, runs on them.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

REPOSITORY = Path(__file__).resolve().parents[2]
PLAIN = (
    "plain_gloo"  # gloo under a name of its own: code that knows gloo by name takes its general way
)
PAIRS = "pairs"  # gloo whose ranks do not read each other's memory, whatever the kernel permits
ECHO_GRACE_S = 4.0  # how long the others may go on after one rank failed
LEAVE_LIMIT_S = 20.0  # how long destroying the process group may take

active_fault: str | None = None
"""Name in ``tests.support.faults`` of what is broken on every rank; set by ``pytest --fault``."""

active_transport: str | None = None
"""Backend that takes the place of gloo on every rank; set by ``pytest --transport``."""

active_seed = 0
"""Of the transport ``mixed``; set by ``pytest --seed``."""

active_replicas = False
"""Whether strategies hold two replicas where a test says nothing of them; ``pytest --replicas``."""

active_device = "cpu"
"""Where ranks compute, all on one device; set by ``pytest --device``, on the ranks as well."""

_LEAVE, _STAY = b"leave", b"stay"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])
_filters: list[Any] | None = None


class RankError(NamedTuple):
    """What one rank raised."""

    type_name: str
    message: str


def assert_errors(errors: Sequence[RankError | None], type_names: str, *words: str) -> None:
    """Every rank raised one of ``type_names`` and its message has all ``words``."""
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} raised nothing"
        assert error.type_name in type_names.split(), f"rank {rank}: {error}"
        for word in words:
            assert word in error.message, f"rank {rank}: no {word!r} in {error}"


class RanksFailed(AssertionError):  # noqa: N818 (as pytest's own)
    """At least one rank failed, died or hung; the text shows all of them."""


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    group_timeout_s: float | None = None,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank and return what each returned.

    Args:
        fn: A function at the top level of a module. What it returns must be picklable.
        world_size: Number of ranks.
        args: Further picklable arguments.
        timeout_s: Seconds for everything, after which all ranks are killed and the test fails with
            their stacks.
        backend: Of the default process group; None starts no group, ``PLAIN`` is gloo that does not
            say so, others are those of ``tests/support/transports.py``.
        env: Environment variables to set on every rank.
        group_timeout_s: Timeout of the process group, seconds. Beyond ``timeout_s`` by default, so
            that a hang is shown as a hang, with stacks.

    Raises:
        RanksFailed: With the report of every rank.
    """
    limits = _Limits(timeout_s, group_timeout_s or 2 * timeout_s, ECHO_GRACE_S)
    reports = _run(fn, world_size, args, limits, backend, env or {})
    if any(report.kind != "done" for report in reports):
        raise RanksFailed(_describe(fn, reports))
    return [report.result for report in reports]


def errors_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 30.0,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    group_timeout_s: float | None = None,
) -> list[RankError | None]:
    """Like ``run_on_ranks``, for functions that should raise: what each rank raised, None where it
    returned.

    A rank that neither raises nor returns in time, or dies, fails the test: an expected error must
    be an error on every rank, never a hang elsewhere.
    """
    limits = _Limits(timeout_s, group_timeout_s or 2 * timeout_s, timeout_s)
    reports = _run(fn, world_size, args, limits, backend, env or {})
    if any(report.kind not in ("done", "error") for report in reports):
        raise RanksFailed(_describe(fn, reports))
    return [report.error for report in reports]


def ends_on_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 30.0
) -> list[str]:
    """Like ``run_on_ranks``, for functions that kill ranks: how each ended.

    That is ``"done"``, ``"died"`` or the name of an error's type. A rank that does neither in time
    fails the test: a killed peer must be an error, never a hang.
    """
    limits = _Limits(timeout_s, 2 * timeout_s, timeout_s)
    reports = _run(fn, world_size, args, limits, "gloo", {})
    if any(report.kind == "hung" for report in reports):
        raise RanksFailed(_describe(fn, reports))
    return [r.error.type_name if r.error is not None else r.kind for r in reports]


def run_snippet(
    code: str, *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a fresh interpreter, in the repository's root; returns exit status,
    stdout and stderr.

    Raises:
        RanksFailed: It ran past ``timeout_s``; it and its children were killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill_session(process)
        stdout, stderr = process.communicate()
        raise RanksFailed(f"snippet ran past {timeout_s} s\n{stdout}\n{stderr}") from None
    except BaseException:
        _kill_session(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_forked(fn: Callable[..., int], *args: Any, log: Path, timeout_s: float) -> int:
    """Call a function in a process that has torch and Lightning already; returns its exit status.

    Args:
        fn: Returns the exit status. The ranks that it starts are forked from its process.
        args: Picklable.
        log: Gets what is printed.
        timeout_s: Seconds.

    Raises:
        RanksFailed: It ran past ``timeout_s``; it and its children were killed.
    """
    process = _context.Process(target=_forked_main, args=(fn, args, str(log)))
    process.start()
    try:
        process.join(timeout_s)
        if process.exitcode is None:
            raise RanksFailed(f"{fn.__name__} ran past {timeout_s} s\n{log.read_text()}")
        return process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _forked_main(fn: Callable[..., int], args: tuple[Any, ...], log: str) -> None:
    global _context, _filters
    os.setsid()
    stream = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    _context = multiprocessing.get_context("fork")
    _filters = list(warnings.filters)  # pytest will have others, and ranks would inherit them
    code = fn(*args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True)
class _Limits:
    timeout_s: float
    group_timeout_s: float
    grace_s: float


@dataclass
class _Report:
    """What the parent knows of one rank."""

    kind: str = "silent"  # silent | done | error | died | hung
    result: Any = None
    error: RankError | None = None
    text: str = ""


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    limits: _Limits,
    backend: str | None,
    env: Mapping[str, str],
) -> list[_Report]:
    if backend is not None:
        on_device = {1: "nccl"}.get(world_size, "staged_nccl") if active_device == "cuda" else None
        is_kept = active_transport == PAIRS and backend != "gloo"
        backend = (None if is_kept else active_transport) or on_device or backend
    call = _Call(fn, args, world_size, backend, limits, active_seed, dict(env))
    if _kept is None or env:
        with _Ranks() as ranks:
            reports = ranks.run(call)
            if all(report.kind == "done" for report in reports):
                ranks.let_leave(reports)
        return reports
    started_for = active_fault, active_device, backend == PAIRS
    with _kept.pop(started_for, None) or _Ranks() as ranks:
        reports = ranks.run(call)
        if all(report.kind == "done" for report in reports):
            _kept[started_for] = ranks.stay(call)
    return reports


@dataclass(frozen=True)
class _Call:
    """What ranks run, in a process group of its own."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    limits: _Limits
    seed: int
    env: dict[str, str]


class _Ranks:
    """Living ranks; killed at the end, unless they have left before or stay for another call."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._stays = False

    def __enter__(self) -> Self:
        self._stays = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._stays:
            return
        for process, connection in self._both:
            process.kill()
            process.join()
            connection.close()
        shutil.rmtree(self._folder)

    def run(self, call: _Call) -> list[_Report]:
        """Run a call on the first ranks; those that are missing are started for it."""
        rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=self._folder)
        for connection in self._connections[: call.world_size]:
            connection.send_bytes(pickle.dumps((call, rendezvous)))
        for rank in range(len(self.processes), call.world_size):
            self._start(rank, call, rendezvous)
        reports = [_Report() for _ in range(call.world_size)]
        _listen(self._both[: call.world_size], reports, call.limits, self._folder)
        return reports

    def stay(self, call: _Call) -> Self:
        """Let those that have run a call end its process group, and wait for another call."""
        for connection in self._connections[: call.world_size]:
            connection.send_bytes(_STAY)
        self._stays = True
        return self

    def let_leave(self, reports: list[_Report]) -> None:
        _let_leave(self._both, reports, self._folder)

    def _start(self, rank: int, call: _Call, rendezvous: str) -> None:
        ours, theirs = _context.Pipe()
        process = _context.Process(
            target=_rank_main,
            args=(theirs, self._folder, rank, active_fault, active_device, call, rendezvous),
            name=f"rank-{rank}",
        )
        process.start()
        theirs.close()
        self.processes.append(process)
        self._connections.append(ours)

    @property
    def _both(self) -> list[tuple[Any, Connection]]:
        return list(zip(self.processes, self._connections, strict=True))


_kept: dict[tuple[str | None, str, bool], _Ranks] | None = None
"""By fault and device, and whether they have refused to read each other's memory."""


@contextlib.contextmanager
def kept_ranks() -> Iterator[None]:
    """Ranks stay for the calls in here, so that a start and a first run are paid once.

    Each call has a process group of its own. But what a rank has cached or counted in a module, or
    has changed there and not put back, the next call finds: keep ranks for functions that judge
    values. After a failure others are started.
    """
    global _kept
    assert _kept is None, "ranks are kept already"
    _kept = {}
    try:
        yield
        for ranks in _kept.values():
            reports = [_Report("done") for _ in ranks.processes]
            ranks.let_leave(reports)
            if any(report.kind != "done" for report in reports):
                raise RanksFailed(_describe(kept_ranks, reports))
    finally:
        for ranks in _kept.values():
            with ranks:
                pass
        _kept = None


def kept_pids() -> set[int]:
    """Processes of ranks that wait for another call."""
    return {process.pid for ranks in (_kept or {}).values() for process in ranks.processes}


def _listen(
    ranks: list[tuple[Any, Connection]], reports: list[_Report], limits: _Limits, folder: str
) -> None:
    deadline = time.monotonic() + limits.timeout_s
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending and (remaining_s := deadline - time.monotonic()) > 0:
        for connection in wait(list(pending), timeout=remaining_s):
            rank = pending.pop(connection)  # type: ignore[arg-type]
            report = reports[rank]
            try:
                _read_report(connection, report)  # type: ignore[arg-type]
            except (EOFError, ConnectionError):
                process = ranks[rank][0]
                process.join(5)
                report.kind = "died"
                report.text = f"{_exit_words(process.exitcode)}\n{_stacks(folder, rank)}"
            if report.kind != "done":
                deadline = min(deadline, time.monotonic() + limits.grace_s)
    for rank in pending.values():
        os.kill(ranks[rank][0].pid, signal.SIGUSR1)
    if pending:
        time.sleep(0.5)  # for the signal handlers to write
    for rank in pending.values():
        reports[rank].kind = "hung"
        reports[rank].text = _stacks(folder, rank)


def _read_report(connection: Connection, report: _Report) -> None:
    kind, *rest = pickle.loads(connection.recv_bytes())
    report.kind = kind
    if kind == "done":
        (payload,) = rest
        report.result = pickle.loads(payload)
    else:
        report.error, report.text = RankError(*rest[0]), rest[1]


def _let_leave(ranks: list[tuple[Any, Connection]], reports: list[_Report], folder: str) -> None:
    for _, connection in ranks:
        connection.send_bytes(_LEAVE)
    deadline = time.monotonic() + LEAVE_LIMIT_S
    for rank, (process, _) in enumerate(ranks):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            reports[rank].kind = "hung"
            reports[rank].text = "while leaving\n" + _stacks(folder, rank)
        elif process.exitcode != 0:
            reports[rank].kind = "died"
            words = _exit_words(process.exitcode)
            reports[rank].text = f"while leaving: {words}\n{_stacks(folder, rank)}"


def _describe(fn: Callable[..., Any], reports: list[_Report]) -> str:
    lines = [f"{fn.__name__} on {len(reports)} ranks"]
    for rank, report in enumerate(reports):
        lines.append(f"--- rank {rank}: {report.kind} ---")
        same = next((r for r in range(rank) if _is_same(reports[r], report)), None)
        if same is not None:
            lines.append(f"as rank {same}: {report.text.splitlines()[-1]}")
        elif report.text:
            lines.append(report.text.rstrip())
    return "\n".join(lines)


def _is_same(one: _Report, other: _Report) -> bool:
    """Whether two ranks failed in the same place, whatever their messages say."""
    if one.kind != "error" or other.kind != "error":
        return False
    places = [[line for line in r.text.splitlines() if line.startswith("  ")] for r in (one, other)]
    return places[0] == places[1]


def _stacks(folder: str, rank: int) -> str:
    path = Path(folder) / f"stacks-{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _exit_words(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def _kill_session(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _rank_main(
    connection: Connection,
    folder: str,
    rank: int,
    fault: str | None,
    device: str,
    call: _Call,
    rendezvous: str,
) -> None:
    """The life of one rank. Every way out but the ordered one is ``os._exit`` or a kill by the
    parent.
    """
    stacks = (Path(folder) / f"stacks-{rank}").open("w")  # open for life
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.update(_interface(), **call.env)
    # Workers of a loader are forked from the server that this rank is from. Python knows its
    # address here, and would start another, without torch.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]
    told, before = b"", None
    while told != _LEAVE:
        # The parent kills long before; this one is for a parent that was itself killed.
        faulthandler.dump_traceback_later(call.limits.timeout_s + 60.0, exit=True, file=stacks)
        try:
            if before is None:
                before = _begin_life(fault, device)
            else:
                before.restore()
                call, rendezvous = pickle.loads(told)
            report = ("done", pickle.dumps(_run_call(call, rank, rendezvous)))
        except BaseException as error:  # noqa: BLE001 (whatever it is, the parent must hear it)
            text = traceback.format_exc()
            connection.send_bytes(pickle.dumps(("error", (type(error).__name__, str(error)), text)))
            _wait_for_parent(connection)
            os._exit(1)
        connection.send_bytes(pickle.dumps(report))
        told = _wait_for_parent(connection)
        _end_group()
        faulthandler.cancel_dump_traceback_later()
        if told == _STAY:
            told = _wait_for_parent(connection)


def _begin_life(fault: str | None, device: str) -> Any:
    """What all calls find; returns what can be put back."""
    import torch

    from tests.support.as_new import AsNew

    torch.set_num_threads(1)
    if _filters is not None:
        warnings.filters[:] = _filters  # type: ignore[index]
    warnings.filterwarnings("error", module=r"lightning_fsdp")
    if device != "cpu":
        _compute_on(device)
    if fault is not None:
        from tests.support import faults

        faults.inject(fault)
    return AsNew()


def _run_call(call: _Call, rank: int, rendezvous: str) -> Any:
    import torch.distributed as dist

    backend, is_worst_case = call.backend, call.backend in ("late", "early", "mixed")
    if backend == PAIRS:
        _refuse_to_read_memory()
        backend = "gloo"
    if backend == PLAIN:
        if PLAIN not in dist.Backend.backend_list:
            dist.Backend.register_backend(PLAIN, dist.ProcessGroupGloo, devices=["cpu"])
    elif backend not in (None, "gloo", "nccl"):
        from tests.support.transports import TRANSPORTS
        from tests.support.worst_case import MixedGroup

        MixedGroup.seed = call.seed
        if backend not in dist.Backend.backend_list:
            TRANSPORTS[backend].register()
    if backend is not None:
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.limits.group_timeout_s),
        )
    result = call.fn(rank, call.world_size, *call.args)
    if is_worst_case:
        from tests.support.worst_case import assert_all_waited_for

        assert_all_waited_for()
    return result


def _end_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_to_read_memory() -> None:
    from lightning_fsdp.core.ranks import one_host

    one_host.connect = lambda group: "pytest --transport pairs"


def _compute_on(device: str) -> None:
    import torch

    from tests.support.on_device import OnDevice

    global active_device
    active_device = device
    torch.cuda.set_device(0)
    torch.backends.cudnn.allow_tf32 = False
    OnDevice(device).__enter__()  # for the rank's life


def _wait_for_parent(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionError):
        os._exit(1)


def _interface() -> dict[str, str]:
    """Keep gloo on the loopback device: some machines cannot resolve their own host name."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", name)}
