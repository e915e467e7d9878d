"""Where the time of an optimizer step goes, communication split into seen and hidden.

::

    phases         | data |       compute            | optimizer | data ...
    communicating           [  gather ]    [ reduce    ]
    blocked                     [     ]         [      ]
    exposed                     xxxxxxx         xxxxxxxx           what the step waits for
    overlapped              oooo           ooooo                   hidden behind computing

What blocks is the one thing that differs by device and engine:

=============== =================================== ===========================================
                communicating                       blocked
=============== =================================== ===========================================
CUDA            NCCL's kernels                      of those, when no other kernel runs
CPU, gloo       from the start of a collective to   inside of ``Work.wait``
                its end; of a pair, whose end gloo
                does not announce, to its wait
CPU, gloo, DDP  likewise                            of that, when no operation runs: it waits in
                                                    C++, where nobody looks
=============== =================================== ===========================================

Backward is computing as long as nothing blocks it. Exposed time counts once, wherever in the step
it is; so data, compute, exposed, optimizer and other are the whole. *Other* is time in which the
device has nothing to do (CUDA only: on CPU, Python's own work counts where it is done).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, record_function

Interval = tuple[float, float]
PhaseName = Literal["data", "compute", "optimizer"]

_MARK = "lightning_fsdp.bench: "
_WAIT = _MARK + "wait"
_COMMUNICATION = {"cpu": ("gloo:",), "cuda": ("nccl",)}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One optimizer step of one rank, in seconds; ``None`` is not measurable.

    Attributes:
        data_s: Loading and moving batches, and what callbacks do between steps.
        compute_s: Forward and backward; on CUDA only while a kernel runs.
        exposed_s: Communication that the step waits for.
        overlapped_s: Communication that it does not wait for; beside the sum of the others.
        optimizer_s: From the last backward's end: clipping and the optimizer.
        other_s: The rest.
        whole_s: The step, profiling included.
    """

    data_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    overlapped_s: float | None = None
    optimizer_s: float | None = None
    other_s: float | None = None
    whole_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a profiler saw of some steps; all times by its clock.

    Attributes:
        steps: Phases without gaps, by step.
        communicating: While a collective is under way; ``None``: nobody saw.
        blocked: While the step waits for one; ``None``: nobody saw.
        kernels: While a device computes; ``None`` where the host does.
    """

    steps: Sequence[Sequence[tuple[PhaseName, Interval]]]
    communicating: Sequence[Interval] | None
    blocked: Sequence[Interval] | None
    kernels: Sequence[Interval] | None = None


def split(trace: Trace) -> list[Parts]:
    """The parts of each step."""
    phases = [phase for step in trace.steps for _, phase in step]
    watched = [of or () for of in (trace.communicating, trace.blocked, trace.kernels)]
    cells = _Cells(phases, *watched)
    communicating, blocked, kernels = map(cells.inside, watched)
    busy = kernels if trace.kernels is not None else np.ones_like(kernels)
    sees_blocked = trace.blocked is not None
    sees_hidden = sees_blocked and trace.communicating is not None
    found = []
    for step in trace.steps:
        data, compute, optimizer = (
            cells.inside([phase for of, phase in step if of == name])
            for name in ("data", "compute", "optimizer")
        )
        whole = data | compute | optimizer
        parts = Parts(
            data_s=cells.seconds(data & ~blocked),
            compute_s=cells.seconds(compute & busy & ~blocked) if sees_blocked else None,
            exposed_s=cells.seconds(whole & blocked) if sees_blocked else None,
            overlapped_s=cells.seconds(whole & communicating & ~blocked) if sees_hidden else None,
            optimizer_s=cells.seconds(optimizer & ~blocked),
            other_s=cells.seconds(compute & ~busy & ~blocked) if sees_blocked else None,
            whole_s=cells.seconds(whole),
        )
        found.append(parts)
    return found


class _Cells:
    """A clock cut where any of some intervals begins or ends.

    Args:
        *sets: Of intervals, in any order; those of a set may overlap.
    """

    def __init__(self, *sets: Iterable[Interval]) -> None:
        self._edges = np.unique([moment for of in sets for interval in of for moment in interval])
        self._widths = np.diff(self._edges)

    def inside(self, intervals: Sequence[Interval]) -> NDArray[np.bool_]:
        """Which cells lie inside of any of some intervals, whose ends are edges."""
        starts, stops = np.array(intervals, dtype=float).reshape(-1, 2).T
        depth = np.zeros(len(self._edges), dtype=int)
        np.add.at(depth, np.searchsorted(self._edges, starts), 1)
        np.add.at(depth, np.searchsorted(self._edges, stops), -1)
        return depth.cumsum()[:-1] > 0

    def seconds(self, chosen: NDArray[np.bool_]) -> float:
        """Of some cells together."""
        return float(self._widths[chosen].sum())

    def intervals(self, chosen: NDArray[np.bool_]) -> list[Interval]:
        """Some cells, each by itself."""
        starts, stops = self._edges[:-1][chosen], self._edges[1:][chosen]
        return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _without(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """What of ``a`` is not in ``b``."""
    cells = _Cells(a, b)
    return cells.intervals(cells.inside(a) & ~cells.inside(b))


class StepProfiler:
    """Profiles some steps of this process.

    Args:
        device: Where this rank computes.
        world_size: On one rank nothing is communicated, whatever an engine calls.
        waits_unseen: Whether the engine waits in C++, as DDP does.
    """

    def __init__(self, device: torch.device, *, world_size: int, waits_unseen: bool) -> None:
        self._device = device
        self._world_size = world_size
        self._waits_unseen = waits_unseen
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Older torches say at the start that events of an earlier cycle go; there is one cycle.
        self._profile = profile(activities=activities, acc_events=True)
        self._patches = ExitStack()

    def start(self) -> None:
        """Begin with the data of a step. Collective."""
        _record_waits(self._patches)
        self._profile.start()
        if self._world_size > 1:
            dist.barrier()  # a profiler that starts later on another rank is nothing to wait for
        self.enter("data")

    def enter(self, phase: PhaseName | Literal["step"]) -> None:
        """One phase ends, another begins."""
        if self._device.type == "cuda":  # phases of the host are then phases of the device
            torch.cuda.synchronize(self._device)
        with record_function(_MARK + phase):
            pass

    def end_step(self) -> None:
        """A step ends; the data of the next begins."""
        self.enter("step")

    def stop(self) -> None:
        """See no more."""
        self._patches.close()
        self._profile.stop()

    def parts(self) -> list[Parts]:
        """Of every step that ended; after :meth:`stop`."""
        return split(self._trace())

    def write(self, path: Path) -> None:
        """Write a chrome trace; after :meth:`stop`."""
        self._profile.export_chrome_trace(str(path))

    def _trace(self) -> Trace:
        events = list(self._profile.events())  # type: ignore[no-untyped-call]
        prefixes = _COMMUNICATION.get(self._device.type, ())
        marks = [e for e in events if e.name.startswith(_MARK) and e.name != _WAIT]
        marks = sorted(filter(_is_on_host, marks), key=lambda e: e.time_range.start)
        communicating: list[Interval] | None = None
        blocked: list[Interval] | None = None
        kernels: list[Interval] | None = None
        if self._device.type == "cuda":
            on_device = [e for e in events if not _is_on_host(e) and not e.is_user_annotation]
            kernels = _intervals(e for e in on_device if not e.name.startswith(prefixes))
            if on_device:
                communicating = _intervals(e for e in on_device if e.name.startswith(prefixes))
                blocked = _without(communicating, kernels)
        else:
            mine = [e for e in events if e.thread == marks[0].thread]
            communicating = _intervals(e for e in events if e.name.startswith(prefixes)) or None
            blocked = _intervals(e for e in mine if e.name == _WAIT)
            if self._waits_unseen:
                computing = _intervals(filter(_computes, mine))
                blocked = communicating and [*blocked, *_without(communicating, computing)]
        if self._world_size == 1 and kernels != []:  # a device of which nothing was seen computed
            communicating, blocked = [], []
        return Trace(
            steps=_steps(marks), communicating=communicating, blocked=blocked, kernels=kernels
        )


def _steps(marks: Sequence[Any]) -> list[list[tuple[PhaseName, Interval]]]:
    """The phases between marks; those after the last step's end belong to none."""
    steps: list[list[tuple[PhaseName, Interval]]] = [[]]
    for mark, following in itertools.pairwise(marks):
        name: Any = mark.name.removeprefix(_MARK)
        interval = (mark.time_range.start / 1e6, following.time_range.start / 1e6)
        steps[-1].append(("data" if name == "step" else name, interval))
        if following.name == _MARK + "step":
            steps.append([])
    return steps[:-1]


def _is_on_host(event: Any) -> bool:
    return bool(event.device_type == torch.profiler.DeviceType.CPU)


def _computes(event: Any) -> bool:
    """An operation, and not a range around operations, nor what starts a collective."""
    return bool(event.name.startswith("aten::") and not event.is_async)


def _intervals(events: Iterable[Any]) -> list[Interval]:
    return [(e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events]


def _record_waits(originals: ExitStack) -> None:
    """Every ``wait`` for a collective from Python is a range of the profiler's until the close."""
    for cls in _with_subclasses(dist.Work):
        if "wait" in vars(cls):
            original = vars(cls)["wait"]
            originals.callback(setattr, cls, "wait", original)
            cls.wait = _recorded(original)


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(*args: Any, **kwargs: Any) -> Any:
        with record_function(_WAIT):
            return original(*args, **kwargs)

    return wait


def _with_subclasses(cls: type) -> Iterator[Any]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)
