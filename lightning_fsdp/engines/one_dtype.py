"""Which modules torch's engines have to gather by themselves, because a unit has one dtype only.

FSDP(block)           bf16, frozen
  q_proj.base_layer
  FSDP(lora_A)        fp32, trained: gathered alone
  FSDP(lora_B)

FSDP1 flattens parameters of one dtype. FSDP2 reduces gradients of one dtype: there, frozen
parameters may have another, and these adapters stay in their block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from lightning_fsdp.core.grouping import UnitPlan, plan_units
from lightning_fsdp.units import has_forward

_FSDP2 = ", or fsdp2_zero3, where frozen ones may have another"


def of_other_dtypes(
    root: nn.Module, units: Sequence[Sequence[nn.Module]], *, trained_only: bool = False
) -> list[nn.Module]:
    """Modules whose parameters are not of the dtype that most elements around them have.

    Args:
        root: The whole model.
        units: Modules inside it that are gathered together, inner ones first.
        trained_only: Frozen parameters may have any dtype (FSDP2).

    Raises:
        NotImplementedError: Such parameters are in a module that cannot be gathered alone.
    """
    named = [("", list(modules)) for modules in units if root not in modules]
    plans = plan_units(root, [*named, ("", [root])], set(), set())
    found = (module for plan in plans for module in _inside(plan, trained_only))
    return list(dict.fromkeys(found))


def _inside(plan: UnitPlan, trained_only: bool) -> list[nn.Module]:
    counted = {p: sites for p, sites in plan.sites.items() if p.requires_grad or not trained_only}
    counts: Counter[torch.dtype] = Counter()
    for parameter in counted:
        counts[parameter.dtype] += parameter.numel()
    main = max(counts, key=counts.__getitem__, default=None)
    found = []
    for parameter, sites in counted.items():
        for module in (site.module for site in sites if parameter.dtype != main):
            # Torch's own layers are read by nobody but their forward; DoRA's read each other.
            kind = type(module)
            is_layer = kind.__module__.startswith("torch.nn.") and has_forward(module)
            dtypes = {inner.dtype for inner in module.parameters()}
            if not is_layer or len(sites) > 1 or dtypes != {parameter.dtype}:
                engine, others = ("FSDP2", "") if trained_only else ("FSDP1", _FSDP2)
                raise NotImplementedError(
                    f"{engine}: expected one dtype in the unit of {plan.names[parameter]!r}, got "
                    f"{main} and, in a {kind.__name__}, which cannot be gathered alone, "
                    f"{parameter.dtype}. Give both one dtype (peft: autocast_adapter_dtype=False), "
                    f"or use scratch_fsdp{others}."
                )
            found.append(module)
    return found
