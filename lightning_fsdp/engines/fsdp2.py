"""The engine over torch's FSDP2 (``torch.distributed.fsdp.fully_shard``).

Units are those that the core would choose, with differences that FSDP2 asks for: modules that share
a weight are one unit, or left to what encloses them where they cannot be; what
``gathered_alone.py`` finds is a unit of its own; and the root is sharded last, so that it sees to
the order of the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_fsdp.config import MixedPrecisionPolicy
from lightning_fsdp.engines import torch_internals
from lightning_fsdp.engines.calls import redirected
from lightning_fsdp.engines.gathered_alone import gathered_together
from lightning_fsdp.engines.native import (
    NativeEngine,
    refuse_own_parameters,
    steps_inside_forward,
)
from lightning_fsdp.engines.optimizers import mark_replaced, shard_like
from lightning_fsdp.engines.sharded_state import ShardedState
from lightning_fsdp.units import UnitSelector


class FSDP2Engine(NativeEngine):
    """Shards with torch's FSDP2."""

    name = "fsdp2"

    def __init__(self, *, zero_stage: int, units: UnitSelector, cpu_offload: bool) -> None:
        super().__init__(zero_stage=zero_stage, units=units, cpu_offload=cpu_offload)
        self._fsdp_parameters: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}  # of parameters, by name: torch's own, one for each unit

    @override
    def _shard(
        self, module: nn.Module, device: torch.device, precision: MixedPrecisionPolicy
    ) -> dict[str, nn.Parameter]:
        if steps_inside_forward(module):
            refuse_own_parameters(module, self.name)
        _refuse_what_it_cannot(module)
        originals = dict(module.named_parameters())
        options: dict[str, Any] = {
            "mesh": self.grid.mesh or torch_internals.flat_mesh(device),
            "mp_policy": fsdp.MixedPrecisionPolicy(**vars(precision)),  # of the same fields
            "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=device.type != "cpu")
            if self.cpu_offload
            else fsdp.OffloadPolicy(),
            # None: the root, which the backward needs first, stays whole; all others are freed.
            "reshard_after_forward": None if self.plan.reshard_after_forward else False,
        }
        for modules in gathered_together(module, self.units, _merge_tied, trained_only=True):
            if module not in modules:
                fsdp.fully_shard(modules, **options)
            if len(modules) == 1 and module not in modules:  # else others of the unit may follow
                self._free_after_forward(modules[0])
        fsdp.fully_shard(module, **options)
        self._free_after_forward(module)
        parameters = dict(module.named_parameters())
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        for sharded, fsdp_parameter, group in torch_internals.fsdp2_parameters(module):
            name = name_of[id(sharded)]
            self._fsdp_parameters[name], self._groups[name] = fsdp_parameter, group
            torch_internals.fsdp2_let_flags_follow(fsdp_parameter)
            sharded.__dict__.update(originals[name].__dict__)  # marks that the user put on it
            originals[name].data = originals[name].data.new_empty(0)
        for group in set(self._groups.values()) if self.grid.num_replicas > 1 else ():
            torch_internals.fsdp2_keep_partials_apart(group)
        mark_replaced(originals)
        return parameters

    @override
    def _forget(self) -> None:
        torch_internals.fsdp2_let_go(self._fsdp_parameters.values(), self._groups.values())
        self._fsdp_parameters, self._groups = {}, {}

    @override
    def piece(self, tensor: Tensor) -> Tensor:
        return cast(DTensor, tensor.detach()).to_local().view(-1)

    @override
    def whole(self, name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):  # state of a parameter without an element here
            tensor = self.cut(name, tensor)
        with torch.no_grad():
            whole = cast(DTensor, tensor.detach().to(self.device)).full_tensor()
        # Gathered into memory of its own; on one rank the piece is the whole, and nothing was.
        return whole.clone() if self.grid.shard_size == 1 else whole

    @override
    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole if isinstance(whole, DTensor) else shard_like(self.parameters[name], whole)

    @override
    def is_cut(self, name: str, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor)

    @override
    def ranges(self, name: str) -> list[tuple[int, int]]:
        shape, ranks = self.shapes[name], range(self.grid.shard_size)
        rows = -(-shape[0] // len(ranks))  # as torch.chunk cuts them
        inner = shape[1:].numel()
        stops = [min(rows * rank, shape[0]) * inner for rank in (*ranks, len(ranks))]
        return list(itertools.pairwise(stops))

    @override
    def of_piece(self, name: str, piece: Tensor) -> Tensor:
        like = cast(DTensor, self.parameters[name].detach())
        return DTensor.from_local(
            piece.view(like.to_local().shape),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    @override
    def trains(self, name: str) -> bool:
        return torch_internals.fsdp2_shown(self._fsdp_parameters[name]).requires_grad

    @override
    def unreduced(self, name: str) -> Tensor | None:
        if name not in self._fsdp_parameters:
            return None
        return torch_internals.fsdp2_unreduced(self._fsdp_parameters[name])

    @override
    def waits_in_replica(self, name: str) -> bool:
        return (
            name in self._groups and torch_internals.fsdp2_partial(self._groups[name]) is not None
        )

    @override
    def reduced(self, name: str) -> Tensor | None:
        return self.parameters[name].grad

    @override
    def clear_unreduced(self, names: Iterable[str]) -> None:
        for name in self._fsdp_parameters.keys() & set(names):
            torch_internals.fsdp2_clear_unreduced(self._fsdp_parameters[name])
        waiting = [name for name in self._groups if self.waits_in_replica(name)]
        cleared = set(names).intersection(waiting)
        for name in cleared:
            kept = [n for n in waiting if self._groups[n] is self._groups[name]]
            if not cleared.issuperset(kept):
                rest = next(n for n in kept if n not in cleared)
                raise NotImplementedError(
                    f"zero_grad() under FSDP2: expected to clear what waits for the mean over "
                    f"replicas of whole units, got {name!r} without {rest!r}, with which torch "
                    "keeps it in one buffer. Clear both, or use accumulation='local'."
                )
        for name in cleared:
            torch_internals.fsdp2_clear_partial(self._groups[name])

    @override
    def sharded_state(self, module: nn.Module) -> ShardedState:
        whole = [n for n, p in module.named_parameters() if not isinstance(p, DTensor)]
        if self._depths[module] > 0 and whole:
            raise RuntimeError(
                f"sharded checkpoint (fsdp2): expected to be between forwards, got it inside of "
                f"one that reads {whole[0]!r}: torch's state_dict() would put the shard in its "
                "place. Save in a hook as on_train_batch_end, or with checkpoint='full'."
            )
        return super().sharded_state(module)

    @override
    def run(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.module is None or not self.parameters:
            return method(*args, **kwargs)
        with redirected(self.module, method):
            return self.module(*args, **kwargs)

    @override
    def agreeing(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        if not (self.cpu_offload and torch.cuda.is_available()):
            return scaler  # torch's own asks the others, where gradients are
        return torch_internals.AgreeingGradScaler.of(scaler, torch.device("cuda"))

    @contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        self._set_syncs(False)
        try:
            yield
        finally:
            self._set_syncs(True)

    @contextmanager
    @override
    def within_replica(self) -> Iterator[None]:
        root = cast(FSDPModule, self.module)
        root.set_requires_all_reduce(self.keeps_apart or self.grid.num_replicas == 1)
        try:
            yield
        finally:
            root.set_requires_all_reduce(True)

    def _set_syncs(self, syncs: bool) -> None:
        root = cast(FSDPModule, self.module)
        self.syncs_gradients = syncs
        root.set_requires_gradient_sync(syncs)
        if not self.plan.reshard_after_backward:
            root.set_reshard_after_backward(syncs)  # whole until the last micro-batch

    @override
    def hold_whole(self) -> None:
        for module in self._units():
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        self.holds_whole = True

    @override
    def release_whole(self) -> None:
        for module in self._units():
            is_root = cast(nn.Module, module) is self.module
            module.set_reshard_after_forward(
                bool(self.plan.reshard_after_forward) and not is_root, recurse=False
            )
        self.holds_whole = False
        self.read_shards_again()

    @override
    def read_shards_again(self) -> None:
        for module in self._units():
            module.reshard()

    @override
    def _free(self, module: nn.Module) -> None:
        cast(FSDPModule, module).reshard()

    def _units(self) -> Iterator[FSDPModule]:
        for module in [] if self.module is None else self.module.modules():
            if isinstance(module, FSDPModule):
                yield module


def _merge_tied(units: list[list[nn.Module]], apart: set[nn.Parameter]) -> list[list[nn.Module]]:
    """Units in order, those that share a parameter, but for those that are apart, as one."""
    merged: list[list[nn.Module]] = []
    for modules in units:
        mine = {p for module in modules for p in module.parameters()} - apart
        tied = [u for u in merged if any(p in mine for m in u for p in m.parameters())]
        # A unit inside this one shares its parameters with it, and keeps them.
        inner = {m for module in modules for m in module.modules()}
        tied = [u for u in tied if not all(m in inner for m in u)]
        if not tied:
            merged.append(modules)
            continue
        first = merged.index(tied[0])
        merged[first] = list(dict.fromkeys([*chain.from_iterable(tied), *modules]))
        merged = [u for u in merged if u is merged[first] or u not in tied]
    return merged


def _refuse_what_it_cannot(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 or parameter.numel() == 0:
            raise ValueError(
                f"parameter {name!r}: FSDP2 shards along the first dimension and takes no scalar, "
                f"and none without elements, got the shape {tuple(parameter.shape)}. Give a scalar "
                "the shape (1,), or use scratch_fsdp, which takes any shape."
            )
