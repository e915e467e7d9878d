"""A model of peft, shown as it was before sharding.

peft itself says which tensors there are and what they are called; it is shown outlines (tensors
without memory) in the place of parameters, and values where it needs them.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.checkpoint.weights import Weight, weights_in
from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.engines.base import owner_of
from lightning_fsdp.engines.native import NativeEngine
from lightning_fsdp.engines.native_state import outlined

# Initial values that leave the base as it is; others (PiSSA, LoftQ) subtract from it.
BESIDE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")


def adapted_model_in(root: nn.Module) -> Any:
    """The one model of peft that this is or that is inside.

    Raises:
        ValueError: None, or several.
    """
    found = _models_of_peft(root)
    if len(found) != 1:
        raise ValueError(
            f"{type(root).__name__}: expected one model of peft (get_peft_model) inside, got "
            f"{list(found) or 'none'}. Give the PeftModel, or a module with one."
        )
    return next(iter(found.values()))


def adapted_model_over(model: nn.Module, root: nn.Module) -> Any:
    """The model of peft that is this one, or is around it, and inside ``root``; or ``None``."""
    found = _models_of_peft(root).values()
    return next((each for each in found if model in (each, each.get_base_model())), None)


def _models_of_peft(root: nn.Module) -> dict[str, Any]:
    peft = sys.modules.get("peft")  # who has such a model has imported it
    if peft is None:
        return {}
    return {name: m for name, m in root.named_modules() if isinstance(m, peft.PeftModel)}


def refuse_merged(adapted: nn.Module) -> None:
    """See that weights under adapters are without them.

    Raises:
        ValueError: peft has merged them, and will subtract again what it added.
    """
    for name, module in adapted.named_modules():
        if getattr(module, "merged_adapters", None):
            raise ValueError(
                f"{name!r}: expected adapters beside the weights under them, got merged ones, "
                "which would be subtracted from other weights. Call unmerge_adapter() first."
            )


def refuse_subtracted(adapted: Any) -> None:
    """See that weights under adapters are those of a base, as files hold them.

    Raises:
        NotImplementedError: peft subtracted initial adapters from them (PiSSA, LoftQ).
    """
    for name, config in adapted.peft_config.items():
        initial = getattr(config, "init_lora_weights", True)
        if initial not in BESIDE_BASE:
            raise NotImplementedError(
                f"adapter {name!r} (init_lora_weights={initial!r}): expected adapters that leave "
                "the weights under them as they are, got some that peft made from them, and may "
                "have subtracted. Load the base before get_peft_model."
            )


def names_under(adapted: Any, root: nn.Module) -> dict[str, str]:
    """What the weights under adapters are called in the model and in its base alone.

    Args:
        adapted: The model.
        root: It, or the module that was sharded.

    Returns:
        Names in the model, by those of the base.

    Raises:
        NotImplementedError: Of what peft would compute.
    """
    from peft.utils import ModulesToSaveWrapper

    with as_plain(adapted, root, weights_in(adapted, root)) as outlines:
        for name, module in list(adapted.named_modules()):
            if isinstance(module, ModulesToSaveWrapper):  # unloaded, it would be the trained one
                adapted.set_submodule(name, module.original_module)
        is_around = adapted.active_peft_config.is_prompt_learning
        base = adapted.get_base_model() if is_around else adapted.unload()
        return names_of(base, adapted, outlines)


def warn_of_what_peft_made(names: Collection[str]) -> None:
    """Say which of these names of adapters hold what peft made of the weights under them.

    Norms of DoRA, whole modules and rows of embeddings are copies: another base leaves them.
    """
    parts = (".lora_magnitude_vector.", ".modules_to_save.", ".trainable_tokens_delta.")
    made = [name for name in sorted(names) if any(part in name for part in parts)]
    if made and Ranks().rank == 0:
        warnings.warn(
            f"load_pretrained: {len(made)} tensors of the adapters, such as {made[0]!r}, stay what "
            "peft made of the weights before. Call load_adapters too; to start anew, load the base "
            "before get_peft_model.",
            stacklevel=3,
        )


def names_of(base: nn.Module, adapted: nn.Module, outlines: Mapping[str, Tensor]) -> dict[str, str]:
    """Names in the adapted model, by those of its base, which peft has freed of adapters.

    Raises:
        NotImplementedError: peft has made a tensor anew.
    """
    first = first_names(outlines)
    state = base.state_dict(keep_vars=True)
    for key, outline in state.items():
        if id(outline) not in first:
            raise NotImplementedError(
                f"{type(adapted).__name__}: expected adapters that leave the weights under them in "
                f"their place, got {key!r}, which peft makes anew. Merge after the fit, when the "
                "model is whole (merge_and_unload), and save that; load before sharding."
            )
    return {key: first[id(outline)] for key, outline in state.items()}


def first_names(outlines: Mapping[str, Tensor]) -> dict[int, str]:
    """The first name of each tensor, by its ``id``."""
    names: dict[int, str] = {}
    for name, outline in outlines.items():
        names.setdefault(id(outline), name)
    return names


@contextmanager
def as_plain(
    adapted: nn.Module, root: nn.Module, weights: Mapping[str, Weight]
) -> Iterator[dict[str, Tensor]]:
    """Inside, the model is as before sharding. What is done to its modules is undone.

    Args:
        adapted: The model.
        root: It, or the module that was sharded.
        weights: Of the model.

    Yields:
        Its state dict: parameters without memory, and its buffers.
    """
    with parts_as_plain([""], adapted, root, weights, {}):
        yield adapted.state_dict(keep_vars=True)


@contextmanager
def parts_as_plain(
    names: Collection[str],
    adapted: nn.Module,
    root: nn.Module,
    weights: Mapping[str, Weight],
    values: Mapping[int, Tensor],
) -> Iterator[None]:
    """Like :func:`as_plain`, of some modules of the model alone.

    For one layer after the other, so that merging takes time that grows with the model's size only.

    Args:
        names: Of these modules.
        adapted: The model.
        root: It, or the module that was sharded.
        weights: Of the model.
        values: By their identities, those that shall have values; all others are outlines.
    """
    engine = owner_of(root)
    parts = [(name, adapted.get_submodule(name)) for name in names]
    with ExitStack() as undone:
        if isinstance(engine, NativeEngine) and engine.parameters:
            undone.enter_context(outlined(engine))
        parameters: dict[int, nn.Parameter] = {}
        for module in dict.fromkeys(module for _, part in parts for module in part.modules()):
            undone.callback(_restore, module, type(module), dict(module.__dict__))
            # Also what peft appends to: which adapters are merged.
            containers = (dict, list, set)
            module.__dict__.update(
                {k: copy.copy(v) for k, v in module.__dict__.items() if isinstance(v, containers)}
            )
            # Sharding gives a module another class; files name the one that it was made of.
            module.__class__ = own_class(module)
        named = [
            item
            for name, part in parts
            for item in part.named_parameters(prefix=name, remove_duplicate=False)
        ]
        for name, parameter in named:
            known = weights[name]
            if known.identity not in parameters:
                value = values.get(known.identity)
                if value is None:
                    value = torch.empty(
                        known.outline.shape, dtype=known.outline.dtype, device="meta"
                    )
                parameters[known.identity] = nn.Parameter(value, parameter.requires_grad)
            owner, _, attribute = name.rpartition(".")
            setattr(adapted.get_submodule(owner), attribute, parameters[known.identity])
        yield


def leave_values_out(adapted: nn.Module) -> None:
    """Let ``merge_and_unload`` take adapters off a model that :func:`as_plain` shows, and no more.

    To compute what they add several kinds need values (RandLora, VB-LoRA, DeLoRA).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in adapted.modules():
        # A layer with a way of its own makes parameters anew, by which it is refused.
        has_own_way = hasattr(layer, "unload_and_optionally_merge_module")
        if isinstance(layer, BaseTunerLayer) and not has_own_way:
            layer.__dict__["merge"] = lambda *_, **__: None


def own_class(module: nn.Module) -> type[Any]:
    """The class that a module was made of."""
    return next(c for c in type(module).__mro__ if not issubclass(c, ShardedModule | FSDPModule))


def _restore(module: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> None:
    module.__class__ = cls
    module.__dict__.clear()
    module.__dict__.update(attributes)
