"""Exact memory and traffic of a stretch of training: every storage, every collective torch sees.

On CPU the resident size of a process says little: libraries, the allocator's reserves and the page
cache drown the tensors. Here a dispatch mode sees each operation, remembers every storage that goes
in or out of one, and adds up the live ones after each; so the figures are bytes of tensors, exact,
and a storage that an engine has freed with ``resize_(0)`` counts as freed.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # no public name; stable since 1.13
from typing_extensions import override

from lightning_fsdp.callbacks.torch_internals import is_fake
from lightning_fsdp.core.engine.structures import tensors_in
from lightning_fsdp.engines.owned_state import map_leaves

# c10d operation -> kind of collective and the position of the tensor(s) that this rank sends
_COLLECTIVES = {
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
}


@dataclass
class Observation:
    """What was seen.

    Attributes:
        peak_bytes: Most bytes of tensors alive at once.
        calls: Collectives issued by this rank, by kind.
        bytes_of: Bytes of the tensors that it passed to them, by kind.
    """

    peak_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    bytes_of: Counter[str] = field(default_factory=Counter)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all kinds."""
        return self.bytes_of.total()


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations of this thread while it is entered.

    Args:
        present: Tensors that exist already and are to count.
    """

    def __init__(self, present: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observation = Observation()
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int]
        self._numbers = weakref.WeakKeyDictionary()
        self._num_storages = 0
        # The same by number: each operation looks at all, and weak dictionaries are slow at that.
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in present:
            self._note(tensor)

    def start(self) -> None:
        """Begin to watch."""
        self.settle()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> Observation:
        """End, and return what was seen."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self.observation

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(is_fake(cls) for cls in types):
            return func(*args, **(kwargs or {}))
        if any(not _is_plain(cls) for cls in types):
            return NotImplemented  # a subclass first; its own operations come back here
        return self.observe(func, args, kwargs or {})

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on tensors that count, and take in what it did."""
        result = func(*args, **kwargs)
        self._count(func, args)
        for tensor in tensors_in(args, kwargs, result):
            self._note(tensor)
        self.settle()
        return result

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors alive now."""
        return sum(self._find_sizes().values())

    def settle(self) -> None:
        """Take in what is alive now; also what was freed since the last operation."""
        self.observation.peak_bytes = max(self.observation.peak_bytes, self.live_bytes)

    def counts(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is memory to be counted."""
        return _is_plain(type(tensor)) and not tensor.is_meta

    def _note(self, tensor: Tensor) -> None:
        if self.counts(tensor):
            storage = tensor.untyped_storage()
            if storage not in self._numbers:
                self._numbers[storage] = self._num_storages
                self._references[self._num_storages] = weakref.ref(storage)
                self._num_storages += 1

    def _find_sizes(self) -> dict[int, int]:
        """Bytes by number, of the storages that are still there; forgets the others."""
        sizes = {
            number: storage.nbytes()
            for number, reference in self._references.items()
            if (storage := reference()) is not None
        }
        if len(sizes) < len(self._references):
            self._references = {number: self._references[number] for number in sizes}
        return sizes

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        kind, sent = sent_by(func, args)
        if kind is not None:
            self.observation.calls[kind] += 1
            self.observation.bytes_of[kind] += sum(tensor.nbytes for tensor in sent)


class Ledger(Observer):  # type: ignore[no-untyped-call]
    """Keeps every change of a storage's size, so that each moment can be split by owner afterwards.

    Only storages on one type of device count. What a storage was for is often known only later (a
    gradient's, when its backward has ended), so owners are told when they are known, and hold for
    the storage's whole life.

    Args:
        device: Whose storages count.

    Attributes:
        num_operations: Seen so far; the clock of this ledger.
        times_s: Of each tick of the clock, by ``time.perf_counter``; of its beginning the first.
        changes: Clock, number of the storage, bytes from then on.
        owners: By number of the storage.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__([])
        self.num_operations = 0
        self.times_s = [time.perf_counter()]
        self.changes: list[tuple[int, int, int]] = []
        self.owners: dict[int, str] = {}
        self._device_type = device.type
        self._sizes: dict[int, int] = {}
        self._is_told = False  # at present; finding the tensors takes operations of no interest

    def tell(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Say whose the storages of some tensors are; who was told first stays."""
        self._is_told = True
        for tensor in tensors:
            self._note(tensor)
            number = self._numbers.get(tensor.untyped_storage())
            if number is not None:
                self.owners.setdefault(number, owner)
        self._is_told = False
        self.settle()

    @property
    @override
    def live_bytes(self) -> int:
        """Bytes of the tensors alive at the last operation."""
        return sum(self._sizes.values())

    @override
    def counts(self, tensor: Tensor) -> bool:
        return _is_plain(type(tensor)) and tensor.device.type == self._device_type

    def moments(self, names: Iterable[str]) -> list[dict[str, int]]:
        """Bytes by owner after each operation; index 0 is before the first.

        Args:
            names: Of the owners; the last one gets all that nobody was told of.
        """
        *_, rest = names = list(names)
        now, sizes = dict.fromkeys(names, 0), dict[int, int]()
        found: list[dict[str, int]] = []
        for clock, number, nbytes in self.changes:
            while len(found) < clock:
                found.append(dict(now))
            now[self.owners.get(number, rest)] += nbytes - sizes.get(number, 0)
            sizes[number] = nbytes
        while len(found) <= self.num_operations:
            found.append(dict(now))
        return found

    @override
    def settle(self) -> None:
        if self._is_told:
            return
        self.num_operations += 1
        self.times_s.append(time.perf_counter())
        sizes = self._find_sizes()
        if sizes != self._sizes:
            for number in {number for number, _ in sizes.items() ^ self._sizes.items()}:
                self.changes.append((self.num_operations, number, sizes.get(number, 0)))
            self._sizes = sizes
        super().settle()


def sent_by(func: Any, args: tuple[Any, ...]) -> tuple[str | None, list[Tensor]]:
    """The kind of a collective, and what this rank sends by it; ``None`` for other operations."""
    name = func.__name__.split(".")[0]
    if func.namespace != "c10d" or name not in _COLLECTIVES:
        return None, []
    kind, position = _COLLECTIVES[name]
    return kind, tensors_in(args[position])


def resting_tensors(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """What stays between steps on this rank: parameters, gradients, buffers, optimizer state."""
    leaves: list[Any] = [*module.parameters(), *module.buffers()]
    leaves += [p.grad for p in module.parameters()]
    for optimizer in optimizers:
        map_leaves(leaves.append, list(optimizer.state.values()))
    return [local_part(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages under some tensors, each counted once."""
    return sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors})


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharded or not."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local.detach()


def _is_plain(cls: type) -> bool:
    return cls in (Tensor, nn.Parameter)
