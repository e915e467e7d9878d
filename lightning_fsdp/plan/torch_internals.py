"""Every private name of torch that the plan uses, one function each, with the reason.

Checked against torch 2.13. A name that goes away is to be replaced here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@contextmanager
def fake_tensors() -> Iterator[Callable[[], None]]:
    """Inside, tensors have shapes, dtypes and storages without memory.

    Yields:
        A function that makes the mode forget the tensors made so far: it keeps weak references to
        parameters, and a tensor with one cannot be swapped.
    """
    with FakeTensorMode() as mode:
        yield mode.fake_tensor_converter.meta_converter.tensor_memo.clear


def open_fake_group(world_size: int) -> None:
    """A process group in which this process is rank 0, and no other rank exists."""
    from torch.testing._internal.distributed import fake_pg  # importing it registers the backend

    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_pg.FakeStore())


def is_plain_or_fake(cls: type) -> bool:
    """Whether tensors of a type have a storage of their own."""
    return cls in (torch.Tensor, torch.nn.Parameter) or issubclass(cls, FakeTensor)


def asks_for_device(operation: object) -> bool:
    """Whether an operation is no more than ``tensor.device``, which fake tensors dispatch."""
    return operation is torch.ops.prim.device.default
