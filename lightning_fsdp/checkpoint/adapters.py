"""Adapters of peft: to and from peft's own files, or merged into the weights under them.

peft itself says which tensors there are and what they are called, and it merges; so that files are
the ones that it writes. It is shown the model as it was before sharding, with outlines (tensors
without memory) in the place of parameters, and with values where it needs them:

    saved        names of outlines -> those are gathered -> peft writes them, on rank 0
    loaded       names of outlines -> each rank reads what it keeps of those
    merged       outlines, merged and unloaded by peft -> names of the base model;
                 then one layer after the other with values, merged on rank 0
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fsdp.checkpoint.adapted import (
    BESIDE_BASE,
    adapted_model_in,
    as_plain,
    first_names,
    leave_values_out,
    names_of,
    parts_as_plain,
    refuse_merged,
)
from lightning_fsdp.checkpoint.matching import Names, read_matching, targets_in
from lightning_fsdp.checkpoint.new_folder import NewFolder
from lightning_fsdp.checkpoint.ranks import Ranks, words_for_ranks
from lightning_fsdp.checkpoint.safetensors_folder import SafetensorsFolder
from lightning_fsdp.checkpoint.weights import Weight, weights_in

_FILE = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"


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
    ranks = Ranks()
    doing = f"save_adapters {os.fspath(directory)!r}{words_for_ranks(model.parameters())}"
    find = partial(_adapted_with, "save_adapters", model, adapter_name)
    adapted = ranks.here(doing, find, f"{doing} with {adapter_name=}")
    weights = weights_in(adapted, model)
    folder = NewFolder(Path(directory))
    with ExitStack() as opened:

        def begin() -> list[str]:
            opened.enter_context(folder)
            with as_plain(adapted, model, weights) as outlines:
                found = _names_in_files("save_adapters", adapted, adapter_name, outlines)
                return list(dict.fromkeys(found.values()))

        names = ranks.on_first(doing, begin)
        wholes = {}
        for name in names:
            whole = weights[name].whole()
            if ranks.rank == 0:
                wholes[name] = whole.cpu()

        def finish() -> None:
            with as_plain(adapted, model, weights) as outlines:
                first = first_names(outlines)  # of a tied weight, which peft knows by any name
                named = {name: wholes.get(first[id(t)], t) for name, t in outlines.items()}
                adapted.save_pretrained(
                    str(folder.beside),
                    state_dict=named,
                    selected_adapters=[adapter_name],
                )
            folder.finish()

        ranks.on_first(doing, finish)


def load_adapters(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapter_name: str = "default",
    cast: bool = False,
) -> None:
    """Take adapters that peft or :func:`save_adapters` wrote. Collective: every rank calls.

    A rank reads the elements that it keeps. The base stays as it is. Nothing is written before
    configuration, names, shapes and dtypes were compared.

    Args:
        model: As for :func:`save_adapters`; parameters have memory (they are plain, or sharded).
        directory: With ``adapter_model.safetensors`` and ``adapter_config.json``. On every rank.
        adapter_name: Which of the model's adapters; any may have been saved.
        cast: Convert where the dtypes differ.

    Raises:
        OSError: The directory or a file is not there.
        ValueError: No model of peft, several, or none with such an adapter; one that is merged into
            its base; a damaged file; adapters of another kind, rank, scale or other targets, or
            other names, shapes or dtypes. The model is unchanged.
        NotImplementedError: An adapter whose files hold other tensors than its modules.
    """

    def find() -> tuple[Any, dict[str, str], dict[str, str]]:
        adapted = _adapted_with("load_adapters", model, adapter_name)
        refuse_merged(adapted)
        with as_plain(adapted, model, weights_in(adapted, model)) as outlines:
            needed, known = (
                _names_in_files("load_adapters", adapted, adapter_name, outlines, embeddings=also)
                for also in (False, _has_embeddings(adapted))
            )
        return adapted, needed, known

    doing = f"load_adapters {os.fspath(directory)!r}"
    adapted, needed, known = Ranks().here(doing, find, f"load_adapters with {adapter_name=}")
    places = set(known.values())
    path, config = Path(directory), adapted.peft_config[adapter_name]
    targets = {name: t for name, t in targets_in(adapted, model).items() if name in places}

    def names_of_keys(keys: Collection[str]) -> Names:
        other = f"the adapters belong to a model with other targets{_compare(path, config)}"
        cures = {"missing": other, "without": other, "of another shape": "their base is another"}
        in_module = {key: known.get(key, key) for key in keys}
        return Names(in_module, places - set(needed.values()), cures=cures)

    read_matching(
        doing, targets, lambda: SafetensorsFolder(path, single=_FILE), names_of_keys, cast=cast
    )


def _adapted_with(caller: str, model: nn.Module, adapter_name: str) -> Any:
    adapted = adapted_model_in(model)
    if adapter_name not in adapted.peft_config:
        raise ValueError(
            f"{caller}: expected the name of an adapter, one of {sorted(adapted.peft_config)}, got "
            f"{adapter_name!r}. Say adapter_name=."
        )
    if adapted.peft_config[adapter_name].is_prompt_learning:  # peft saves what a forward makes
        raise _computed(caller, adapted, adapter_name, "embeddings of prompts")
    return adapted


def _names_in_files(
    caller: str,
    adapted: Any,
    adapter_name: str,
    outlines: Mapping[str, Tensor],
    *,
    embeddings: bool | Literal["auto"] = "auto",
) -> dict[str, str]:
    """Names in the model of what peft would write, by their names in the file.

    Raises:
        NotImplementedError: It would compute something.
    """
    from peft import get_peft_model_state_dict

    first = first_names(outlines)
    written = get_peft_model_state_dict(
        adapted, dict(outlines), adapter_name, save_embedding_layers=embeddings
    )
    computed = [key for key, tensor in written.items() if id(tensor) not in first]
    if computed:
        raise _computed(caller, adapted, adapter_name, repr(computed[0]))
    return {key: first[id(tensor)] for key, tensor in written.items()}


def _has_embeddings(adapted: Any) -> bool:
    """Whether peft may have written embeddings beside the adapters; it does where they grew."""
    return hasattr(adapted.get_base_model(), "get_input_embeddings")


def _computed(caller: str, adapted: Any, adapter_name: str, what: str) -> NotImplementedError:
    kind = adapted.peft_config[adapter_name].peft_type
    return NotImplementedError(
        f"{caller}: expected an adapter whose files hold the tensors of its modules, got {what} of "
        f"{kind!s}, which peft computes. Save after the fit, when the model is whole, with its own "
        "save_pretrained; load before sharding, with its own from_pretrained."
    )


# -- configuration ---------------------------------------------------------------------------------

# Which modules have adapters: may be said in several ways, so that names of tensors decide.
_WHERE = {
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
}
# What a forward in evaluation does not depend on.
_ELSE = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "lora_dropout",
    "init_ia3_weights",
    "eva_config",
}


def _compare(path: Path, config: Any) -> str:
    """Compare a folder's configuration with that of an adapter.

    Returns:
        How they choose modules, where that differs: for an error about names.

    Raises:
        FileNotFoundError: There is none.
        ValueError: They differ.
    """
    from peft import PeftConfig

    if not (path / _CONFIG).is_file():
        raise FileNotFoundError(
            f"{path}: expected a folder with {_FILE} and {_CONFIG}, got no {_CONFIG} there. Give "
            "the folder that save_adapters or save_pretrained of peft wrote."
        )
    stored = PeftConfig.from_pretrained(str(path))
    if stored.peft_type != config.peft_type:
        others = [
            f"peft_type: {stored.peft_type.value} in the files, {config.peft_type.value} here"
        ]
        where = []
    else:
        both = [_fields(each) for each in (stored, config)]
        differing = [
            (name, f"{name}: {value!r} in the files, {both[1][name]!r} here")
            for name, value in both[0].items()
            if value != both[1][name]
        ]
        where = [text for name, text in differing if name in _WHERE]
        others = [text for name, text in differing if name not in _WHERE]
    if others:
        raise ValueError(
            f"expected the adapters of the model, got others: {'; '.join(others)}. Build the model "
            "with the configuration in the folder (PeftConfig.from_pretrained)."
        )
    return f", {'; '.join(where)}" if where else ""


def _fields(config: Any) -> dict[str, Any]:
    """What of a configuration says which function an adapter computes, and where."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if fields.get("init_lora_weights") in BESIDE_BASE:
        fields["init_lora_weights"] = True
    return {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in fields.items()
        if name not in _ELSE
    }


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
    with as_plain(adapted, root, weights) as outlines:
        layers = _layers_over(adapted, first_names(outlines))
        leave_values_out(adapted)
        base = adapted.merge_and_unload()
        state = base.state_dict(keep_vars=True)
        found: dict[str, Weight] = {}
        for key, name in names_of(base, adapted, outlines).items():
            whole = weights[name].whole
            if name in layers:
                whole = partial(_merge, adapted, root, weights, name, layers[name])
            found[key] = Weight(weights[name].outline, id(state[key]), whole)
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
    parts = {name.rpartition(".")[0], *layers}
    with parts_as_plain(parts, adapted, root, weights, copies), torch.no_grad():
        for layer in layers:
            adapted.get_submodule(layer).merge()
        result: Tensor = adapted.get_parameter(name)  # it may be a new one
        return result.detach()


def _are_untied(base: Any, state: Mapping[str, Tensor]) -> bool:
    tied = getattr(base, "all_tied_weights_keys", {})
    return any(a in state and b in state and state[a] is not state[b] for a, b in tied.items())
