"""Adapters of peft, out of shards: in peft's own files, or merged into the weights under them.

peft itself says which tensors there are and what they are called, and it merges; so that files are
the ones that it writes. It is shown the model as it was before sharding, with outlines (tensors
without memory) in the place of parameters, and with values where it needs them:

    adapters     names of outlines -> those are gathered -> peft writes them, on rank 0
    merged       outlines, merged and unloaded by peft -> names of the base model;
                 then one layer after the other with values, merged on rank 0
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp.checkpoint.new_folder import NewFolder
from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.checkpoint.weights import Weight, weights_in
from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.engines.base import owner_of
from lightning_fsdp.engines.native import NativeEngine
from lightning_fsdp.engines.native_state import outlined


def save_adapters(
    model: nn.Module, directory: str | os.PathLike[str], *, adapter_name: str = "default"
) -> None:
    """Write the folder that ``PeftModel.save_pretrained`` writes. Collective: every rank calls.

    ``PeftModel.from_pretrained(base, directory)`` reads it, in one process and before sharding; as
    with peft, adapters of another name than ``default`` are in a folder of that name.
    Rank 0 holds the adapter's tensors whole, and none of the base.

    Args:
        model: A ``PeftModel``, or a module around one; plain, or sharded by
            :func:`~lightning_fsdp.fully_shard` or torch's FSDP2, or a LightningModule under any
            strategy.
        directory: Does not exist yet, or is empty. On rank 0 alone.
        adapter_name: Which of the model's adapters.

    Raises:
        FileExistsError: There is something in the directory.
        OSError: It cannot be written.
        ValueError: No model of peft, several, or none with such an adapter.
        NotImplementedError: An adapter whose files hold other tensors than its modules.
    """
    adapted = adapted_model_in(model)
    if adapter_name not in adapted.peft_config:
        raise ValueError(
            f"save_adapters: expected the name of an adapter, one of "
            f"{sorted(adapted.peft_config)}, got {adapter_name!r}. Say adapter_name=."
        )
    if adapted.peft_config[adapter_name].is_prompt_learning:  # peft saves what a forward makes
        raise _computed(adapted, adapter_name, "embeddings of prompts")
    weights = weights_in(adapted, model)
    ranks = Ranks()
    doing = f"save_adapters {os.fspath(directory)!r}"
    with ExitStack() as opened:
        folders: list[NewFolder] = []

        def begin() -> list[str]:
            folders.append(opened.enter_context(NewFolder(Path(directory))))
            with _as_plain(adapted, model, weights) as outlines:
                return _names_of(adapted, adapter_name, outlines)

        names = ranks.on_first(doing, begin)
        wholes = {}
        for name in names:
            whole = weights[name].whole()
            if ranks.rank == 0:
                wholes[name] = whole.cpu()

        def finish() -> None:
            with _as_plain(adapted, model, weights) as outlines:
                adapted.save_pretrained(
                    str(folders[0].beside),
                    state_dict={**outlines, **wholes},
                    selected_adapters=[adapter_name],
                )
            folders[0].finish()

        ranks.on_first(doing, finish)


def _names_of(adapted: Any, adapter_name: str, outlines: Mapping[str, Tensor]) -> list[str]:
    """Names in the model of what peft would write.

    Raises:
        NotImplementedError: It would compute something.
    """
    from peft import get_peft_model_state_dict

    name_of = {id(outline): name for name, outline in outlines.items()}
    written = get_peft_model_state_dict(
        adapted, state_dict=dict(outlines), adapter_name=adapter_name
    )
    computed = [key for key, tensor in written.items() if id(tensor) not in name_of]
    if computed:
        raise _computed(adapted, adapter_name, repr(computed[0]))
    return list(dict.fromkeys(name_of[id(tensor)] for tensor in written.values()))


def _computed(adapted: Any, adapter_name: str, what: str) -> NotImplementedError:
    kind = adapted.peft_config[adapter_name].peft_type
    return NotImplementedError(
        f"save_adapters: expected an adapter whose files hold the tensors of its modules, got "
        f"{what} of {kind!s}, which peft computes. Save after the fit, when the model is whole, "
        "with its own save_pretrained."
    )


# -- merged ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """A model without its adapters.

    Attributes:
        base: Of transformers, perhaps.
        weights: By its own names; whole ones are merged.
        is_untied: An adapter has given values of their own to embeddings that were tied.
    """

    base: nn.Module
    weights: dict[str, Weight]
    is_untied: bool


@contextmanager
def merged(root: nn.Module) -> Iterator[Merged]:
    """Inside, the model of peft in a module looks like its base, without memory.

    Args:
        root: It, or a module around it.
    """
    adapted = adapted_model_in(root)
    weights = weights_in(adapted, root)
    with _as_plain(adapted, root, weights) as outlines:
        name_of: dict[int, str] = {}
        for name, outline in outlines.items():
            name_of.setdefault(id(outline), name)
        layers = _layers_over(adapted, name_of)
        base = adapted.merge_and_unload()
        state = base.state_dict(keep_vars=True)
        found: dict[str, Weight] = {}
        for key, outline in state.items():
            if id(outline) not in name_of:
                raise NotImplementedError(
                    f"{type(adapted).__name__}: expected adapters that are merged into the weights "
                    f"under them, got {key!r}, which peft makes anew. Merge after the fit, when "
                    "the model is whole (merge_and_unload), and save that."
                )
            name = name_of[id(outline)]
            whole = weights[name].whole
            if name in layers:
                whole = partial(_merge, adapted, root, weights, name, layers[name])
            found[key] = Weight(weights[name].outline, id(outline), whole)
        yield Merged(base, found, _are_untied(base, state))


def _layers_over(adapted: nn.Module, name_of: Mapping[int, str]) -> dict[str, list[str]]:
    """The names of adapters' layers, by the name of the parameter that they are merged into."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, list[str]] = {}
    for layer_name, layer in adapted.named_modules():
        if isinstance(layer, BaseTunerLayer):
            for parameter in layer.get_base_layer().parameters(recurse=False):
                layers.setdefault(name_of[id(parameter)], []).append(layer_name)
    return layers


