"""Give a sharded module back as it was: whole, plain parameters, the same objects, no hooks."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.hooks import remove_hooks
from lightning_fsdp.core.safety.recovery import abandon_unit
from lightning_fsdp.core.sharded_module import ShardedModule, units_in
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.autocast import forget_main_dtype
from lightning_fsdp.engines.on_host import one_per_host

_OWN_OF_TENSOR = ("_local", "spec", "_is_param", "gradient_hooks", "_aliases")


def give_back(module: nn.Module) -> None:
    """Undo :func:`~lightning_fsdp.shard_model`. Collective.

    Parameters stay the same objects, so that ties and optimizers hold; they end on the CPU, one at
    a time, as the whole module may be larger than the device, and once per host. Gradients are
    dropped.

    Raises:
        RuntimeError: A rank could not keep the values; raised on every rank. The module stays
            sharded.
    """
    units = list(units_in(module))
    for unit in units:
        abandon_unit(unit, drops_gradients=True)
    # A class may show some of them alone.
    sharded = [p for _, p in module.named_parameters() if isinstance(p, ShardedTensor)]
    values = one_per_host((i, p.full_tensor()) for i, p in enumerate(sharded))
    forget_main_dtype(module)
    for i, parameter in enumerate(sharded):
        _make_plain(parameter, values[i])
    for unit in units:  # a graph that somebody kept, as a loss has one, still refers to them
        for flat_param in unit.flat_params:
            flat_param.shard = flat_param.shard.new_empty(0)
    for inner in module.modules():
        torch_internals.allow_flattening(inner)
        if isinstance(inner, ShardedModule):
            inner.__class__ = type(inner).__mro__[2]
            torch_internals.leave_as_plain(inner)
        remove_hooks(inner)


def _make_plain(parameter: ShardedTensor, value: Tensor) -> None:
    marks = {k: v for k, v in parameter.__dict__.items() if k not in _OWN_OF_TENSOR}
    parameter.grad = None
    whole = nn.Parameter(value, requires_grad=parameter.requires_grad)
    whole.__dict__.update(marks)
    # torch.utils.swap_tensors raises where a weak reference is left, as a gradient that waited has.
    torch_internals.swap_tensors(parameter, whole)
    del whole.__dict__["_local"]  # leaves, which graphs refer to, have the same attributes
