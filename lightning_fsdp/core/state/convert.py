"""Another main dtype for what is sharded already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, make_parameter
from lightning_fsdp.core.torch_internals import swap_tensors


def convert(flat_param: FlatParameter, dtype: torch.dtype) -> None:
    """Change the main dtype of shard, parameters and reduced gradients; the objects stay.

    Args:
        flat_param: Nobody holds its whole copy, and no gradient waits to be reduced.
        dtype: The one to be.
    """
    shard = flat_param.home.new_shard(flat_param.shard.numel(), dtype).copy_(flat_param.shard)
    for parameter in cast(Sequence[ShardedTensor], flat_param.parameters):
        gradient, parameter.grad = parameter.grad, None
        spec, marks = parameter.spec, dict(parameter.__dict__)
        converted = make_parameter(spec.part_of(shard), spec, parameter.requires_grad)
        converted.__dict__.update({**marks, **converted.__dict__, "_aliases": None})
        swap_tensors(parameter, converted)
        if isinstance(gradient, ShardedTensor):
            parameter.grad = ShardedTensor(gradient.to_local().to(dtype), spec)
    flat_param.take_in(shard)
