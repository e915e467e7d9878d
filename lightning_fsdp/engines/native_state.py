"""Whole state of modules and optimizers out of what torch's engines shard, and back.

One parameter is whole at a time, beside the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.core import torch_internals as core_internals
from lightning_fsdp.core.engine.structures import map_tensors
from lightning_fsdp.core.engine.unit import Site
from lightning_fsdp.core.materialize import materialize, meta_buffers
from lightning_fsdp.engines.gatherable import Gatherable, gatherable_of
from lightning_fsdp.engines.module_form import ModuleForm
from lightning_fsdp.engines.optimizers import sites_in
from lightning_fsdp.engines.owned_state import (
    map_leaves,
    owned_by_number,
    state_of_all,
    state_of_rank,
)
from lightning_fsdp.engines.rank_grid import all_gather_objects
from lightning_fsdp.engines.sharded_state import split_own_state

if TYPE_CHECKING:
    from lightning_fsdp.engines.native import NativeEngine

_Kinds = dict[int, dict[str, tuple[torch.dtype | None, Any]]]


def gatherable_state_dict(
    engine: NativeEngine,
    of_buffer: Callable[[Tensor], Tensor] = lambda buffer: buffer.detach().cpu().clone(),
    *,
    part: nn.Module | None = None,
) -> dict[str, Any]:
    """What the module's ``state_dict()`` would be without sharding, to be made whole.

    Arguments as of :func:`state_dict_with`.
    """

    def of_parameter(name: str, parameter: Tensor) -> Gatherable:
        return _gatherable(engine, name, parameter.detach(), parameter.dtype)

    return state_dict_with(engine, of_parameter, of_buffer, part=part)


def state_dict_with(
    engine: NativeEngine,
    of_parameter: Callable[[str, Tensor], Any],
    of_buffer: Callable[[Tensor], Tensor],
    *,
    part: nn.Module | None = None,
) -> dict[str, Any]:
    """The module's ``state_dict()`` as it was before sharding, with these values.

    Args:
        engine: Has sharded the module.
        of_parameter: Takes original name and sharded parameter; tied ones have one.
        of_buffer: Takes a buffer.
        part: Of the module; by default all of it.

    Raises:
        RuntimeError: A hook computes with parameters.
    """
    outlines = _outlines(engine)
    value_of = {id(outlines[n]): of_parameter(n, p) for n, p in engine.parameters.items()}
    state: dict[str, Any] = {}
    with _form(engine).worn(outlines) as root:
        # Without arguments: a LightningModule may override it so.
        shown = root.state_dict() if part is None else part.state_dict(keep_vars=True)
    for key, value in shown.items():
        if id(value) in value_of:
            state[key] = value_of[id(value)]
        elif not isinstance(value, Tensor):
            state[key] = value
        elif not value.is_meta:
            state[key] = of_buffer(value)
        else:
            raise RuntimeError(
                f"{key!r}: expected a parameter in state_dict(), or a copy of it, got what a hook "
                "computes from one, of which no rank has all. Compute in on_save_checkpoint, from "
                "full_tensor(), with checkpoint='full'; or use scratch_fsdp."
            )
    return state


def load_full_state_dict(engine: NativeEngine, state: Mapping[str, Any], strict: bool) -> None:
    """Every rank keeps its pieces of whole tensors that every rank brings."""
    outlines = _outlines(engine)
    with _form(engine).worn(outlines) as module:
        before = dict(module.named_buffers())
        # Assigned, as an outline has no memory to copy into; then cut.
        module.load_state_dict(dict(state), strict=strict, assign=True)
        loaded = dict(module.named_parameters())
        with torch.no_grad():
            for name, buffer in list(module.named_buffers(remove_duplicate=False)):
                if name in before and before[name] is not buffer:
                    before[name].copy_(buffer)
                    owner, _, attribute = name.rpartition(".")
                    module.get_submodule(owner)._buffers[attribute] = before[name]
    with torch.no_grad():
        for name, parameter in engine.parameters.items():
            if name in loaded and loaded[name] is not outlines[name]:
                start, stop = engine.range_here(name)
                engine.piece(parameter).copy_(loaded[name].reshape(-1)[start:stop])


def gatherable_optimizer_state_dict(
    engine: NativeEngine, optimizer: Optimizer, names: Sequence[str]
) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` would be without sharding, to be made whole. Collective.

    Args:
        engine: Has sharded the parameters.
        optimizer: Over all or some of them.
        names: Of its parameters, in its order.
    """
    state_dict: dict[str, Any] = optimizer.state_dict()
    owned = owned_by_number(optimizer)
    of_all, own = split_own_state(state_of_all(optimizer, state_dict["state"]))
    of_owners = {index: values for index, values in of_all.items() if index in owned}
    state: dict[int, dict[str, Any]] = map_leaves(gatherable_of, of_owners)
    pieces = {index: values for index, values in of_all.items() if index not in owned}
    for index, kinds in _kinds_on_any_rank(engine, pieces, names).items():
        name, mine = names[index], pieces.get(index, {})
        state[index] = {}
        for key, (dtype, value) in kinds.items():
            if dtype is None:
                state[index][key] = value.cpu() if isinstance(value, Tensor) else value
                continue
            # Nobody steps what has no element on this rank, so that it may have no state.
            none = engine.parameters[name].new_empty(0, dtype=dtype)
            state[index][key] = _gatherable(engine, name, mine.get(key, none), dtype)
    own = map_leaves(gatherable_of, own)
    return {**state_dict, "state": dict(sorted(state.items())) | own}


