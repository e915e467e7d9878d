"""The autograd leaf that stands in a module for a sharded parameter while its unit computes.

Outside of that time the memory behind a leaf is gone. Code that kept the leaf from inside a forward
(``self.kept = self.linear.weight``) must not read it: without memory most kernels would end the
process. So a leaf changes its class with its memory, and one without memory answers no operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.flat_buffer import FlatBuffer
from lightning_fsdp.core.layout import Slot
from lightning_fsdp.core.sharded_tensor import ShardedTensor, flatten

# What can be asked of a tensor without memory.
_ABOUT_NO_VALUE = {
    *("grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim"),
    *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size"),
}


class _FreedLeaf(nn.Parameter):
    _parameter: ShardedTensor

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):  # of a property, which knows its name
            name = func.__self__.__name__
        if name in _ABOUT_NO_VALUE:
            with torch_internals.without_torch_function():
                return func(*args, **(kwargs or {}))
        leaf = next(t for t in flatten(args, kwargs) if isinstance(t, cls))
        spec = leaf._parameter.spec
        where = f"parameter {spec.name!r} (rank {spec.communicator.mesh_rank})"
        raise RuntimeError(
            f"{where}: expected {name} inside the forward or backward of its unit, got it outside: "
            "somebody kept the weight that the module held in its forward, and its whole values "
            "were freed since. Use the parameter that module.parameters() gives now, or "
            "weights(module)[name].full()."
        )


def make_leaf(
    buffer: FlatBuffer, slot: Slot, parameter: ShardedTensor, hook: Callable[[Tensor], None]
) -> nn.Parameter:
    """A leaf over its place in ``buffer``: original shape, the buffer's dtype; frozen as yet.

    Args:
        buffer: Allocated.
        slot: The place.
        parameter: That it stands for.
        hook: Called with the leaf when its ``.grad`` is complete in a backward.
    """
    leaf = nn.Parameter(buffer.view(slot))
    leaf._parameter = parameter  # type: ignore[attr-defined]
    torch_internals.call_after_accumulation(leaf, hook)  # only what trains takes one
    leaf.requires_grad_(False)
    return leaf


def mark_whole(leaf: nn.Parameter) -> None:
    """Its memory is there."""
    if type(leaf) is _FreedLeaf:
        leaf.__class__ = nn.Parameter  # type: ignore[assignment]


def mark_freed(leaf: nn.Parameter) -> None:
    """Its memory is gone."""
    if type(leaf) is nn.Parameter:  # a leaf of another class (a fake tensor) has no real memory
        leaf.__class__ = _FreedLeaf
