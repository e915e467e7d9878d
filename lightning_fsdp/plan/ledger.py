"""The ledger of storages, for tensors that have one without memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fsdp.callbacks.storages import Ledger, sent_by
from lightning_fsdp.plan import torch_internals
from lightning_fsdp.plan.pace import Pace

GATHERED = "gathered"
"""Owner of the buffers that the engine resizes; torch's dispatcher does not see that."""


class FakeLedger(Ledger):  # type: ignore[no-untyped-call]
    """Counts fake tensors' storages; what collectives send belongs to *local gradients*.

    (What a gather sends is known as *gathered* by then: who was told first stays.)

    After an operation it looks at what can have changed: the storages that it touched, those that
    went away, and those of :data:`GATHERED`. To look at all, as for a module of which nothing is
    known, would take most of the time of a plan: a model of 48 blocks has thousands.

    Args:
        pace: Is told of each operation, and moves its clock.
    """

    def __init__(self, pace: Pace | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._pace = pace
        self._touched: set[int] = set()  # since the last look, or gone
        self._gathered: set[int] = set()
        self._live_bytes = 0

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not all(torch_internals.is_plain_or_fake(cls) for cls in types):
            return NotImplemented  # a subclass first; its own operations come back here
        if torch_internals.asks_for_device(func):
            return torch_internals.device_of(*args)
        kind, sent = sent_by(func, args)
        if sent and kind != "all_reduce":  # of a shard that becomes the reduced gradient
            self.tell("local gradients", sent)
        result = self.observe(func, args, kwargs)
        if self._pace is not None:
            self._pace.compute(func, args, kwargs, result)
        return result

    @override
    def tell(self, owner: str, tensors: Iterable[Tensor]) -> None:
        told = list(tensors)
        super().tell(owner, told)
        if owner == GATHERED:
            self._gathered |= {self._numbers[tensor.untyped_storage()] for tensor in told}

    @property
    @override
    def live_bytes(self) -> int:
        return self._live_bytes

    @override
    def counts(self, tensor: Tensor) -> bool:
        return torch_internals.is_plain_or_fake(type(tensor))

    @override
    def _note(self, tensor: Tensor) -> None:
        if not self.counts(tensor):
            return
        storage = tensor.untyped_storage()
        is_new = storage not in self._numbers
        super()._note(tensor)
        number = self._numbers[storage]
        self._touched.add(number)
        if is_new:
            self._references[number] = weakref.ref(storage, partial(self._gone, number))

    def _gone(self, number: int, _: object) -> None:
        self._touched.add(number)

    @override
    def settle(self) -> None:
        if self._is_told:
            return
        self.num_operations += 1
        touched, self._touched = self._touched, set()
        for number in touched | self._gathered:
            storage = self._references[number]()
            nbytes = 0 if storage is None else storage.nbytes()
            before = self._sizes.get(number, 0)
            if nbytes != before:
                self.changes.append((self.num_operations, number, nbytes))
                self._sizes[number] = nbytes
                self._live_bytes += nbytes - before
        self.observation.peak_bytes = max(self.observation.peak_bytes, self._live_bytes)
