"""Models of transformers, from and to the folders that ``from_pretrained`` reads.

    save    whole tensors, one at a time: every rank takes part, rank 0 writes
    load    each rank reads the elements that it keeps, and nothing else

Any module may take the place of a model of transformers; it has no config that could be written.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fsdp.checkpoint import transformers_internals as conventions
from lightning_fsdp.checkpoint.adapted import (
    adapted_model_over,
    names_under,
    own_class,
    refuse_merged,
    refuse_subtracted,
    warn_of_what_peft_made,
)
from lightning_fsdp.checkpoint.adapters import merged
from lightning_fsdp.checkpoint.files import naming
from lightning_fsdp.checkpoint.matching import Differences, Names, read_matching, targets_in
from lightning_fsdp.checkpoint.new_folder import NewFolder
from lightning_fsdp.checkpoint.ranks import Ranks, words_for_ranks
from lightning_fsdp.checkpoint.safetensors_folder import (
    SafetensorsFolder,
    SafetensorsWriter,
    bytes_of,
)
from lightning_fsdp.checkpoint.weights import Weight, weights_in


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    merge_adapters: bool = False,
) -> None:
    """Write a folder that ``AutoModel.from_pretrained`` loads. Collective: every rank calls.

    Rank 0 holds one whole parameter at a time. The folder is there when all of it is.

    Args:
        model: Plain, or sharded by :func:`~lightning_fsdp.fully_shard` or torch's FSDP2; or a
            LightningModule around one model of transformers, under any strategy. Of another module
            there are the weights alone, without a config.
        directory: Does not exist yet, or is empty. On rank 0 alone.
        max_shard_size: Of a file's tensors, bytes or ``"5GB"``.
        tokenizer: Saved beside the model (``tokenizer.save_pretrained``).
        merge_adapters: Of a model of peft, the model under its adapters, with what they add to its
            weights; rank 0 merges one layer at a time. The model itself stays as it is.

    Raises:
        FileExistsError: There is something in the directory.
        OSError: It cannot be written.
        ValueError: A model that the format cannot hold, or several to choose from.
        NotImplementedError: Adapters that are not merged, and quantized weights.
    """
    folder, ranks = NewFolder(Path(directory)), Ranks()
    doing = f"save_pretrained {str(Path(directory))!r}{words_for_ranks(model.parameters())}"

    def prepare() -> tuple[int, _Plan]:
        return bytes_of(max_shard_size), (_plan_of_merged if merge_adapters else _plan_of)(model)

    max_bytes, plan = ranks.here(doing, prepare, f"{doing} with {merge_adapters=}")
    weights, stored = plan.weights, plan.stored

    def begin() -> list[list[str]]:
        opened.enter_context(folder)
        _write_configuration(plan, tokenizer, folder.beside)
        outlines = {key: weights[name].outline for key, name in stored.items()}
        writer = SafetensorsWriter(
            folder.beside, outlines, max_bytes=max_bytes, aliases=plan.aliases
        )
        writers.append(opened.enter_context(writer))
        return writer.groups

    with ExitStack() as opened:
        writers: list[SafetensorsWriter] = []
        groups = ranks.on_first(doing, begin)
        failure: Exception | None = None
        for key in (key for group in groups for key in group):
            whole = weights[stored[key]].whole()  # on every rank, also after a failure
            if writers and failure is None:
                try:
                    writers[0].write(key, whole)
                except Exception as error:  # noqa: BLE001 (the others are on their way)
                    failure = error
            del whole

        def finish() -> None:
            if failure is not None:
                raise failure
            writers[0].finish()
            folder.finish()

        ranks.on_first(doing, finish)


def load_pretrained(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    cast: bool = False,
) -> Differences:
    """Take the weights of a folder that transformers wrote. Collective: every rank calls.

    A rank reads the elements that it keeps, from the file to where they belong. Nothing is written
    before all names, shapes and dtypes were compared. Of a model of peft, the weights under its
    adapters are read, by the names that they have without; adapters stay as they are.

    Args:
        module: As for :func:`save_pretrained`, or with a model of peft; parameters have memory
            (they are plain, or sharded).
        directory: With ``model.safetensors``, or an index and the files that it names.
        strict: Every name of the module is in the folder and the other way round; but for those
            that ``from_pretrained`` does not mind.
        cast: Convert where the dtypes differ.

    Returns:
        What was left out, if it was not strict.

    Raises:
        OSError: The directory or a file is not there.
        ValueError: A damaged file; names, shapes or dtypes that differ; adapters that are merged
            into the weights. The module is unchanged.
        NotImplementedError: Weights that are stored in another form than the module's; adapters
            whose initial values were subtracted from the weights (PiSSA, LoftQ).
    """
    doing = f"load_pretrained {os.fspath(directory)!r}"
    model, targets = Ranks().here(doing, lambda: _to_load(module))
    is_pretrained = conventions.is_pretrained_model(model)

    def names_of(keys: Collection[str]) -> Names:
        if not is_pretrained:
            return Names({key: key for key in keys})
        in_module = conventions.names_in_module(model, keys, targets)
        return Names(
            in_module,
            [name for name in targets if conventions.may_be_missing(model, name)],
            [name for name in in_module.values() if conventions.may_be_left_over(model, name)],
        )

    return read_matching(
        doing,
        targets,
        lambda: SafetensorsFolder(Path(directory)),
        names_of,
        strict=strict,
        cast=cast,
    )


# -- the module ------------------------------------------------------------------------------------


def _model_in(module: nn.Module) -> nn.Module:
    """The model of transformers that this is or that is inside; or the module, if there is none."""
    names = {
        name: inner
        for name, inner in module.named_modules()
        if conventions.is_pretrained_model(inner)
    }
    outermost = {
        name: inner
        for name, inner in names.items()
        if not any(o != name and (o == "" or name.startswith(f"{o}.")) for o in names)
    }
    if len(outermost) > 1:
        raise ValueError(
            f"{type(module).__name__}: expected one model of transformers inside, got "
            f"{list(outermost)}. Give one of them."
        )
    return next(iter(outermost.values()), module)


def _to_load(module: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model that is loaded, and by its own names what its weights are read into."""
    model = _model_in(module)
    adapted = adapted_model_over(model, module)
    if adapted is None:
        conventions.refuse_adapters(model, module)
        conventions.refuse_quantized(model)
        return model, targets_in(model, module)
    base: nn.Module = adapted.get_base_model()
    conventions.refuse_quantized(base)
    refuse_merged(adapted)
    refuse_subtracted(adapted)
    targets, names = targets_in(adapted, module), names_under(adapted, module)
    warn_of_what_peft_made(targets.keys() - set(names.values()))
    return base, {own: targets[name] for own, name in names.items()}


