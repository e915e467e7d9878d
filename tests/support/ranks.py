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
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from tests.support import processes
from tests.support.processes import RanksFailed
from tests.support.rank_life import PAIRS, PLAIN, STAY, Call, Limits, rank_main
from tests.support.rank_reports import RankError, Report, describe, let_leave, listen

__all__ = [
    "PAIRS", "PLAIN", "RankError", "RanksFailed", "assert_errors", "ends_on_ranks",
    "errors_on_ranks", "kept_pids", "kept_ranks", "run_on_ranks",
]  # fmt: skip

ECHO_GRACE_S = 4.0  # how long the others may go on after one rank failed

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


def assert_errors(errors: Sequence[RankError | None], type_names: str, *words: str) -> None:
    """Every rank raised one of ``type_names`` and its message has all ``words``."""
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} raised nothing"
        assert error.type_name in type_names.split(), f"rank {rank}: {error}"
        for word in words:
            assert word in error.message, f"rank {rank}: no {word!r} in {error}"


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
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
    limits = Limits(timeout_s, group_timeout_s or 2 * timeout_s, ECHO_GRACE_S)
    reports = _run(fn, world_size, args, limits, backend, env or {})
    if any(report.kind != "done" for report in reports):
        raise RanksFailed(describe(fn, reports))
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
    limits = Limits(timeout_s, group_timeout_s or 2 * timeout_s, timeout_s)
    reports = _run(fn, world_size, args, limits, backend, env or {})
    if any(report.kind not in ("done", "error") for report in reports):
        raise RanksFailed(describe(fn, reports))
    return [report.error for report in reports]


def ends_on_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 30.0
) -> list[str]:
    """Like ``run_on_ranks``, for functions that kill ranks: how each ended.

    That is ``"done"``, ``"died"`` or the name of an error's type. A rank that does neither in time
    fails the test: a killed peer must be an error, never a hang.
    """
    limits = Limits(timeout_s, 2 * timeout_s, timeout_s)
    reports = _run(fn, world_size, args, limits, "gloo", {})
    if any(report.kind == "hung" for report in reports):
        raise RanksFailed(describe(fn, reports))
    return [r.error.type_name if r.error is not None else r.kind for r in reports]


def _run(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    limits: Limits,
    backend: str | None,
    env: Mapping[str, str],
) -> list[Report]:
    if backend is not None:
        on_device = {1: "nccl"}.get(world_size, "staged_nccl") if active_device == "cuda" else None
        is_kept = active_transport == PAIRS and backend != "gloo"
        backend = (None if is_kept else active_transport) or on_device or backend
    call = Call(fn, args, world_size, backend, limits, active_seed, dict(env))
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

    def run(self, call: Call) -> list[Report]:
        """Run a call on the first ranks; those that are missing are started for it."""
        rendezvous = tempfile.mktemp(prefix="rendezvous-", dir=self._folder)
        for connection in self._connections[: call.world_size]:
            connection.send_bytes(pickle.dumps((call, rendezvous)))
        for rank in range(len(self.processes), call.world_size):
            self._start(rank, call, rendezvous)
        reports = [Report() for _ in range(call.world_size)]
        listen(self._both[: call.world_size], reports, call.limits, self._folder)
        return reports

    def stay(self, call: Call) -> Self:
        """Let those that have run a call end its process group, and wait for another call."""
        for connection in self._connections[: call.world_size]:
            connection.send_bytes(STAY)
        self._stays = True
        return self

    def let_leave(self, reports: list[Report]) -> None:
        let_leave(self._both, reports, self._folder)

    def _start(self, rank: int, call: Call, rendezvous: str) -> None:
        ours, theirs = processes.context.Pipe()
        process = processes.context.Process(
            target=rank_main,
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
            reports = [Report("done") for _ in ranks.processes]
            ranks.let_leave(reports)
            if any(report.kind != "done" for report in reports):
                raise RanksFailed(describe(kept_ranks, reports))
    finally:
        for ranks in _kept.values():
            with ranks:
                pass
        _kept = None


def kept_pids() -> set[int]:
    """Processes of ranks that wait for another call."""
    return {process.pid for ranks in (_kept or {}).values() for process in ranks.processes}
