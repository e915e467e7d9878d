"""A state dict whose tensors are made whole one at a time, while they are written.

A full checkpoint of a sharded model need not be in anybody's memory. What hooks see of it before it
is written are stand-ins (:class:`DeferredTensor`): name, shape and dtype of the whole, and how to
make it. They may be renamed, dropped, and converted to another dtype.

    rank 0                                   the others
    ----------------------------------       ------------------------------
    writes; at each stand-in says which  ->  make the same one whole with it
    says that it is done, or failed      ->  go on
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_fsdp.checkpoint import torch_internals
from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.core.engine.torch_internals import disabled_torch_function, wrap_without_storage
from lightning_fsdp.engines.gatherable import Gatherable, gather_all, map_gatherables
from lightning_fsdp.libc import LOOK_AFTER_BYTES, return_unused_memory

aten = torch.ops.aten
_KEEPING_VALUES = (aten.detach.default, aten.clone.default, getattr(aten, "_to_copy").default)  # noqa: B009 (its name)


@dataclass(eq=False)
class _Source:
    """What stand-ins are made of: one tensor of the module or of an optimizer's state.

    Attributes:
        tensor: Has this rank's piece.
        number: Its place in the checkpoint, the same on every rank.
        checkpoint: That it belongs to.
    """

    tensor: Gatherable
    number: int
    checkpoint: DeferredCheckpoint


class DeferredTensor(Tensor):
    """Stands for a whole tensor on the host, which is made when it is written to a file.

    :meth:`full_tensor` makes it at once, for who computes with it.
    """

    source: _Source
    conversions: tuple[torch.dtype, ...]  # of the whole, one after the other

    @staticmethod
    def __new__(  # noqa: D102, PYI034
        cls, source: _Source, conversions: tuple[torch.dtype, ...] = ()
    ) -> DeferredTensor:
        dtype = conversions[-1] if conversions else source.tensor.dtype
        like = torch.empty(0, dtype=dtype, device="cpu")
        deferred: Any = wrap_without_storage(cls, source.tensor.shape, like, requires_grad=False)
        deferred.source = source
        deferred.conversions = conversions
        return deferred  # type: ignore[no-any-return]

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        deferred: Any = args[0]
        if func not in _KEEPING_VALUES:
            _refuse(str(func), next((t for t in args if isinstance(t, cls)), deferred))
        dtype = (kwargs or {}).get("dtype") or deferred.dtype
        more = () if dtype == deferred.dtype else (dtype,)
        return DeferredTensor(deferred.source, (*deferred.conversions, *more))

    def full_tensor(self) -> Tensor:
        """The whole, a plain tensor on the host. Collective: every rank calls it."""
        return self._converted(self.source.tensor.whole())

    def keep_values(self) -> None:
        """Stand for the values of now, also once the module has others. Copies this rank's piece.

        Every rank calls it. Stand-ins that were made of this one follow.
        """
        self.source.tensor = self.source.tensor.kept()

    def when_written(self) -> Tensor:
        """The whole, on rank 0 while the checkpoint is written; the other ranks help."""
        return self._converted(self.source.checkpoint.gather(self.source))

    def _converted(self, whole: Tensor) -> Tensor:
        for dtype in self.conversions:
            whole = whole.to(dtype)
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.source.checkpoint.is_written:
            _refuse("pickle", self)
        return torch_internals.reduce_and_make_later(self.shape, self.dtype, self.when_written)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredTensor:
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self.source.tensor.name
        return f"DeferredTensor({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def numpy(self, *, force: bool = False) -> NoReturn:  # noqa: ARG002
        """Refused: no rank has the values yet."""
        _refuse("numpy()", self)

    def tolist(self) -> NoReturn:
        """Refused, as :meth:`numpy`."""
        _refuse("tolist()", self)

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("numpy", self)


def _refuse(what: str, deferred: DeferredTensor) -> NoReturn:
    raise RuntimeError(
        f"{what} of {deferred.source.tensor.name!r} in a checkpoint: expected a whole tensor, got "
        "one that is made whole when the file is written, so that no rank has to hold all of it. "
        "Take whole = tensor.full_tensor() on every rank, and put into the checkpoint what you "
        "compute from it. (Renaming, dropping and .to(dtype) need no values.)"
    )


class DeferredCheckpoint:
    """The stand-ins of one checkpoint, numbered alike on all ranks.

    Attributes:
        is_written: Whether :meth:`write` is writing, on this rank.
    """

    def __init__(self) -> None:
        """Nothing is collected yet."""
        self.is_written = False
        self._is_collected = False
        self._sources: list[_Source] = []
        self._call: Callable[[int], None] | None = None

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Inside, the checkpoint is put together that :meth:`write` is going to write."""
        self._sources, self._is_collected = [], True
        try:
            yield
        finally:
            self._is_collected = False

    def in_place_of(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """A state dict, nested or not, with a stand-in for each ``Gatherable``.

        Outside of :meth:`collected`, with whole tensors on rank 0 and their outlines on the others;
        that is collective.
        """
        if not self._is_collected:
            return gather_all(state, rank0_only=True)

        def stand_in(tensor: Gatherable) -> DeferredTensor:
            self._sources.append(_Source(tensor, len(self._sources), self))
            return DeferredTensor(self._sources[-1])

        return map_gatherables(stand_in, state)

    def write(self, doing: str, write: Callable[[], None]) -> None:
        """Rank 0 writes, and every rank takes part in making whole what is written. Collective.

        Args:
            doing: What this is about, the first words of an error.
            write: Called on rank 0, where ``torch.save`` takes stand-ins then.

        Raises:
            RuntimeError: A stand-in is of an earlier checkpoint, or of some ranks alone.
        """
        ranks = Ranks()
        numbers = ranks.on_each(doing, lambda: len(self._sources))
        if len(set(numbers)) > 1:
            raise RuntimeError(
                f"{doing}: expected all ranks to put the same state dicts into it, got {numbers} "
                "tensors by rank. In on_save_checkpoint, call lightning_module_state_dict() and "
                "optimizer_state() of the strategy on every rank."
            )

        def lead(call: Callable[[int], None]) -> None:
            self._call, self.is_written = call, True
            try:
                write()
            finally:
                self._call, self.is_written = None, False

        def take_part(number: int) -> None:
            self._sources[number].tensor.whole(rank0_only=True)

        try:
            ranks.lead(doing, lead, take_part)
        finally:
            self._sources = []
            return_unused_memory(all_of_it=True)

    def gather(self, source: _Source) -> Tensor:
        """Make a tensor whole on rank 0, with the others' help."""
        assert self._call is not None, "while it is written"
        if source.number >= len(self._sources) or self._sources[source.number] is not source:
            raise RuntimeError(
                f"{source.tensor.name!r}: expected a tensor of the checkpoint that is being saved, "
                "got one of an earlier one. Take full_tensor() of it while that is put together, "
                "on every rank."
            )
        self._call(source.number)
        whole = source.tensor.whole(rank0_only=True)
        # Each is freed when it is written, and small blocks then lie where the next does not fit.
        return_unused_memory(whole.nbytes, slack=LOOK_AFTER_BYTES)
        return whole