# -- saving ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """What is written.

    Attributes:
        model: That the folder will be of.
        weights: By names in the module.
        stored: Names in the files -> names in the module.
        aliases: Further names -> names in the files.
        is_untied: Embeddings that the config ties are two.
    """

    model: nn.Module
    weights: Mapping[str, Weight]
    stored: Mapping[str, str]
    aliases: Mapping[str, str]
    is_untied: bool = False


def _plan_of(root: nn.Module) -> _Plan:
    model = _model_in(root)
    conventions.refuse_adapters(model, root)
    conventions.refuse_quantized(model)
    weights = weights_in(model, root)
    return _Plan(model, weights, *_layout_of(model, weights))


def _plan_of_merged(root: nn.Module) -> _Plan:
    with merged(root) as found:
        base = _model_in(found.base)
        conventions.refuse_quantized(base)
        layout = _layout_of(base, found.weights)
        return _Plan(base, found.weights, *layout, is_untied=found.is_untied)


def _layout_of(
    model: nn.Module, weights: Mapping[str, Weight]
) -> tuple[dict[str, str], dict[str, str]]:
    """Names in the files -> names in the module; and further names -> names in the files.

    Of the names of a tied tensor, that is stored which transformers looks for.
    """
    is_pretrained = conventions.is_pretrained_model(model)
    names = [n for n in weights if not is_pretrained or not conventions.is_left_out(model, n)]
    names_of: dict[int, list[str]] = {}
    for name in names:
        names_of.setdefault(weights[name].identity, []).append(name)
    copies_of_tied = conventions.copies_of_tied(model, names_of) if is_pretrained else ()
    kept = {
        identity: min(of_one, key=lambda name: name in copies_of_tied)
        for identity, of_one in names_of.items()
    }
    stored_as = {name: name for name in names}
    if is_pretrained:
        outlines = {name: torch.empty(weights[name].outline.shape, device="meta") for name in names}
        stored_as = conventions.names_in_files(model, outlines)
    stored = {stored_as[n]: n for n in names if kept[weights[n].identity] == n}
    copies = {stored_as[n]: stored_as[kept[weights[n].identity]] for n in names}
    return stored, {copy: key for copy, key in copies.items() if copy != key}


def _write_configuration(plan: _Plan, tokenizer: Any, path: Path) -> None:
    if tokenizer is not None:
        with naming("the tokenizer"):
            tokenizer.save_pretrained(path)
    model: Any = plan.model
    if not conventions.is_pretrained_model(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [own_class(model).__name__]
    if plan.is_untied:
        config.tie_word_embeddings = False
    dtypes = [w.outline.dtype for w in plan.weights.values() if w.outline.dtype.is_floating_point]
    if dtypes:
        config.dtype = str(dtypes[0]).removeprefix("torch.")
    with naming("config.json"):
        config.save_pretrained(path)
    if model.can_generate() and model.generation_config is not None:
        with naming("generation_config.json"):
            model.generation_config.save_pretrained(path)
