"""The ranks of a comparison, started by :mod:`lightning_fsdp.compare.runner`.

``python -m lightning_fsdp.compare.ranks PLAN.json``

    this process                    a process per rank
    ------------                    ------------------
    starts them, waits              joins one process group, for all cases
    one left badly: notes it,       each case: a sharded model, on which each test looks and
    kills the others                judges; after one that did not pass, a fresh model
                                    writes a line before and after each test, so that whatever
                                    happens, one can say where it happened

The ranks tell each other through the rendezvous' store, not through the process group, how each
test ended. A test that did not end in the same way on all of them may have left a collective half
done, so that nothing after it could be trusted: they leave.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_fsdp.compare.cases import Case
from lightning_fsdp.compare.judge import Findings, largest_ulps
from lightning_fsdp.compare.models import Sizes
from lightning_fsdp.compare.rows import ROWS
from lightning_fsdp.compare.subject import Subject

_GRACE_S = 3.0  # for the others to report the same error, or to notice that a rank is gone


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one group of ranks does.

    Attributes:
        cases: In order.
        rows: Keys of :data:`~lightning_fsdp.compare.rows.ROWS`, in order.
        world_size: Number of ranks.
        device: ``cpu`` or ``cuda``.
        timeout_s: For one test.
        folder: For ``rank{r}.jsonl`` and ``exit.json``.
    """

    cases: Sequence[Case]
    rows: Sequence[str]
    world_size: int
    device: str
    timeout_s: float
    folder: str

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What :meth:`write` wrote."""
        plan = json.loads(path.read_text())
        cases = [Case(**{**case, "sizes": Sizes(**case["sizes"])}) for case in plan.pop("cases")]
        return cls(cases=cases, **plan)


def main(path: str) -> int:
    """Start the ranks of a plan and wait for them.

    Returns:
        0 if all of them came to the end.
    """
    plan = Plan.read(Path(path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [context.Process(target=_rank, args=(plan, r)) for r in range(plan.world_size)]
    for process in ranks:
        process.start()
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(ranks)}
    deadline = float("inf")  # every test has a limit of its own
    while running and time.monotonic() < deadline:
        grace_s = min(deadline - time.monotonic(), 60.0)
        for sentinel in wait(list(running), timeout=max(grace_s, 0.0)):
            rank = running.pop(sentinel)
            ranks[rank].join()
            if ranks[rank].exitcode != 0 and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE_S
                note = {"rank": rank, "exitcode": ranks[rank].exitcode}
                (Path(plan.folder) / "exit.json").write_text(json.dumps(note))
    for process in ranks:
        process.kill()
        process.join()
    return 1 if any(process.exitcode != 0 for process in ranks) else 0


def _rank(plan: Plan, rank: int) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch's own, about names of collectives
    device = torch.device(plan.device, rank) if plan.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Some machines cannot resolve their own host name; all ranks are on this one.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    limit = timedelta(seconds=plan.timeout_s / 2)
    path = str(Path(plan.folder) / "rendezvous")
    store = dist.FileStore(path, plan.world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=plan.world_size,
        timeout=limit,
    )
    said = dist.PrefixStore("outcomes", store)  # type: ignore[attr-defined]
    said.set_timeout(limit)
    with (Path(plan.folder) / f"rank{rank}.jsonl").open("w", buffering=1) as stream:
        for case in plan.cases:
            subject = None
            for row in plan.rows:
                faulthandler.dump_traceback_later(plan.timeout_s, exit=True)
                place = {"case": case.name, "row": row}
                stream.write(json.dumps({**place, "event": "start"}) + "\n")
                start = time.perf_counter()
                try:
                    subject = subject or Subject(case, rank, plan.world_size, device)
                    findings = ROWS[row].run(subject)
                    subject.rest()
                    outcome = _as_json(findings)
                    ended = "failed" if outcome["complaints"] else "passed"
                except Exception as error:  # noqa: BLE001 (whatever it is, it is a result)
                    ended = type(error).__name__
                    outcome = {"error": f"{ended}: {error}", "traceback": traceback.format_exc()}
                seconds = time.perf_counter() - start
                line = {**place, "event": "end", "ended": ended, "at": time.time(), **outcome}
                line["seconds"] = round(seconds, 4)
                stream.write(json.dumps(line) + "\n")
                every = _outcomes(said, f"{case.name}/{row}", ended, plan.world_size)
                if not ended_alike(every):
                    stream.flush()
                    os._exit(1)  # without the process group's farewell, for which nobody is left
                if every != {"passed"}:
                    subject = None  # in whatever state it is, it is no base for another test
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def ended_alike(every: set[str]) -> bool:
    """Whether a test that ended in these ways leaves all ranks at the same place."""
    return every <= {"passed", "failed"} or len(every) == 1


def _as_json(findings: Findings) -> dict[str, Any]:
    complaints = {item: f.complaint for item, f in findings.items() if f.complaint is not None}
    ulps = largest_ulps(findings.values())
    return {"items": list(findings), "complaints": complaints, "ulps": ulps}


def _outcomes(store: Any, what: str, ended: str, world_size: int) -> set[str]:
    """How a test ended on all ranks."""
    store.set(f"{what}/{dist.get_rank()}", ended)
    try:
        return {store.get(f"{what}/{rank}").decode() for rank in range(world_size)}
    except RuntimeError:
        return {ended, "a rank that did not come in time"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
