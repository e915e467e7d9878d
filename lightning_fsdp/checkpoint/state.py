"""What of a run goes where in a folder, and back out of it.

    tensor "model.<name>"                  a parameter or buffer
    tensor "optimizer.<i>.<name>.<key>"    state of a parameter's shape, of the i-th optimizer
    tensor "<other>.<name>"                of another state dict of slices (an average of weights)
    extra["tensors_of"]["state_dict"]      name in the state dict -> name in the folder
    extra["optimizer_states"][i]           groups, and all other state of parameters, by name;
                                           what is the optimizer's own, as it is
    extra[...]                             everything else, as it was given

Everything goes by original names, so that whoever reads may shard in another way. Tied parameters
are one tensor. What is whole on each rank (buffers, parameters that nobody sharded) is written by
rank 0.

Note: two passes. ``ShardedState.of_module`` and :func:`optimizer_state` collect live tensors,
without a copy or communication; a Trainer's hooks may edit what they give; then :func:`write`.
Reading is the same backwards: :func:`read_extra`, hooks, :func:`read_module` and
:func:`read_optimizers`, which read one checkpoint that is verified once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fsdp.checkpoint import folder
from lightning_fsdp.checkpoint.background import Saving
from lightning_fsdp.checkpoint.ranks import Ranks
from lightning_fsdp.checkpoint.torch_internals import EXTRA_STATE
from lightning_fsdp.core.engine.structures import map_tensors
from lightning_fsdp.core.optimizers.owned import Owned
from lightning_fsdp.core.tensors.flat_chunks import FlatChunks, note_writing
from lightning_fsdp.engines.flat_piece import FlatPiece
from lightning_fsdp.engines.owned_state import owned_by_number
from lightning_fsdp.engines.sharded_state import ShardedState, names_in, split_own_state

TENSORS_OF = "tensors_of"
# Of names in the folder; other state dicts have their own name. No two are the same, whatever a
# user calls one.
PREFIXES = {"state_dict": "model", "model": "state_dict", "optimizer": "optimizer_states"}
_SOURCE = "_saved_under"  # on a tensor without memory: checkpoint and name of what it stands for
_OF_FOLDERS = {"slices", "own", "saved_under"}  # in a saved optimizer, beside what torch has
# Of torch's ``checkpoint_wrapper``, in names of parameters, but not in those of a state dict.
_WRAPPED = "_checkpoint_wrapped_module."


# -- writing ---------------------------------------------------------------------------------------


def optimizer_state(state: ShardedState, optimizer: Optimizer, index: int = 0) -> dict[str, Any]:
    """One optimizer's state by original names. No communication.

    Args:
        state: Of the module.
        optimizer: Over its parameters.
        index: Of the optimizer, for messages.

    Returns:
        ``slices``: per parameter, live tensors of its shape. ``state``: per parameter, the rest.
        ``own``: entries of no parameter. ``param_groups``: as torch has them, with names for
        ``params``. What else is in the state dict, as it is.

    Raises:
        ValueError: It holds a parameter that is not in the module.
    """
    packed = optimizer.state_dict()
    if "state" not in packed:  # what Lightning puts where configure_optimizers returns None
        return dict(packed)
    owners = _owners(state, optimizer)

    def slice_of(name: str, key: str, value: Any) -> Tensor | None:
        return _all_of(value) if name in owners else state.slice_of(name, key, value)

    return by_name(packed, names_in(state, optimizer, index), slice_of)


def by_name(
    packed: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    slice_of: Callable[[str, str, Any], Any],
) -> dict[str, Any]:
    """A state dict of torch by names, as :func:`optimizer_state` returns it.

    Args:
        packed: By the places of parameters.
        groups: Their names.
        slice_of: What to have in the place of a parameter's state, by its name and the key; of
            what is no tensor of its shape, ``None``.
    """
    names = [name for group in groups for name in group]
    slices, others = defaultdict[str, dict[str, Any]](dict), defaultdict[str, dict[str, Any]](dict)
    of_parameters, own = split_own_state(packed["state"])
    for number, values in of_parameters.items():
        for key, value in values.items():
            part = slice_of(names[number], key, value)
            if part is not None:
                slices[names[number]][key] = part
            else:
                others[names[number]][key] = value
    named = zip(packed["param_groups"], groups, strict=True)
    return {
        **packed,
        "slices": dict(slices),
        "state": dict(others),
        "own": own,
        "param_groups": [{**group, "params": list(mine)} for group, mine in named],
    }


def write(path: str | PathLike[str], checkpoint: Mapping[str, Any]) -> None:
    """Write a folder. Collective.

    Args:
        path: Of the folder.
        checkpoint: ``state_dict`` of :meth:`ShardedState.of_module`, edited perhaps;
            ``optimizer_states`` of :func:`optimizer_state`, or none; other state dicts with slices;
            of all else, that of rank 0 is kept.
    """
    folder.save(path, *_taken_apart(checkpoint))


def write_in_background(path: str | PathLike[str], checkpoint: Mapping[str, Any]) -> Saving:
    """As :func:`write`; returns when this rank's part is copied. Collective."""
    return folder.async_save(path, *_taken_apart(checkpoint))