def _merge(
    adapted: Any, root: nn.Module, weights: Mapping[str, Weight], name: str, layers: list[str]
) -> Tensor:
    """A parameter of the base with what adapters add to it, on rank 0. Collective."""
    inside = [n for n in weights if any(n.startswith(f"{layer}.") for layer in layers)]
    wholes = {weights[n].identity: weights[n].whole() for n in (name, *inside)}
    if Ranks().rank != 0:
        return wholes[weights[name].identity]
    # Plain tensors, and sharded ones of a single rank, are the model's own, and peft adds in place.
    copies = {identity: whole.clone() for identity, whole in wholes.items()}
    with _as_plain(adapted, root, weights, copies) as values, torch.no_grad():
        for layer in layers:
            adapted.get_submodule(layer).merge()
        return values[name].detach()


def _are_untied(base: Any, state: Mapping[str, Tensor]) -> bool:
    tied = getattr(base, "all_tied_weights_keys", {})
    return any(a in state and b in state and state[a] is not state[b] for a, b in tied.items())


# -- the model -------------------------------------------------------------------------------------


def adapted_model_in(root: nn.Module) -> Any:
    """The one model of peft that this is or that is inside.

    Raises:
        ValueError: None, or several.
    """
    peft = sys.modules.get("peft")  # who has such a model has imported it
    found = [
        (name, module)
        for name, module in root.named_modules()
        if peft is not None and isinstance(module, peft.PeftModel)
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(root).__name__}: expected one model of peft (get_peft_model) inside, got "
            f"{[name for name, _ in found] or 'none'}. Give the PeftModel, or a module with one."
        )
    return found[0][1]


@contextmanager
def _as_plain(
    adapted: nn.Module,
    root: nn.Module,
    weights: Mapping[str, Weight],
    values: Mapping[int, Tensor] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Inside, the model is as before sharding. What is done to its modules is undone.

    Args:
        adapted: The model.
        root: It, or the module that was sharded.
        weights: Of the model.
        values: By their identities, those that shall have values; all others are outlines.

    Yields:
        Its state dict: parameters without memory, or with those values, and its buffers.
    """
    engine = owner_of(root)
    values = values or {}
    with ExitStack() as undone:
        if isinstance(engine, NativeEngine) and engine.parameters:
            undone.enter_context(outlined(engine))
        parameters: dict[int, nn.Parameter] = {}
        for module in list(adapted.modules()):
            undone.callback(_restore, module, type(module), dict(module.__dict__))
            # Also what peft appends to: which adapters are merged.
            containers = (dict, list, set)
            module.__dict__.update(
                {k: copy.copy(v) for k, v in module.__dict__.items() if isinstance(v, containers)}
            )
            # Sharding gives a module another class; files name the one that it was made of.
            module.__class__ = own_class(module)
        for name, parameter in list(adapted.named_parameters(remove_duplicate=False)):
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
        yield adapted.state_dict(keep_vars=True)


def own_class(module: nn.Module) -> type[Any]:
    """The class that a module was made of."""
    return next(c for c in type(module).__mro__ if not issubclass(c, ShardedModule | FSDPModule))


def _restore(module: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> None:
    module.__class__ = cls
    module.__dict__.clear()
    module.__dict__.update(attributes)
