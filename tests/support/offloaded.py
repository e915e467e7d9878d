"""Counters of what offloading moves."""

import torch

from lightning_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
)
from lightning_fsdp.core.sharded_module import units_in

POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
    "bf16 reduce": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
CLIP = (0.3, 2.0)  # below the norms here


def flat_params_of(model):
    return list(dict.fromkeys(s for unit in units_in(model) for s in unit.flat_params))


def stages_of(flat_param):
    """How many stages of its reduction are to come (the copy is the last); ``None``: it landed."""
    return None if flat_param._reduction is None else len(flat_param._stages)
