"""A device that is not there, and a record of what the host would wait for if it were.

torch's fake tensors have a device and no data, so a step that runs on them never reads a value
by chance. Autograd asks for more than tensors: streams, and a thread for each device that runs the
hooks of its nodes, as on CUDA. A build for CPU has neither for ``cuda``, but lets Python add one
device of any other name, with both. The core takes it for CUDA where it asks. (An exception in a
hook ends the process there: torch's stream guard in Python cannot be left by one.)

::

    entered() -> HostWaits, DeviceMesh     process group, device, fake tensors and record are on

    waits for the device                            does not
    ------------------------------------------      ---------------------------------------------
    a value or a shape that depends on values       any other operation on the device
    a copy from or to the host                      a non-blocking one from or to pinned memory
    ``synchronize`` of a device, stream, event      ``wait`` of a collective: NCCL's stream waits

What a non-blocking copy makes on the host is pinned memory (so torch has it), and is not there
before the host has waited for anything of the device. Who reads it earlier is recorded as well.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import lightning_fsdp
from lightning_fsdp.core import fully_shard as door
from lightning_fsdp.core.ranks.agreement import ControlGroup, expect_no_others
from tests.support.counting import flat_tensors

NAME = "fakegpu"
DEVICE = torch.device("privateuseone", 0)  # which has the other name once it is there
BACKEND = "fakes"
_PACKAGE = Path(lightning_fsdp.__file__).parent
# With a mask for an index they look for the places where it is true.
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}


class HostWaits(TorchDispatchMode):
    """Records, while it is entered, what the host would wait for.

    Attributes:
        waits: What it was, and the function of this package that asked for it.
        questions: Those of the control group: ``agree``, ``any_rank``, and ``answer`` where the
            answer was waited for.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes
        self.waits: list[str] = []
        self.questions: list[str] = []
        self._pinned: dict[int, StorageWeakRef] = {}
        self._on_the_way: dict[int, StorageWeakRef] = {}

    def note(self, what: str) -> None:
        self._on_the_way.clear()
        self.waits.append(f"{what} in {_asker()}")

    def during(self, step: Callable[[], None]) -> tuple[list[str], list[str]]:
        """What a step waits for, and asks the control group."""
        self.waits, self.questions = waits, questions = [], []
        step()
        self.waits, self.questions = [], []
        return waits, questions

    def in_a_thread(self, function: Callable[[], None]) -> None:
        """Call in a new thread, which has no dispatch modes of its own yet, and wait for it."""

        def call() -> None:
            with self._fakes, self:
                function()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # the wrapper unpacks itself, then its fake tensors come by
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
            with self:  # below autograd they come whole
                return func.decompose(*args, **kwargs)
        inputs = flat_tensors(list(args)) + flat_tensors(list(kwargs.values()))
        is_on_device = any(tensor.device == DEVICE for tensor in inputs)
        if is_on_device and self._needs_values(func, args):
            self.note(func._schema.name.removeprefix("aten::"))
        if self._reads_early(func, inputs, kwargs):
            self.note(f"no wait before {func._schema.name.removeprefix('aten::')}")
        if torch.Tag.data_dependent_output in func.tags:
            return 0 if is_on_device else 1  # nothing is infinite; a step was taken
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[1], args[0], *args[2:], **kwargs)
        elif func is torch.ops.aten._to_copy.default:
            if kwargs.get("non_blocking") and is_on_device and result.device.type == "cpu":
                self._enter(self._pinned, result)
                self._enter(self._on_the_way, result)
            self._note_copy(args[0], result, kwargs.get("non_blocking", False))
        elif not name.startswith("new_") and not name.endswith("_like"):
            self._note_mixture(name, inputs, flat_tensors(result))
        if kwargs.get("pin_memory"):
            self._enter(self._pinned, result)
        return result

    def _needs_values(self, func: Any, args: Any) -> bool:
        if func in _INDEXING:
            masks = torch.bool, torch.uint8
            return any(index.dtype in masks for index in flat_tensors(args[1]))
        tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
        return any(tag in func.tags for tag in tags)

    def _reads_early(self, func: Any, inputs: list[Tensor], kwargs: dict[str, Any]) -> bool:
        devices = {tensor.device for tensor in inputs} | {kwargs.get("device")}
        if func.is_view or DEVICE in devices:  # the device's stream comes after the copy
            return False
        return any(_is_among(self._on_the_way, tensor) for tensor in inputs)

    def _note_copy(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> None:
        if source.device.type == target.device.type:
            return
        on_host = source if source.device.type == "cpu" else target
        if not non_blocking or not self.is_pinned(on_host):
            memory = "pinned" if self.is_pinned(on_host) else "pageable"
            way = "to" if on_host is target else "from"
            self.note(f"copy {way} {memory} memory")

    def _note_mixture(self, name: str, inputs: list[Tensor], results: list[Tensor]) -> None:
        # A number on the host is passed to the device with its kernel.
        tensors = [tensor for tensor in inputs if tensor.dim() > 0] + results
        if len({tensor.device.type for tensor in tensors}) > 1:
            self.note(f"{name} across devices")

    def is_pinned(self, tensor: Tensor) -> bool:
        # Fake tensors themselves never say that they are.
        return _is_among(self._pinned, tensor)

    def _enter(self, storages: dict[int, StorageWeakRef], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = StorageWeakRef(storage)


def _is_among(storages: dict[int, StorageWeakRef], tensor: Tensor) -> bool:
    reference = storages.get(tensor.untyped_storage()._cdata)
    return reference is not None and not reference.expired()


class _FakeTensors(FakeTensorMode):
    """Makes values on the host and copies them, as torch does where it may not touch the device."""

    avoid_device_init = True


def _module_of_device() -> Any:
    """What ``torch.cuda`` is to CUDA."""
    from torch.utils import backend_registration

    class Module(backend_registration._DummyBackendModule):
        def current_device(self) -> int:
            # As of the second device of a host: a new thread has the first one until it chooses.
            # Autograd chooses for its threads, which are no threads of Python's.
            thread = threading.current_thread()
            is_new = not isinstance(thread, (threading._MainThread, threading._DummyThread))
            return 1 if is_new else 0

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16]

    return Module()


class _Event:
    """What ``torch.cuda`` gives to wait for."""

    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def record_event(self) -> Self:
        return self

    def synchronize(self) -> None:
        self._waits.note("synchronize")


@contextlib.contextmanager
def entered() -> Iterator[tuple[HostWaits, DeviceMesh]]:
    """This process is rank 0 of 4, which compute on the device. Once in a process.

    Models are to be built and sharded inside.

    Yields:
        The record, and a mesh of 2 replicas of 2 shards.
    """
    from torch.testing._internal.distributed import fake_pg
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=_module_of_device()
    )
    devices = ["cpu", NAME]
    create = fake_pg._create_fake_pg
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=devices)
    expect_no_others(BACKEND)
    dist.init_process_group(BACKEND, rank=0, world_size=4, store=fake_pg.FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fakes = _FakeTensors(shape_env=ShapeEnv(), static_shapes=True)
        waits = HostWaits(fakes)
        with contextlib.ExitStack() as stack:
            for patch in _patches(waits, fakes):
                stack.enter_context(patch)
            yield waits, mesh
    finally:
        dist.destroy_process_group()


def _patches(waits: HostWaits, fakes: FakeTensorMode) -> list[Any]:
    """All that holds inside: the device in place of CUDA, and the record."""

    def current_stream(device: Any = None) -> _Event:
        return _Event(waits)

    def synchronize(device: Any = None) -> None:
        waits.note("synchronize")

    open_group, agree, any_rank = door._open_group, ControlGroup.agree, ControlGroup.any_rank

    def open_group_of_device(request: Any) -> Any:
        with _disable_current_modes():  # ranks of a mesh are real tensors
            communicator = open_group(request)
        communicator.device = DEVICE
        # The mode knows by weak references what it has made, and torch swaps no tensor with one.
        fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()
        return communicator

    def agree_noted(control: ControlGroup, *statement: str) -> None:
        waits.questions.append("agree")
        agree(control, *statement)

    def any_rank_noted(control: ControlGroup, flags: Tensor) -> Any:
        waits.questions.append("any_rank")
        answer = any_rank(control, flags)

        def answer_noted() -> Tensor:
            waits.questions.append("answer")
            return answer()

        return answer_noted

    return [
        mock.patch.object(door, "_open_group", open_group_of_device),
        mock.patch.object(ControlGroup, "agree", agree_noted),
        mock.patch.object(ControlGroup, "any_rank", any_rank_noted),
        mock.patch.object(FakeTensor, "is_cuda", property(lambda t: t.device == DEVICE)),
        mock.patch.object(FakeTensor, "is_pinned", lambda t: waits.is_pinned(t)),
        mock.patch.object(torch.cuda, "current_stream", current_stream),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        mock.patch.object(torch.accelerator, "synchronize", synchronize),
        fakes,
        waits,
    ]


def _asker() -> str:
    """The innermost function of this package that runs in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"