def _gatherable(engine: NativeEngine, name: str, piece: Tensor, dtype: torch.dtype) -> Gatherable:
    return Gatherable(
        name, engine.shapes[name], dtype, piece, lambda piece, _: engine.whole(name, piece)
    )


def _kinds_on_any_rank(
    engine: NativeEngine, state: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> _Kinds:
    """Entries of state that some rank has: the dtype of those cut over the ranks, or a value.

    Values (counts of steps) are those of a rank with elements, where they are kept up to date.
    """
    mine: _Kinds = {}
    of_none: _Kinds = {}
    for index, values in state.items():
        start, stop = engine.range_here(names[index])
        where = mine if start < stop else of_none
        for key, value in values.items():
            is_cut = isinstance(value, Tensor) and engine.is_cut(names[index], value)
            # What a device holds is unpickled there, on the device of the rank that has sent it.
            kind = (value.dtype, None) if is_cut else (None, map_tensors(value, Tensor.cpu))
            where.setdefault(index, {})[key] = kind
    every = all_gather_objects((of_none, mine))
    merged: _Kinds = {}
    for kinds in (*(without for without, _ in every), *(with_some for _, with_some in every)):
        for index, of_parameter in kinds.items():
            merged.setdefault(index, {}).update(of_parameter)
    return dict(sorted(merged.items()))


def load_full_optimizer_state_dict(
    engine: NativeEngine, optimizer: Optimizer, names: Sequence[str], state: Mapping[str, Any]
) -> None:
    """Every rank keeps its pieces of a state that every rank brings."""

    def cut(number: int, key: str, value: Any) -> Any:
        return cut_state(engine, names[number], value)

    mine = state_of_rank(optimizer, state["state"], cut)
    optimizer.load_state_dict({**state, "state": mine})


def cut_state(engine: NativeEngine, name: str, value: Any) -> Any:
    """One entry of an optimizer's state as this rank keeps it; what is not whole stays."""
    if isinstance(value, Tensor) and value.dim() and value.shape == engine.shapes[name]:
        return engine.cut(name, value.to(engine.parameters[name].device))
    return value


@contextmanager
def outlined(engine: NativeEngine) -> Iterator[None]:
    """Inside, the module is as it was before sharding, without the memory of its parameters."""
    with _form(engine).worn(_outlines(engine)):
        yield


def materialize_whole(module: nn.Module) -> None:
    """Give values to what is on the meta device: whole, on the CPU, as torch shards only those."""
    sites: dict[Tensor, list[Site]] = {
        p: list(places.values()) for p, places in sites_in(module).items() if p.is_meta
    }
    if not sites and not meta_buffers(module):
        return
    values: dict[Tensor, Tensor] = {}
    buffers, _ = materialize(module, [sites], lambda p, whole: values.update({p: whole.clone()}))
    for parameter, value in values.items():
        real = nn.Parameter(value, requires_grad=parameter.requires_grad)
        real.__dict__.update(parameter.__dict__)
        core_internals.swap_tensors(parameter, real)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer in buffers:
                owner._buffers[name] = buffers[buffer]


def _form(engine: NativeEngine) -> ModuleForm:
    assert engine.form is not None, "there is a module between setup and teardown"
    return engine.form


def _outlines(engine: NativeEngine) -> dict[str, nn.Parameter]:
    """Parameters of the original shapes without memory."""
    outlines: dict[str, nn.Parameter] = {}
    for name, parameter in engine.parameters.items():
        empty = torch.empty(engine.shapes[name], dtype=parameter.dtype, device="meta")
        outlines[name] = _Outline(empty, requires_grad=parameter.requires_grad)
    return outlines


class _Outline(nn.Parameter):
    """A parameter without memory, which a state dict holds as it is, also where a hook copies."""

    @override
    def detach(self) -> Tensor:
        return self

    @override
    def clone(self, *, memory_format: Any = None) -> Tensor:
        return self
