"""Collectives that end at their worst legal moment: whoever does not wait for one sees poison.

    backend   reads its inputs   outputs hold poison      shows
    late      in ``wait()``      from the call to wait()  inputs that are written to or freed early
    early     at the call        from the call to wait()  outputs that are expected to be as before
    mixed     one or the other, drawn for every collective and rank

Poison is bytes of 0xFF: not a number in every floating-point dtype. As c10d does, a collective
keeps its tensors until it was waited for. It is an error if the memory of one is freed in that
time, or is another when the collective ends, and if nobody ever waits.

Compute runs on one stream in the order of the host. So a core without data races gets from each of
these the bits that gloo gives, and one that waits too late, frees too early or writes into a region
that is still read gets others.

Ranks wait for the same collectives in the same order. An exchange therefore runs when one is first
waited for, after all that were started before it; each keeps its result to itself until its own
``wait()``.
"""

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.groups import Exchange, GroupOverGloo

_POISON = 0xFF


class _WorstCaseWork(dist.Work):
    """One collective."""

    def __init__(
        self,
        group: "_WorstCaseGroup",
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        exchange: Exchange,
        *,
        reads_at_call: bool,
    ) -> None:
        super().__init__()
        self._group, self._name, self._exchange = group, name, exchange
        # Of ``data``: torch's version counters see no write of a collective either.
        self._inputs = [tensor.data for tensor in inputs]
        self._outputs = [tensor.data for tensor in outputs]
        travelling = self._outputs if reads_at_call else [*self._inputs, *self._outputs]
        self._addresses = {id(t): t.untyped_storage().data_ptr() for t in travelling}
        self._results: list[Tensor] | None = None
        as_they_were = self._copies_of(self._inputs)
        self._read = as_they_were if reads_at_call else None
        for output in self._outputs:
            poison(output)
        if not reads_at_call:  # an input that is a part of the output stays
            for tensor, value in zip(self._inputs, as_they_were, strict=True):
                tensor.copy_(value)

    def run(self) -> None:
        """Exchange, and keep the results."""
        inputs = self._copies_of(self._inputs) if self._read is None else self._read
        self._results = self._copies_of(self._outputs)
        self._exchange(inputs, self._results)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._group.run_up_to(self)
        self._group.waiting.discard(self._name)
        results, self._results = self._results or [], []
        for output, result in zip(self._outputs, results, strict=bool(results)):
            self._there(output).copy_(result)
        self._inputs = self._outputs = []
        for before in getattr(self, "before", ()):
            before.wait()
        return True

    def is_completed(self) -> bool:
        return self._results == []

    def _copies_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._there(tensor).clone() for tensor in tensors]

    def _there(self, tensor: Tensor) -> Tensor:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        stop = (tensor.storage_offset() + last + 1) * tensor.element_size()
        is_there = tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= stop
        assert is_there, f"{self._name}: its memory was freed before it ended"
        address = self._addresses.get(id(tensor), tensor.untyped_storage().data_ptr())
        is_same = tensor.untyped_storage().data_ptr() == address
        assert is_same, f"{self._name}: its memory was freed and allocated again before it ended"
        return tensor


class _WorstCaseGroup(GroupOverGloo):
    """Attributes:
    waiting: Names of collectives that nobody waited for so far, of all groups of this process.
    """

    waiting: ClassVar[set[str]] = set()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._started: list[_WorstCaseWork] = []  # whose exchange has not run
        self._num_started = 0

    def reads_at_call(self) -> bool:
        raise NotImplementedError

    def start(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], exchange: Exchange
    ) -> dist.Work:
        self._num_started += 1
        what = f"{name} number {self._num_started} of group {self.group_name}"
        work = _WorstCaseWork(
            self, what, inputs, outputs, exchange, reads_at_call=self.reads_at_call()
        )
        self._started.append(work)
        self.waiting.add(what)
        return work

    def run_up_to(self, work: _WorstCaseWork) -> None:
        while work in self._started:
            self._started.pop(0).run()


class LateGroup(_WorstCaseGroup):
    backend = "late"

    def reads_at_call(self) -> bool:
        return False


class EarlyGroup(_WorstCaseGroup):
    backend = "early"

    def reads_at_call(self) -> bool:
        return True


class MixedGroup(_WorstCaseGroup):
    """Attributes:
    seed: Decides for each collective; set by ``pytest --seed``.
    """

    backend = "mixed"
    seed = 0

    def reads_at_call(self) -> bool:
        drawn = f"{self.seed} {self.group_name} {self.rank()} {self._num_started}"
        return bool(hashlib.blake2b(drawn.encode()).digest()[0] % 2)


def assert_all_waited_for() -> None:
    """Whoever does not wait for a gather lets it write into memory that others have by then."""
    waiting = sorted(_WorstCaseGroup.waiting)
    assert not waiting, f"never waited for: {', '.join(waiting)}"


WORST_CASES = {group.backend: group for group in (LateGroup, EarlyGroup, MixedGroup)}


def poison(tensor: Tensor) -> None:
    """Fill with bytes of 0xFF, whatever the dtype."""
    if tensor.numel():
        bytes_ = torch.full((tensor.element_size(),), _POISON, dtype=torch.uint8)
        tensor.copy_(bytes_.view(tensor.dtype)[0])
