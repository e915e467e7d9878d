"""What was kept of a whole copy beyond its time raises an error instead of crashing the process.

Code can keep a leaf (``self.kept = self.linear.weight``), a view of it or a numpy array from inside
a forward, and a backward can reach a unit through a tensor that is neither an output of it nor a
loss that it keeps. Without memory most kernels would follow a null pointer. So a leaf changes its
class with its memory, and one without memory refuses every operation; a storage without memory
raises at every access.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.home import FlatBuffer
from lightning_fsdp.core.engine.sharded import ShardSpec
from lightning_fsdp.core.engine.structures import tensors_in
from lightning_fsdp.core.engine.watcher import Watcher

_log = logging.getLogger(__name__)

# What can be asked of a leaf without memory, as it needs no values.
_ABOUT_NO_VALUE = {
    *("grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim"),
    *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size"),
}


class _FreedLeaf(nn.Parameter):
    """A leaf without memory: whatever needs its values raises, and names the parameter."""

    spec: ShardSpec

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):  # an attribute is read or set: its property has the name
            name = func.__self__.__name__
        if name in _ABOUT_NO_VALUE:
            with torch_internals.without_torch_function():
                return func(*args, **(kwargs or {}))
        leaf = next(t for t in tensors_in((args, kwargs)) if isinstance(t, cls))
        where = f"parameter {leaf.spec.name!r} (rank {leaf.spec.communicator.mesh_rank})"
        raise RuntimeError(
            f"{where}: expected {name} inside the forward or backward of its unit, got it outside: "
            "somebody kept the weight that the module held in its forward, and its whole values "
            "were freed since. Let the forward return weight.clone(), which trains it. To read it, "
            "use the parameter that module.parameters() gives now, or weights(module)[name].full()."
        )


_FLAGS = "_lightning_fsdp_access_flags"  # attribute of a flat buffer's tensor


class FreedMemory(Watcher):
    """Refuses what would read whole copies that were freed, or never see them gathered."""

    def __init__(self) -> None:
        # Those whose memory a numpy array shares: each is warned of once.
        self._warned: weakref.WeakSet[FlatParameter] = weakref.WeakSet()

    def on_pass(self) -> None:
        """A forward begins.

        Raises:
            NotImplementedError: A transform of ``torch.func`` is to see its gradients.
        """
        if torch_internals.current_transform() is not None and torch.is_grad_enabled():
            raise NotImplementedError(
                "call of a sharded module: expected none inside of a transform of torch.func, got "
                "one, which does not see that weights are gathered and gradients reduced. Use "
                "torch.autograd.grad or torch.autograd.functional; vmap under torch.no_grad()."
            )

    def before_whole(self, flat_param: FlatParameter) -> None:
        """The memory comes back."""
        _set_access(flat_param.buffer, refused=False)
        for leaf in flat_param.leaves:
            if type(leaf) is _FreedLeaf:
                leaf.__class__ = nn.Parameter  # type: ignore[assignment]

    def on_freed(self, flat_param: FlatParameter) -> None:
        """The memory is gone.

        Raises:
            RuntimeError: A forward has assigned another tensor to the ``.data`` of a weight.
        """
        with_memory = []
        for leaf, parameter in zip(flat_param.leaves, flat_param.parameters, strict=True):
            if type(leaf) is nn.Parameter:  # one of another class (a fake tensor) has no memory
                if leaf.untyped_storage().nbytes() > 0:
                    with_memory.append(parameter.spec)
                leaf.__dict__ = parameter.__dict__  # what a user sets on either, both have
                leaf.__class__ = _FreedLeaf
        _set_access(flat_param.buffer, refused=True)
        for spec in with_memory:
            self._explain_memory(flat_param, spec)

    def _explain_memory(self, flat_param: FlatParameter, spec: ShardSpec) -> None:
        """Say why a leaf still has memory after the whole copy was freed.

        Raises:
            RuntimeError: It has another tensor's, which a forward has assigned to ``.data``.
        """
        if flat_param.buffer.flat.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"parameter {spec.name!r} (rank {spec.communicator.mesh_rank}): expected it to be "
                "written to in place, got another tensor for its .data, assigned inside of a "
                "forward, which no gather fills. Write between forwards, with copy_ under "
                "torch.no_grad()."
            )
        if flat_param not in self._warned:
            self._warned.add(flat_param)
            _log.warning(
                "unit %r (rank %d): expected no numpy array of a weight taken inside its forward, "
                "got one, which shares the memory: the whole parameters stay allocated from now "
                "on. Take the array of a copy (weight.detach().clone().numpy()).",
                flat_param.name,
                flat_param.communicator.mesh_rank,
            )


def _set_access(buffer: FlatBuffer, *, refused: bool) -> None:
    attributes = buffer.flat.__dict__
    if _FLAGS not in attributes:
        attributes[_FLAGS] = torch_internals.access_flags(buffer.flat)
    if (flags := attributes[_FLAGS]) is not None:
        flags[0] = flags[2] = refused
