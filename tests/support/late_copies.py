"""Copies between pinned memory and a device, as late as a stream may run them.

Such a copy is queued, and the host goes on. On the device's side it cannot come too late: whatever
computes there runs in the order of the stream. On the host's side nothing keeps it in time:

    to the device   the source on the host is read some time before the next event is waited for;
                    it must stay as it is until then
    to the host     the target on the host is written some time before that copy's event has been
                    waited for; it must not be read until then

``LateCopies`` lets memory count as pinned that the core asks to be, on a machine that can pin
nothing. It looks whether sources have stayed as they were when an event is waited for, and leaves
bytes of 0xFF in targets until their event is.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fsdp.core import host_memory
from lightning_fsdp.core.host_memory import OffloadedHome
from tests.support.counting import has_wrapper
from tests.support.worst_case import poison


@dataclass
class _Copy:
    """One copy in the queue; ``value`` is what travels."""

    source: Tensor
    target: Tensor
    value: Tensor
    is_to_device: bool


class Event:
    """Is over when all copies that were queued before it are."""

    def __init__(self, copies: "LateCopies") -> None:
        self._copies, self._num_queued = copies, copies.num_queued

    def synchronize(self) -> None:
        self._copies.run_up_to(self._num_queued)


class LateCopies(TorchDispatchMode):
    """While entered, for models that are sharded inside with ``pin_memory=False``.

    Attributes:
        num_queued: Copies that were queued so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_queued = 0
        self._queue: list[_Copy] = []

    def __enter__(self) -> Self:
        self._originals = OffloadedHome.__init__, host_memory._record_event
        make_home, _ = self._originals

        def make_home_that_pins(home: OffloadedHome, *args: Any) -> None:
            make_home(home, *args)
            home._pins = True

        OffloadedHome.__init__ = make_home_that_pins
        host_memory._record_event = lambda device: Event(self)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        OffloadedHome.__init__, host_memory._record_event = self._originals
        if exception[0] is None:
            self.run_up_to(self.num_queued)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrapper(types):
            return NotImplemented  # the wrapper unpacks itself, then its plain tensors come by
        kwargs = dict(kwargs or {})
        pins = kwargs.pop("pin_memory", False)
        is_queued = func is torch.ops.aten.copy_.default and (*args[2:], *kwargs.values()) == (
            True,
        )
        if is_queued:
            self._copy(*args[:2])
            return args[0]
        result = func(*args, **kwargs)
        if pins:
            result.untyped_storage().is_taken_for_pinned = True
        return result

    def run_up_to(self, num_queued: int) -> None:
        """Let those of the first ``num_queued`` copies that have not run end."""
        num_left = self.num_queued - num_queued
        num_running = max(len(self._queue) - num_left, 0)
        running, self._queue = self._queue[:num_running], self._queue[num_running:]
        for copy in running:
            if copy.is_to_device:
                is_as_it_was = torch.equal(*map(_bytes_of, (copy.source, copy.value)))
                assert is_as_it_was, "memory of the host was written to while a copy could read it"
            else:
                copy.target.copy_(copy.value)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        is_to_device = _is_pinned(source)
        assert is_to_device != _is_pinned(target), "one side is pinned memory of the host"
        self.num_queued += 1
        self._queue.append(_Copy(source, target, source.clone(), is_to_device))
        if is_to_device:
            target.copy_(source)
        else:
            poison(target)


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_taken_for_pinned", False)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
