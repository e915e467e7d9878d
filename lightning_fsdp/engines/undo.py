"""Give a sharded module back as it was: whole, plain parameters, the same objects, no hooks."""

from __future__ import annotations

from torch import nn

from lightning_fsdp.core import torch_internals
from lightning_fsdp.core.engine.hooks import detach
from lightning_fsdp.core.safety.recovery import abandon
from lightning_fsdp.core.sharded_module import ShardedModule, units_in
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.engines.autocast import forget_main_dtype

_OWN_OF_TENSOR = ("_local", "spec", "_is_param", "gradient_hooks", "_aliases")


def give_back(module: nn.Module) -> None:
    """Undo :func:`~lightning_fsdp.shard_model`. Collective.

    Parameters stay the same objects, so that ties and optimizers hold; they end on the CPU, one at
    a time, as the whole module may be larger than the device. Gradients are dropped.
    """
    forget_main_dtype(module)
    for unit in units_in(module):
        abandon(unit, drops_gradients=True)
    for inner in module.modules():
        torch_internals.detach_flat_weights(inner)
    for _, parameter in module.named_parameters():  # a class may show some of them alone
        if isinstance(parameter, ShardedTensor):
            _make_plain(parameter)
    for inner in module.modules():
        torch_internals.attach_flat_weights(inner)
        if isinstance(inner, ShardedModule):
            inner.__class__ = type(inner).__mro__[2]
            torch_internals.leave_as_plain(inner)
        detach(inner)


def _make_plain(parameter: ShardedTensor) -> None:
    marks = {k: v for k, v in parameter.__dict__.items() if k not in _OWN_OF_TENSOR}
    parameter.grad = None
    whole = nn.Parameter(parameter.full_tensor().cpu(), requires_grad=parameter.requires_grad)
    whole.__dict__.update(marks)
    # torch.utils.swap_tensors raises where a weak reference is left, as a gradient that waited has.
    torch_internals.swap_tensors(parameter, whole)