def _taken_apart(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and extra, as in the table above. Collective."""
    tensors: dict[str, Tensor] = {}
    extra = dict(checkpoint)
    tensors_of: dict[str, dict[str, str]] = {}
    for part, state in checkpoint.items():
        if part != "state_dict" and not _holds_slices(state):
            continue
        prefix = PREFIXES.get(part, part)
        saved_under: dict[int, str] = {}  # tied parameters are one object
        tensors_of[part], extra[part] = {}, {}
        for name, value in state.items():
            if is_slot(name, value):
                key = saved_under.setdefault(id(value), f"{prefix}.{name}")
                tensors[key] = _written_once(value)
                tensors_of[part][name] = key
            else:
                extra[part][name] = value
    if "optimizer_states" in checkpoint:
        for index, state in enumerate(checkpoint["optimizer_states"]):
            for name, of_parameter in state.get("slices", {}).items():
                for key, value in of_parameter.items():
                    tensors[f"optimizer.{index}.{name}.{key}"] = _written_once(value)
        extra["optimizer_states"] = _of_all_ranks(checkpoint["optimizer_states"])
    return tensors, {**extra, TENSORS_OF: tensors_of}


def is_slot(name: str, value: Any) -> bool:
    """Whether an entry of a state dict is a tensor of the module, which can be read in place.

    What ``get_extra_state`` returns is not, also where it is a tensor: it is handed back.
    """
    return isinstance(value, Tensor) and name.rpartition(".")[2] != EXTRA_STATE


def _holds_slices(state: Any) -> bool:
    values = state.values() if isinstance(state, dict) else ()
    return any(isinstance(value, FlatChunks | DTensor) for value in values)


def _written_once(value: Tensor) -> Tensor:
    """Let rank 0 alone write what every rank has whole: buffers may differ between ranks."""
    if isinstance(value, FlatChunks | DTensor):
        return value.detach()
    is_mine = not dist.is_initialized() or dist.get_rank() == 0
    whole = value.detach().reshape(-1)
    return FlatPiece(whole if is_mine else whole[:0], tuple(value.shape), 0)


def _of_all_ranks(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """On rank 0, kinds of slices and other state that any rank has. Collective.

    A rank without an element of a parameter may not step it: it has no state, or an old count.
    """
    mine, with_elements = [], []
    for state in states:
        slices = state.get("slices", {})
        kinds = {name: {k: v.dtype for k, v in values.items()} for name, values in slices.items()}
        told = {**state, "slices": kinds} if "slices" in state else dict(state)
        # What a device holds is unpickled there, on the device of the rank that has sent it.
        mine.append(map_tensors(told, Tensor.cpu))
        with_elements.append(
            {name for name, values in slices.items() if any(map(_num_here, values.values()))}
        )
    if not dist.is_initialized():
        return mine
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((mine, with_elements), every)
    for theirs, known in reversed(every or []):
        for ours, other, knows in zip(mine, theirs, known, strict=True):
            for part in {"slices", "state"} & set(ours):
                for name, values in other[part].items():
                    if name in knows or name not in ours[part]:
                        ours[part][name] = values
    return mine


def _num_here(value: Any) -> int:
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.numel()


# -- reading ---------------------------------------------------------------------------------------


def read_extra(path: str | PathLike[str]) -> dict[str, Any]:
    """What was given to :func:`write`, with stand-ins on the meta device for tensors.

    A stand-in may be renamed or dropped before it is handed to :func:`read_module`.
    """
    opened = folder.OpenCheckpoint(path)
    extra, shapes = opened.extra(), opened.shapes()
    for part, names in extra.pop(TENSORS_OF).items():
        for name, key in names.items():
            shape, dtype = shapes[key]
            stand_in = torch.empty(shape, dtype=dtype, device="meta")
            setattr(stand_in, _SOURCE, (opened, key))
            extra[part][name] = stand_in
    for index, state in enumerate(extra.get("optimizer_states", ())):
        state["saved_under"] = (opened, f"optimizer.{index}")
    return extra


def is_stand_in(value: Any) -> bool:
    """Whether this is a stand-in for a tensor in a folder."""
    return hasattr(value, _SOURCE)


def read_module(state: ShardedState, entries: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Fill a module from a folder. Collective.

    Other dtypes are converted, as ``load_state_dict`` does.

    Args:
        state: Of the module.
        entries: Stand-ins by the names that tensors have in the module; other values are returned.
        strict: Whether the names must be the module's.

    Returns:
        What the module is to take by ``load_state_dict(..., strict=False)``: entries that are no
        stand-ins, and those of which its state dict holds copies.

    Raises:
        RuntimeError: Names or shapes are not the module's, or values were edited.
    """
    targets = state.of_module()
    missing = [name for name in targets if name not in entries]
    unexpected = [name for name in entries if name not in targets]
    problems = [f"missing: {missing}"] * bool(missing and strict)
    problems += [f"unexpected: {unexpected}"] * bool(unexpected and strict)
    to_read: dict[folder.OpenCheckpoint, dict[str, dict[int, Tensor]]] = {}
    others = {}
    for name, entry in entries.items():
        if name not in targets:
            continue
        source = getattr(entry, _SOURCE, None)
        if source is None:
            others[name] = entry
            if isinstance(entry, Tensor) and entry.is_meta:
                problems.append(
                    f"{name!r} was computed from an entry of a sharded checkpoint, whose values "
                    "are read later, by slices: on_load_checkpoint may rename and drop entries "
                    "and put in tensors of its own. Save with checkpoint='full' to compute"
                )
            continue
        target = targets[name].detach()
        if target.shape != entry.shape:
            problems.append(
                f"{name!r}: saved with shape {tuple(entry.shape)}, the module's is "
                f"{tuple(target.shape)}"
            )
        opened, key = source
        to_read.setdefault(opened, {}).setdefault(key, {})[id(targets[name])] = target

    def check() -> None:
        if problems:
            raise RuntimeError(
                "expected the names and shapes of the module; "
                f"{'; '.join(problems)}. Load it into the module that was saved, or set "
                "strict_loading = False (load_sharded: strict=False) for other names, and for a "
                "checkpoint without its base (checkpoint_base=False)."
            )

    Ranks().here("sharded checkpoint", check)
    for opened, by_key in to_read.items():
        while any(by_key.values()):  # once, unless a tied tensor goes into several
            batch = {key: targets.popitem()[1] for key, targets in by_key.items() if targets}
            opened.read(batch, partial=True, cast=True)
    note_writing(targets.values())
    return state.take_copies({n: v for n, v in targets.items() if n in entries}) | others


def read_optimizers(
    state: ShardedState, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Fill optimizers from a folder, state that they do not have yet included. Collective.

    Args:
        state: Of the module.
        optimizers: With the parameter groups of those that were saved, by name.
        saved: Of :func:`read_extra`.

    Raises:
        ValueError: Another number of optimizers, another kind of one, or other groups.
    """

    def check() -> None:
        check_kinds(optimizers, saved)
        for index, (optimizer, of_saved) in enumerate(zip(optimizers, saved, strict=True)):
            if "slices" in of_saved:
                groups = names_in(state, optimizer, index)
                named, _ = _by_names_here(groups, of_saved)
                _check_groups(index, groups, [group["params"] for group in named["param_groups"]])

    Ranks().here("optimizers of a sharded checkpoint", check)
    to_read: dict[folder.OpenCheckpoint, dict[str, Tensor]] = {}
    to_load: list[tuple[Optimizer, dict[str, Any]]] = []
    for index, (optimizer, of_saved) in enumerate(zip(optimizers, saved, strict=True)):
        if "slices" not in of_saved:
            to_load.append((optimizer, {k: v for k, v in of_saved.items() if k != "saved_under"}))
            continue
        groups = names_in(state, optimizer, index)
        of_saved, saved_as = _by_names_here(groups, of_saved)
        opened, prefix = of_saved["saved_under"]
        reads = to_read.setdefault(opened, {})  # collective: also where this rank owns nothing
        owners, shapes = _owners(state, optimizer), opened.shapes()
        entries = _state_to_fill(state, optimizer, of_saved, owners)
        for name, values in entries.items():
            for key in of_saved["slices"].get(name, {}):
                place = f"{prefix}.{saved_as[name]}.{key}"
                target = None if name in owners else state.slice_of(name, key, values[key])
                if target is None or target.shape != shapes[place][0]:
                    values[key] = _whole_like(values[key], shapes[place][0])
                    target = _all_of(values[key])
                assert target is not None, "it was made like what was saved"
                reads[place] = target
        to_load.append((optimizer, by_place(groups, entries, of_saved)))
    for opened, tensors in to_read.items():
        opened.read(tensors, partial=True)
    for optimizer, packed in to_load:
        optimizer.load_state_dict(packed)


def check_kinds(optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse another number of optimizers than were saved, and another kind of one.

    A kind shows in its options; torch fills in switches that an older version did not save.

    Raises:
        ValueError: The number, or a kind, is another.
    """
    if len(optimizers) != len(saved):
        raise ValueError(
            f"checkpoint: expected the state of {len(optimizers)} optimizer(s), as many as "
            f"configure_optimizers returns, got {len(saved)}. Resume with the optimizers that "
            "the checkpoint was saved with."
        )
    for index, (optimizer, of_saved) in enumerate(zip(optimizers, saved, strict=True)):
        here = _numbers_in(getattr(optimizer, "defaults", {}))
        for group in of_saved.get("param_groups", ()):
            if missing := [name for name in here if name not in group]:
                raise ValueError(
                    f"checkpoint: expected the state of {type(optimizer).__name__} for optimizer "
                    f"{index}, with {missing}, got that of another kind, with "
                    f"{_numbers_in(group)}. Resume with the optimizer that was saved, or load the "
                    "weights alone."
                )


def _numbers_in(options: Mapping[str, Any]) -> list[str]:
    """Names of the options of an optimizer that are no switches."""
    names = (name for name, value in options.items() if not isinstance(value, bool | None))
    return [name for name in names if name not in ("params", "param_names")]


def check_group_sizes(index: int, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse the state of an optimizer with other groups; it goes by their places.

    Raises:
        ValueError: Their number, or how many parameters they have, is another.
    """
    here, there = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if here != there:
        raise ValueError(
            f"checkpoint: expected parameter groups of optimizer {index} with {here} parameters, "
            f"as configure_optimizers makes them, got {there}. Resume with the groups that were "
            "saved, or load the weights alone."
        )


def at_places_here(
    index: int,
    groups: list[list[str]],
    names: Sequence[Sequence[str]],
    saved: Mapping[str, Any],
) -> dict[str, Any]:
    """A state dict of torch, by the places that parameters have in this optimizer.

    A module that registers its parameters in another order numbers them in another way.

    Args:
        index: Of the optimizer, for the message.
        groups: Names of the parameters of its groups.
        names: Of those that were saved.
        saved: By their places.

    Raises:
        ValueError: They have other names.
    """
    called = _names_here(groups)
    names = [[called(name) for name in group] for group in names]
    try:
        _check_groups(index, groups, names)
    except ValueError as error:
        raise ValueError(
            f"{error} Where on_load_checkpoint renames parameters, rename those in "
            "checkpoint['optimizer_parameter_names'] as well, or remove that key."
        ) from None
    flat = [name for group in names for name in group]
    of_parameters, own = split_own_state(saved["state"])
    entries = {flat[place]: values for place, values in of_parameters.items()}
    return by_place(groups, entries, {**saved, "own": own})


def _names_here(groups: Sequence[Sequence[str]]) -> Callable[[str], str]:
    """What the parameter of a saved name is called here, if other modules are checkpointed here."""
    names = {name.replace(_WRAPPED, ""): name for group in groups for name in group}
    return lambda name: names.get(name.replace(_WRAPPED, ""), name)


def _by_names_here(
    groups: Sequence[Sequence[str]], saved: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """A saved optimizer by the names that its parameters have here, and those that were saved."""
    called = _names_here(groups)
    slices, others = (
        {called(name): values for name, values in saved[part].items()}
        for part in ("slices", "state")
    )
    of_groups = [
        {**group, "params": list(map(called, group["params"]))} for group in saved["param_groups"]
    ]
    by_name_here = {**saved, "slices": slices, "state": others, "param_groups": of_groups}
    return by_name_here, {called(name): name for name in saved["slices"]}


def _state_to_fill(
    state: ShardedState,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    owners: Mapping[str, Owned],
) -> dict[str, dict[str, Any]]:
    """Per parameter, the state to be: tensors to read into, and values that are there already.

    Of what another rank owns there is none here.
    """
    parameters = state.parameters()
    entries: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys((*saved["slices"], *saved["state"])):
        owner, present = owners.get(name), optimizer.state.get(parameters[name], {})
        if owner is not None and not owner.is_here:
            continue
        entries[name] = dict(saved["state"].get(name, {}))
        for key, dtype in saved["slices"].get(name, {}).items():
            value = present.get(key)
            if not isinstance(value, Tensor) or value.dtype != dtype:
                value = torch.zeros_like(parameters[name].detach(), dtype=dtype)
            entries[name][key] = value
    return entries


def _whole_like(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory for what an owner has, or who has it of another shape than the parameter's."""
    # Of another order in memory than that of a new one, what is read into would be a copy.
    is_there = type(value) is Tensor and value.shape == torch.Size(shape) and value.is_contiguous()
    return value if is_there else torch.zeros(shape, dtype=value.dtype, device=value.device)


def _owners(state: ShardedState, optimizer: Optimizer) -> dict[str, Owned]:
    """By name, the parameters that owners step whole."""
    name_of = {id(parameter): name for name, parameter in state.parameters().items()}
    return {name_of[id(p.parameter)]: p for p in owned_by_number(optimizer).values()}


def _all_of(value: Any) -> Tensor | None:
    """A tensor of an owner's state, whole, in a form that a checkpoint knows."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    return FlatPiece(value.detach().reshape(-1), tuple(value.shape), 0)


def by_place(
    groups: Sequence[Sequence[str]], entries: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict as torch has it, by the places of parameters in this optimizer."""
    place_of = {name: place for place, name in enumerate(n for group in groups for n in group)}
    of_parameters = {place: entries[name] for name, place in place_of.items() if name in entries}
    others = {key: value for key, value in saved.items() if key not in _OF_FOLDERS}
    return {
        **others,
        "state": {**of_parameters, **saved.get("own", {})},
        "param_groups": [
            {**of_saved, "params": [place_of[name] for name in group]}
            for of_saved, group in zip(saved["param_groups"], groups, strict=True)
        ],
    }


def _check_groups(
    index: int, groups: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]
) -> None:
    if len(groups) != len(saved):
        raise ValueError(
            f"checkpoint: expected {len(groups)} parameter group(s) of optimizer {index}, got "
            f"{len(saved)}. Resume with the groups that were saved."
        )
    for number, (group, of_saved) in enumerate(zip(groups, saved, strict=True)):
        if set(group) != set(of_saved):
            only_here = [name for name in group if name not in of_saved]
            only_saved = [name for name in of_saved if name not in group]
            raise ValueError(
                f"checkpoint: expected the parameters of optimizer {index}, group {number}; only "
                f"in the optimizer: {only_here}; only in the checkpoint: {only_saved}. Resume with "
                "the groups that were saved."
            )
