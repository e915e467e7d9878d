"""Every private name of torch that the plan uses, one function each, with the reason.

Checked against torch 2.13. A name that goes away is to be replaced here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from typing_extensions import override


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's mode, with the same answers in half of the time.

    Left out is what torch does around each operation for a compiler, as nothing is compiled here.
    """

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if asks_for_device(func):
            return device_of(*args)
        if func is _MEAN_INTO and kwargs is not None:
            return kwargs["out"]  # torch takes ten operations to say so, and does not remember it
        return self.dispatch(func, types, args, kwargs or {})

    @override
    def _prep_args_for_hash(
        self, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]
    ) -> None:
        """Append what an operation's result depends on, by which torch remembers results.

        Of a tensor, torch looks up each field by name, which took a third of a plan's time.
        """
        others = state, id_hashed_objects
        result.append(tuple(args) if isinstance(args, dict) else len(args))
        for arg in args.values() if isinstance(args, dict) else args:
            if type(arg) is FakeTensor and self._is_simple(arg):
                result += (FakeTensor, arg.dtype, arg.shape, arg.stride(), arg.storage_offset())
                result += (arg.fake_device, arg.untyped_storage().nbytes(), arg.requires_grad)
                result += (arg.is_conj(), arg.is_neg(), arg.is_inference())
            elif isinstance(arg, (list, tuple, dict)):
                self._prep_args_for_hash(result, arg, *others)
            elif isinstance(arg, _PLAIN):
                result += (type(arg), arg)
            else:
                super()._prep_args_for_hash(result, [arg], *others)

    def _is_simple(self, tensor: FakeTensor) -> bool:
        is_ours = tensor.fake_mode is self and tensor.constant is None
        return is_ours and tensor.layout is torch.strided


_PLAIN = (int, float, str, torch.dtype, torch.device, type(None))


@contextmanager
def fake_tensors() -> Iterator[Callable[[], None]]:
    """Inside, tensors have shapes, dtypes and storages without memory.

    Yields:
        A function that makes the mode forget the tensors made so far: it keeps weak references to
        parameters, and a tensor with one cannot be swapped.
    """
    with FakeTensors() as mode:
        yield mode.fake_tensor_converter.meta_converter.tensor_memo.clear


def open_fake_group(world_size: int, rank: int = 0) -> None:
    """A process group in which this process is one rank, and no other exists."""
    from torch.testing._internal.distributed import fake_pg  # importing it registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_pg.FakeStore())


def is_plain_or_fake(cls: type) -> bool:
    """Whether tensors of a type have a storage of their own."""
    return cls in (torch.Tensor, torch.nn.Parameter) or issubclass(cls, FakeTensor)


def asks_for_device(operation: object) -> bool:
    """Whether an operation is no more than ``tensor.device``, which fake tensors dispatch."""
    return operation is _DEVICE


def device_of(tensor: Any) -> torch.device:
    """The answer to that, as the mode gives it: most operations of a plan are that question."""
    device: torch.device = tensor.fake_device
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else device


_DEVICE = torch.ops.prim.device.default
_MEAN_INTO = torch.ops.aten.mean.out  # of ranks' parts of a gradient
