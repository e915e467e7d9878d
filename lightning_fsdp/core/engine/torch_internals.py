"""Every private or renamed name of torch that the engine uses, one each, with the reason.

Checked against torch 2.13. A name that goes away is to be replaced here, and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.utils import _python_dispatch, checkpoint

# A tensor subclass that torch functions treat as a plain tensor and that acts only in dispatch.
disabled_torch_function = torch._C._disabled_torch_function_impl

# Methods of a process group, called directly: the checks of torch.distributed's functions around
# them take a twentieth of a step's work on the host. They are asynchronous, and the reduction is a
# sum. torch 2.13 renamed them.
_IS_RENAMED = hasattr(dist.ProcessGroup, "all_gather_single")
all_gather_in = attrgetter("all_gather_single" if _IS_RENAMED else "_allgather_base")
reduce_scatter_in = attrgetter("reduce_scatter_single" if _IS_RENAMED else "_reduce_scatter_base")


def skip_all_in_compiling(function: Any, below: Any = eval_frame._FrameAction.SKIP) -> Any:
    """Let the compiler skip a function that autograd or the dispatcher calls, and what it calls.

    A compiled function may call ``backward()``. Costs nothing where nothing is compiled. No public
    name: ``torch._dynamo.eval_frame.skip_code`` does this, but its module takes seconds to import.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, below)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Likewise a function that the model's code calls: a compiled caller's graph ends before it.

    ``torch.compiler.disable`` does the same by a function around it, which costs a call, and
    imports the compiler.
    """
    skip_all_in_compiling(function)._torchdynamo_disable = True
    return function


_SELECTIVE = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def beside_the_model(function: Any) -> Any:
    """As ``not_compiled``; and selective checkpointing does not see what the function does.

    It saves what operations of a part of the model return, by number, for when that part is
    recomputed. Which gathers and reductions start inside of it may differ then.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(_python_dispatch._get_current_dispatch_mode(), _SELECTIVE):
            return function(*args, **kwargs)
        with _python_dispatch._pop_mode_temporarily():
            return call(*args, **kwargs)

    return not_compiled(call)


# Lets it skip a function but not what that calls, as it does ``nn.Module.__call__``.
skip_in_compiling = functools.partial(skip_all_in_compiling, below=eval_frame._FrameAction.DEFAULT)

# Whether the running backward goes, or has gone, through a node. No public name.
runs_in_backward = torch._C._will_engine_execute_node


def profiled(step: str, name: str) -> AbstractContextManager[Any]:
    """A range in a profiler's trace; free if none runs, which no public name tells."""
    is_on = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.profiler.record_function(f"{step} {name}") if is_on else _NOTHING


def unrecorded() -> AbstractContextManager[Any]:
    """``no_grad``; free if gradients are off already, as in most backwards."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING: AbstractContextManager[Any] = nullcontext()


# Number of the backward that this thread runs, negative outside of one. A forward inside one is a
# recomputation (activation checkpointing). No public name.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


# Runs a function when the running backward has finished. No public name; DDP uses it too.
call_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback


def wrap_without_storage(
    cls: type[Tensor], shape: tuple[int, ...], like: Tensor, requires_grad: bool
) -> Tensor:
    """A tensor subclass with the dtype and device of ``like`` and no storage. No public name."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )
