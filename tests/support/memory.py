"""Live storages as torch's dispatcher sees them, without asking the code under test.

``StorageTracker`` is a dispatch mode. It keeps a weak reference to the storage of every tensor that
goes into or comes out of any operation, and reads the size of a storage only when asked: a storage
emptied by ``resize_(0)`` counts nothing, however many tensors still point to it, and one that is
alive only inside autograd's graph counts.

    whole storages   those that received a gather: a unit is whole while such a storage is not empty
    known storages   those of tensors the test names (shards, optimizer state), left out of a sum
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.counting import flat_tensors, has_wrapper, is_on_default_group, is_reduction

# Which argument of a c10d operation receives parts of a whole.
_RECEIVERS = {
    "_allgather_base_": 0,
    "allgather_": 0,
    "recv_": 0,
    "allgather_into_tensor_coalesced_": 0,
}


_FUTEX = "202"  # the number of the system call, on x86-64
_INTERPRETER = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
_INTERPRETER_BYTES = 1 << 20
_SETTLES_S = 20.0  # reached only where something is kept; a busy machine may need some of it


class StorageTracker(TorchDispatchMode):
    """Tracks the storages of this thread's operations while it is entered.

    Args:
        module: Its parameters, gradients and buffers are tracked from the start.
        at_each_operation: Called after every operation, for peaks.
    """

    def __init__(
        self, module: nn.Module | None = None, at_each_operation: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._whole: dict[int, StorageWeakRef] = {}
        self.at_each_operation = at_each_operation
        if module is not None:
            self.track(tensors_of(module))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, FakeTensor) for cls in types):
            return func(*args, **(kwargs or {}))  # DTensor works out shapes; no memory is behind it
        if has_wrapper(types):
            return NotImplemented  # the wrapper unpacks itself, then its plain tensors come by
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.track(flat_tensors(list(args)))
        self.track(flat_tensors(list(kwargs.values())))
        self.track(flat_tensors(result))
        if func.namespace == "c10d":
            self._mark_whole(func, args)
        if self.at_each_operation is not None:
            self.at_each_operation()
        return result

    def track(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for part in plain_parts(tensor):
                storage = part.untyped_storage()
                if storage.device.type != "meta":
                    self._storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def live_bytes(self, exclude: Iterable[Tensor] = ()) -> int:
        """Bytes of all live storages but those of ``exclude``."""
        left_out = storages_of(exclude)
        return sum(nbytes for key, nbytes in self.live().items() if key not in left_out)

    def settled_bytes(self, exclude: Iterable[Tensor] = ()) -> int:
        """``live_bytes`` once gloo's threads have let go of the last operations' tensors.

        On a busy machine a thread that is about to do so may have to wait for a processor.
        """
        left_out = storages_of(exclude)
        deadline, readings = time.monotonic() + _SETTLES_S, list[int]()
        while len(readings) < 4 or len(set(readings[-4:])) != 1 or not _others_sleep():
            time.sleep(0.002)
            live = self.live()
            readings.append(sum(nbytes for key, nbytes in live.items() if key not in left_out))
            if time.monotonic() > deadline:
                break
        return readings[-1]

    def live(self) -> dict[int, int]:
        """Identity and bytes of every live storage that is not empty."""
        return _sizes(self._storages)

    def whole_sizes(self) -> list[int]:
        """Bytes of the live storages that a gather wrote to, and that are not empty now."""
        return sorted(_sizes(self._whole).values())

    def num_whole(self, expected: int) -> int:
        """How many storages are whole, once gloo's threads have let go of the last collective's.

        ``wait()`` returns when the data is there; the thread that ran the collective drops its
        tensors a moment later, and meanwhile they are as alive as any. So more than ``expected``
        is read again for a while, in which this thread, and what it holds, stands still.
        """
        deadline = time.monotonic() + _SETTLES_S
        while (found := len(self.whole_sizes())) > expected and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    def _mark_whole(self, func: Any, args: Any) -> None:
        position = _RECEIVERS.get(func._schema.name.removeprefix("c10d::"))
        if position is None or not is_on_default_group(args):
            return
        if func._schema.name == "c10d::recv_" and is_reduction(args[3]):
            return
        for tensor in flat_tensors(args[position]):
            storage = tensor.untyped_storage()
            self._whole.setdefault(storage._cdata, StorageWeakRef(storage))


def _others_sleep() -> bool:
    """Whether no other thread of this process has something to do: each waits for an event."""
    own = str(threading.get_native_id())
    return not any(_is_busy(task) for task in Path("/proc/self/task").iterdir() if task.name != own)


def _is_busy(task: Path) -> bool:
    """Whether a thread runs, or waits for a processor, for a page or for Python's lock.

    The lock lies in the interpreter's own state, other locks are made in memory elsewhere.
    """
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        call, *arguments = (task / "syscall").read_text().split()
    except OSError:  # it has ended
        return False
    at_lock = call == _FUTEX and 0 <= int(arguments[0], 16) - _INTERPRETER < _INTERPRETER_BYTES
    return state in "RD" or call == "running" or at_lock


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    return {part.untyped_storage()._cdata for tensor in tensors for part in plain_parts(tensor)}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    sizes = {
        part.untyped_storage()._cdata: part.untyped_storage().nbytes()
        for tensor in tensors
        for part in plain_parts(tensor)
    }
    return sum(sizes.values())


def tensors_of(module: nn.Module) -> list[Tensor]:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *gradients, *module.buffers()]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with storage of their own behind ``tensor``: its local part where it is sharded.

    A gradient that stands for something not reduced yet has no local part, and nothing here; nor
    has a fake tensor, with which DTensor works out shapes.
    """
    if not has_wrapper([type(tensor)]):
        return [tensor]
    if not hasattr(tensor, "to_local"):
        return []
    try:
        return plain_parts(tensor.to_local())
    except RuntimeError:
        return []


def _sizes(storages: dict[int, StorageWeakRef]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for key, reference in list(storages.items()):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None:
            del storages[key]
        elif nbytes := storage.nbytes():
            sizes[key] = nbytes
    return sizes


# Scalars, flags, lists of used parameters. The smallest unit (the position table) is 6 KB.
SLACK_BYTES = 2048
