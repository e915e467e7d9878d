"""Which modules FSDP1 has to wrap by themselves, because it flattens parameters of one dtype only.

FSDP(block)           bf16, frozen
  q_proj.base_layer
  FSDP(lora_A)        fp32, trained: gathered alone
  FSDP(lora_B)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from lightning_fsdp.core.grouping import UnitPlan, is_container, plan_units


def of_other_dtypes(root: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules whose parameters are not of the dtype that most elements around them have.

    Args:
        root: The whole model.
        units: Modules inside it that are wrapped, inner ones first.

    Raises:
        NotImplementedError: Such parameters are in a module that cannot be wrapped alone.
    """
    named = [("", [unit]) for unit in units if unit is not root]
    plans = plan_units(root, [*named, ("", [root])], set(), set())
    return list(dict.fromkeys(module for plan in plans for module in _inside(plan)))


def _inside(plan: UnitPlan) -> list[nn.Module]:
    counts: Counter[torch.dtype] = Counter()
    for parameter in plan.sites:
        counts[parameter.dtype] += parameter.numel()
    (main, _), *others = counts.most_common()
    found = []
    for parameter, sites in plan.sites.items() if others else ():
        for module in (site.module for site in sites if parameter.dtype != main):
            # Torch's own layers are read by nobody but their forward; DoRA's read each other.
            kind = type(module)
            is_layer = kind.__module__.startswith("torch.nn.") and not is_container(module)
            if not is_layer or {inner.dtype for inner in module.parameters()} != {parameter.dtype}:
                raise NotImplementedError(
                    f"FSDP1: expected one dtype in the unit of {plan.names[parameter]!r}, got "
                    f"{main} and, in a {kind.__name__}, which cannot be gathered alone, "
                    f"{parameter.dtype}. Give both one dtype (peft: autocast_adapter_dtype=False), "
                    "or use scratch_fsdp or fsdp2."
                )
            found.append(module)
    return found
