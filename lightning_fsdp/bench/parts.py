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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
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
    return [_split_step(phases, trace) for phases in trace.steps]


def _split_step(phases: Sequence[tuple[PhaseName, Interval]], trace: Trace) -> Parts:
    seconds: dict[PhaseName, float] = {"data": 0.0, "compute": 0.0, "optimizer": 0.0}
    exposed = other = 0.0
    for name, phase in phases:
        blocked = _length(_common([phase], merged(trace.blocked or ())))
        left = _length([phase]) - blocked
        if name == "compute" and trace.kernels is not None:
            busy = _without(_common([phase], merged(trace.kernels)), trace.blocked or ())
            other += left - _length(busy)
            left = _length(busy)
        seconds[name] += left
        exposed += blocked
    whole: Interval = (phases[0][1][0], phases[-1][1][1])
    overlapped = None
    if trace.communicating is not None and trace.blocked is not None:
        under_way = merged([*trace.communicating, *trace.blocked])
        overlapped = _length(_common([whole], _without(under_way, trace.blocked)))
    sees_blocked = trace.blocked is not None
    return Parts(
        data_s=seconds["data"],
        compute_s=seconds["compute"] if sees_blocked else None,
        exposed_s=exposed if sees_blocked else None,
        overlapped_s=overlapped,
        optimizer_s=seconds["optimizer"],
        other_s=other if sees_blocked else None,
        whole_s=whole[1] - whole[0],
    )


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
        self._marks: list[str] = []

    def start(self) -> None:
        """Begin with the data of a step. Collective."""
        self._patches.enter_context(_waits_recorded())
        self._profile.start()
        if self._world_size > 1:
            dist.barrier()  # a profiler that starts later on another rank is nothing to wait for
        self._mark("data")

    def enter(self, phase: PhaseName) -> None:
        """One phase ends, another begins."""
        self._mark(phase)

    def end_step(self) -> None:
        """A step ends; the data of the next begins."""
        self._mark("step")

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

    def _mark(self, name: str) -> None:
        if self._device.type == "cuda":  # phases of the host are then phases of the device
            torch.cuda.synchronize(self._device)
        with record_function(_MARK + name):
            pass

    def _trace(self) -> Trace:
        events = list(self._profile.events())  # type: ignore[no-untyped-call]
        marks = [e for e in events if e.name.startswith(_MARK) and e.name != _WAIT]
        marks = sorted((e for e in marks if _is_on_host(e)), key=lambda e: e.time_range.start)
        steps = list(
            _steps([(e.name.removeprefix(_MARK), e.time_range.start / 1e6) for e in marks])
        )
        communicating: list[Interval] | None = None
        blocked: list[Interval] | None = None
        kernels: list[Interval] | None = None
        prefixes = _COMMUNICATION.get(self._device.type, ())
        if self._device.type == "cuda":
            on_device = [e for e in events if not _is_on_host(e) and not e.is_user_annotation]
            kernels = _intervals(on_device, lambda e: not e.name.startswith(prefixes))
            if on_device:
                communicating = _intervals(on_device, lambda e: e.name.startswith(prefixes))
                blocked = _without(communicating, kernels)
        else:
            thread = marks[0].thread
            communicating = _intervals(events, lambda e: e.name.startswith(prefixes)) or None
            blocked = _intervals(events, lambda e: e.name == _WAIT and e.thread == thread)
            if self._waits_unseen and communicating is None:
                blocked = None
            elif self._waits_unseen:
                ran = _intervals(events, lambda e: e.thread == thread and _computes(e))
                blocked = merged([*blocked, *_without(communicating or (), ran)])
        if self._world_size == 1 and kernels != []:  # a device of which nothing was seen computed
            communicating, blocked = [], []
        return Trace(steps=steps, communicating=communicating, blocked=blocked, kernels=kernels)


def _steps(marks: Sequence[tuple[str, float]]) -> Iterator[list[tuple[PhaseName, Interval]]]:
    phases: list[tuple[PhaseName, Interval]] = []
    for (name, start), (following, stop) in itertools.pairwise(marks):
        phase: Any = "data" if name == "step" else name
        phases.append((phase, (start, stop)))
        if following == "step":
            yield phases
            phases = []


def _is_on_host(event: Any) -> bool:
    return bool(event.device_type == torch.profiler.DeviceType.CPU)


def _computes(event: Any) -> bool:
    """An operation, and not a range around operations, nor what starts a collective."""
    return bool(event.name.startswith("aten::") and not event.is_async)


def _intervals(events: Iterable[Any], is_meant: Callable[[Any], bool]) -> list[Interval]:
    return merged((e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events if is_meant(e))


@contextmanager
def _waits_recorded() -> Iterator[None]:
    """Every ``wait`` for a collective from Python becomes a range of the profiler's."""
    with ExitStack() as originals:
        for cls in _with_subclasses(dist.Work):
            if "wait" in vars(cls):
                original = vars(cls)["wait"]
                originals.callback(setattr, cls, "wait", original)
                cls.wait = _recorded(original)
        yield


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


# -- intervals -------------------------------------------------------------------------------------


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, as intervals in order that do not meet."""
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        elif start < stop:
            result.append((start, stop))
    return result


def _common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    found = [
        (max(start, other_start), min(stop, other_stop))
        for start, stop in a
        for other_start, other_stop in b
        if max(start, other_start) < min(stop, other_stop)
    ]
    return merged(found)


def _without(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """What of ``a`` is not in ``b``."""
    left, removed, index = [], merged(b), 0
    for start, stop in merged(a):
        while index < len(removed) and removed[index][1] <= start:
            index += 1
        at = index
        while at < len(removed) and removed[at][0] < stop:
            if removed[at][0] > start:
                left.append((start, removed[at][0]))
            start = max(start, removed[at][1])
            at += 1
        if start < stop:
            left.append((start, stop))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)
