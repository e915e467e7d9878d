"""Two memories on a machine that has one: which tensors are on the host, which on the device that
computes, and what mixed them.

The core is told to compute on ``cpu:0``, which torch takes for the CPU and passes on as it is. So
where the core names a device, the dispatcher sees which of the two it means:

    torch.empty(..., device=cpu:0)    on the device
    shards, as the test marks them    on the host
    every other result                where the operation's inputs are
    a new tensor of neither           takes the place of what it first meets

An operation on both, or a data collective on the host, would fail on a real accelerator (or copy in
secret). It is a mixture, unless :class:`OffloadedHome` does it: its two ways are the only door.
Tensors of one element are of no place: torch lets them travel.
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fsdp.core import fully_shard as door
from lightning_fsdp.core.engine.communicator import Communicator, Pending
from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.host_memory import OffloadedHome
from tests.support.counting import flat_tensors, has_wrapper
from tests.support.memory import plain_parts

HOST, DEVICE = "host", "device"
_COMPUTE = torch.device("cpu", 0)


class TwoPlaces(TorchDispatchMode):
    """Follows tensors while it is entered; models are to be sharded inside as well.

    Attributes:
        mixtures: Operations that worked on both memories at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixtures: list[str] = []
        self._places: dict[int, tuple[StorageWeakRef, str]] = {}
        self._is_at_the_door = False
        self._opened: list[Communicator] = []

    def __enter__(self) -> Self:
        ours = OffloadedHome
        self._originals = door._open_group, door.assemble, ours.to_device, ours.to_host
        open_group, assemble, to_device, to_host = self._originals

        def assemble_and_mark(prepared: Any, communicator: Any, home: Home, *rest: Any) -> None:
            self._is_at_the_door = True  # whole parameters were wherever the user built them
            assemble(prepared, communicator, home, *rest)
            self._is_at_the_door = False
            if home.policy is not None:
                parameters = [p for plan in prepared.flat_params for p in plan.parameters]
                self.mark([p for p in parameters if self.place_of(p) is None], HOST)

        def to_device_marked(home: Home, source: Tensor, target: Tensor) -> None:
            self._is_at_the_door = True
            to_device(home, source, target)
            self._is_at_the_door = False

        def to_host_marked(home: Home, source: Tensor, **options: Any) -> Pending:
            self._is_at_the_door = True
            pending = to_host(home, source, **options)
            self._is_at_the_door = False
            finish = pending.finish

            def finish_marked() -> Tensor:
                self._is_at_the_door = True
                landed = finish()
                self._is_at_the_door = False
                if self.place_of(landed) == DEVICE:
                    self.mixtures.append("to_host that stays on the device")
                self.mark([landed], HOST)
                return landed

            pending.finish = finish_marked
            return pending

        def open_on_device(*args: Any) -> Any:
            communicator = open_group(*args)
            communicator.device = _COMPUTE
            self._opened.append(communicator)
            return communicator

        door._open_group = open_on_device
        door.assemble = assemble_and_mark
        ours.to_device, ours.to_host = to_device_marked, to_host_marked
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for communicator in self._opened:
            communicator.device = torch.device("cpu")
        (door._open_group, door.assemble, *of_home) = self._originals
        OffloadedHome.to_device, OffloadedHome.to_host = of_home

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrapper(types):
            return NotImplemented  # the wrapper unpacks itself, then its plain tensors come by
        kwargs = kwargs or {}
        inputs = flat_tensors(list(args)) + flat_tensors(list(kwargs.values()))
        result = func(*args, **kwargs)
        named = DEVICE if kwargs.get("device") == _COMPUTE else None
        name = func._schema.name.partition("::")[2]
        if not inputs or name.startswith("new_") or name.endswith("_like"):
            like = None if self._is_at_the_door else self._place_among(inputs, name)
            self.mark(flat_tensors(result), named or like)
        elif not self._is_at_the_door:
            is_data = func.namespace == "c10d"
            place = self._place_among(inputs, name, named, is_data)
            self.mark([t for t in (*inputs, *flat_tensors(result)) if not self._has(t)], place)
        return result

    def mark(self, tensors: Iterable[Tensor], place: str | None) -> None:
        for tensor in tensors:
            for part in plain_parts(tensor):
                if place is not None and part.numel() > 1:
                    storage = part.untyped_storage()
                    self._places[storage._cdata] = StorageWeakRef(storage), place

    def place_of(self, tensor: Tensor) -> str | None:
        (part,) = plain_parts(tensor)
        _, place = self._places.get(part.untyped_storage()._cdata, (None, None))
        return place if part.numel() > 1 else None

    def _has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._places

    def _place_among(
        self, inputs: list[Tensor], name: str, named: str | None = None, is_data: bool = False
    ) -> str | None:
        places = {self.place_of(tensor) for tensor in inputs} | {named}
        if {HOST, DEVICE} <= places or (is_data and HOST in places):
            self.mixtures.append(name)
        return next(iter(places - {None}), None)
