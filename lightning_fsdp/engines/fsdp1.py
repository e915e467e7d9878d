"""The engine over torch's FSDP1 (``FullyShardedDataParallel``), with original parameters.

    LightningModule          run() calls it through one wrapper around the whole
      net                    children that are units are replaced by wrappers
        FSDP(embedding)
        FSDP(block 0) ...

Parameters stay the same objects, but show this rank's piece, ``(n,)``; so optimizers are built
before sharding, where a parameter still has its shape.

Note: manual optimization runs backward inside ``training_step``. FSDP1 takes no backward inside its
own forward, so in that case no wrapper goes around the whole: each child is a root of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_fsdp.config import MixedPrecisionPolicy
from lightning_fsdp.core.engine.torch_internals import not_compiled
from lightning_fsdp.core.optimizers.optimizer_classes import SCALARS
from lightning_fsdp.engines import native_state, torch_internals
from lightning_fsdp.engines.calls import redirected
from lightning_fsdp.engines.flat_piece import FlatPiece
from lightning_fsdp.engines.gathered_alone import gathered_together
from lightning_fsdp.engines.native import (
    NativeEngine,
    refuse_own_parameters,
    steps_inside_forward,
)
from lightning_fsdp.engines.rank_grid import all_gather_objects
from lightning_fsdp.engines.sharded_state import ShardedState
from lightning_fsdp.units import UnitSelector


class FSDP1Engine(NativeEngine):
    """Shards with torch's FSDP1."""

    name = "fsdp1"
    shows_whole_shapes = False

    def __init__(self, *, zero_stage: int, units: UnitSelector, cpu_offload: bool) -> None:
        super().__init__(zero_stage=zero_stage, units=units, cpu_offload=cpu_offload)
        self._roots: list[FullyShardedDataParallel] = []
        self._flat_of: dict[str, tuple[Any, list[nn.Parameter]]] = {}  # and what it is made of
        self._waits = False  # whether the last backward kept its gradients on this rank
        # Those with a gradient since it was cleared: a rank without elements of one cannot see it.
        self._given: set[nn.Parameter] = set()
        self._ranges: dict[str, list[tuple[int, int]]] = {}  # see ranges()
        self._kept_whole = ExitStack()
        self._is_offloaded = False

    @override
    def _shard(
        self, module: nn.Module, device: torch.device, precision: MixedPrecisionPolicy
    ) -> dict[str, nn.Parameter]:
        # Without an accelerator everything is on the host, and FSDP1 would fail to pin it.
        self._is_offloaded = self.cpu_offload and device.type != "cpu"
        if steps_inside_forward(module):
            refuse_own_parameters(module, self.name)
            _refuse_tied_children(module)
        options: dict[str, Any] = {
            "sharding_strategy": self._strategy(),
            "process_group": self._groups(),
            "mixed_precision": _policy(precision),
            "cpu_offload": CPUOffload(offload_params=self._is_offloaded),
            "use_orig_params": True,
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
            "device_id": device,
        }
        parameters = dict(module.named_parameters())
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"parameter {name!r}: FSDP1 flattens floating-point parameters, got "
                    f"{parameter.dtype}. Register it as a buffer, or use fsdp2_zero3."
                )
        for [inner] in gathered_together(module, self.units, _one_by_one):
            if inner is not module:
                _wrap(module, inner, options)
        if steps_inside_forward(module):
            self._roots = [
                _wrap(module, child, options) for child in list(_callable_children(module))
            ]
        else:
            self._roots = [FullyShardedDataParallel(module, **options)]
        torch_internals.fsdp1_begin(self._roots)
        for wrapper in torch_internals.fsdp1_wrappers(self._roots):
            self._free_after_forward(wrapper)
        flats = torch_internals.fsdp1_flat_parameters(self._roots)
        flat_of = {p: (flat, originals) for flat, originals in flats for p in originals}
        self._flat_of = {name: flat_of[p] for name, p in parameters.items()}
        self._waits = False
        numels = {name: p.numel() for name, p in parameters.items()}
        every = all_gather_objects(numels, self.grid.shard_group)
        self._ranges = {
            name: list(pairwise(accumulate((theirs[name] for theirs in every), initial=0)))
            for name in numels
        }
        return parameters

    def _strategy(self) -> ShardingStrategy:
        if dist.get_world_size() == 1:
            return ShardingStrategy.NO_SHARD  # the only one that FSDP1 takes there
        is_hybrid, frees = self.grid.mesh is not None, self.plan.reshard_after_forward
        if is_hybrid and self.grid.shard_size == 1:
            raise NotImplementedError(
                f"FSDP1: expected 2 or more ranks to hold a model together, got replicas of 1 on "
                f"{self.grid.num_replicas} ranks, which torch would never average. Use "
                "strategy='ddp', scratch_fsdp or fsdp2_zero3."
            )
        if frees:
            return ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if is_hybrid else ShardingStrategy.SHARD_GRAD_OP

    def _groups(self) -> Any:
        """Within a replica and between them; ``None``: all ranks."""
        mesh = self.grid.mesh
        return None if mesh is None else (self.grid.shard_group, mesh.get_group(0))

    @override
    def _forget(self) -> None:
        torch_internals.fsdp1_let_go(self._roots)
        self._roots, self._flat_of = [], {}
        self._given.clear()

    @override
    def _settle(self) -> None:
        self.release_whole()
        torch_internals.fsdp1_reshard(self._roots)

    @override
    def piece(self, tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1)

    @override
    def whole(self, name: str, tensor: Tensor) -> Tensor:
        piece = self.piece(tensor).to(self.device)
        result = piece.new_empty(self.shapes[name].numel())
        for rank, (start, stop) in enumerate(self._ranges[name]):
            if start < stop:
                part = result[start:stop]
                if rank == self.grid.shard_rank:
                    part.copy_(piece)
                dist.broadcast(part, group=self.grid.shard_group, group_src=rank)
        return result.view(self.shapes[name])

    @override
    def cut(self, name: str, whole: Tensor) -> Tensor:
        if self.grid.shard_size == 1:  # where torch shards nothing, parameters keep their shapes
            return whole.detach().clone(memory_format=torch.contiguous_format)
        start, stop = self.range_here(name)
        return whole.detach().reshape(-1)[start:stop].clone()

    @override
    def is_cut(self, name: str, tensor: Tensor) -> bool:
        start, stop = self.range_here(name)
        return tensor.dim() > 0 and tensor.numel() == stop - start

    @override
    def ranges(self, name: str) -> list[tuple[int, int]]:
        return self._ranges[name]

    @override
    def of_piece(self, name: str, piece: Tensor) -> Tensor:
        return piece

    def flat_piece(self, name: str, piece: Tensor) -> FlatPiece:
        """This rank's elements of a parameter or of its state, and which they are."""
        start, _ = self.range_here(name)
        return FlatPiece(self.piece(piece), self.shapes[name], start)

    def state_dict_of_pieces(self, part: nn.Module | None = None) -> dict[str, Any]:
        """``state_dict()`` of the module, or of a part of it, with slices; tied ones are one."""
        return native_state.state_dict_with(self, self.flat_piece, lambda buffer: buffer, part=part)

    @override
    def sharded_state(self, module: nn.Module) -> ShardedState:
        return _StateOfPieces(self, module) if self.parameters else ShardedState(module)

    @override
    def unreduced(self, name: str) -> Tensor | None:
        return self.parameters[name].grad if self._holds_unreduced(name) else None

    @override
    def reduced(self, name: str) -> Tensor | None:
        parameter = self.parameters[name]
        if self._holds_unreduced(name):
            return None
        if parameter.numel() == 0 and name in self._flat_of:  # other ranks have all elements
            _, together = self._flat_of[name]
            here = [p.grad is not None for p in self._given.intersection(together) if p.numel()]
            # By hand (``p.grad = None``) they are cleared together, or not seen.
            has_one = parameter in self._given and (not here or any(here))
            return parameter.detach() if has_one else None
        return parameter.grad

    def _holds_unreduced(self, name: str) -> bool:
        if name not in self._flat_of:
            return False
        if dist.get_world_size() == 1:  # nothing is cut, so that it looks the same
            return self._waits
        return torch_internals.fsdp1_holds_unreduced(self._flat_of[name][0])

    @override
    def before_backward(self) -> None:
        super().before_backward()
        if self._is_offloaded and self.syncs_gradients:
            names = [n for n in self.parameters if self.reduced(n) is not None or n in self._aside]
            if names:
                raise NotImplementedError(
                    f"FSDP1 with cpu_offload on {self.device.type}: expected one reduction per "
                    f"optimizer step, but {names[0]!r} has a reduced gradient already, which torch "
                    "would replace instead of adding to it. Use accumulation='local' (no_sync() "
                    "for all but the last micro-batch), scratch_fsdp or fsdp2_zero3."
                )
        # What was put aside, torch notices in the root's hook: after that of a unit whose output is
        # the root's own, where it would be added to. A backward inside of a forward
        # (torch.autograd.grad) meets gradients of the step before, which are cleared after it.
        for flat, originals in torch_internals.fsdp1_flat_parameters(self._roots):
            if all(p.grad is None for p in originals):
                torch_internals.fsdp1_clear(flat)
            else:
                torch_internals.fsdp1_clear_parts(flat)

    @override
    def after_backward(self) -> None:
        self._waits = not self.syncs_gradients  # first: by it gradients of one rank are told apart
        earlier, self._given = self._given, set()
        for flat, together in torch_internals.fsdp1_flat_parameters(self._roots):
            if flat.grad is not None:
                self._given.update(p for p in together if p.requires_grad)
        # What was put aside is of earlier backwards. Hooks see this one's, the same on all ranks.
        if not self._is_aside:
            self._given |= earlier
        super().after_backward()
        self._given |= earlier
        for flat, _ in torch_internals.fsdp1_flat_parameters(self._roots):
            torch_internals.fsdp1_show_frozen(flat, self._given)

    # A unit in a compiled block is called between graphs. Compiled on its own, what surrounds its
    # call would fail where a whole gradient lies at a shard: in a step of several micro-batches.
    @override
    @not_compiled
    def _before_forward(self, unit: nn.Module, args: Any) -> None:
        super()._before_forward(unit, args)
        torch_internals.fsdp1_see_thawed(unit)

    @override
    @not_compiled
    def _after_forward(self, unit: nn.Module, args: Any, output: Any) -> None:
        super()._after_forward(unit, args, output)
        for flat, _ in torch_internals.fsdp1_flat_parameters([unit]):
            torch_internals.fsdp1_show_frozen(flat, self._given)

    @override
    def _watch_weights(self, places: Mapping[str, str], owner: nn.Module, args: Any) -> None:
        super()._watch_weights(places, owner, args)
        if torch.compiler.is_compiling():  # what follows would end the graph
            return
        for attribute, name in places.items() if self._given else ():
            weight, parameter = getattr(owner, attribute), self.parameters[name]
            # Beside one that is trained, it gets a gradient, which would be added to its earlier.
            if weight.requires_grad and not parameter.requires_grad and parameter in self._given:
                weight.register_hook(torch.zeros_like)

    @override
    def clear_reduced(self, names: Iterable[str]) -> None:
        self._given.difference_update(self.parameters[name] for name in names)

    @override
    def clear_unreduced(self, names: Iterable[str]) -> None:
        for name in [name for name in names if self._holds_unreduced(name)]:
            self.parameters[name].grad = None
        self._waits = any(self.unreduced(name) is not None for name in self.parameters)

    @override
    def watch_optimizer(self, optimizer: Optimizer) -> None:
        if steps_inside_forward(cast(nn.Module, self.module)) and self._optimizers:
            raise NotImplementedError(
                "FSDP1 with manual optimization: expected one optimizer, got several. Freezing a "
                "network while another trains (toggle_optimizer) breaks FSDP1's backward. Use "
                "scratch_fsdp or fsdp2_zero3."
            )
        super().watch_optimizer(optimizer)

    @override
    def run(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._roots or self._roots[0].module is not self.module:
            return method(*args, **kwargs)
        with redirected(self._roots[0].module, method):
            return self._roots[0](*args, **kwargs)

    @override
    def agreeing(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch_internals.AgreeingGradScaler.of(scaler, device)

    @contextmanager
    @override
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            # One rank has nothing to leave out, and torch fails there on tied weights in bf16.
            for root in self._roots if dist.get_world_size() > 1 else ():
                stack.enter_context(root.no_sync())
            self.syncs_gradients = False
            try:
                yield
            finally:
                self.syncs_gradients = True

    @override
    def hold_whole(self) -> None:
        if not self.holds_whole:
            self._kept_whole.enter_context(torch_internals.fsdp1_kept_whole(self._roots))
        self.holds_whole = True

    @override
    def release_whole(self) -> None:
        self._kept_whole.close()
        self.holds_whole = False

    @override
    def with_whole_shapes(self) -> AbstractContextManager[Any]:
        return native_state.outlined(self)

    @override
    def read_shards_again(self) -> None:
        for wrapper in torch_internals.fsdp1_wrappers(self._roots):
            self._free(wrapper)

    @override
    def _free(self, module: nn.Module) -> None:
        torch_internals.fsdp1_free(module)


class _StateOfPieces(ShardedState):
    """Parameters are 1-D pieces here, and do not say of what.

    Args:
        engine: That has sharded the module, perhaps made it whole since.
        module: Its module.
    """

    def __init__(self, engine: FSDP1Engine, module: nn.Module) -> None:
        super().__init__(module)
        self._engine = engine

    @override
    def of_module(self) -> dict[str, Any]:
        if self._engine.module is None:
            return super().of_module()
        return self._engine.state_dict_of_pieces()

    @override
    def parameters(self) -> dict[str, nn.Parameter]:
        return self._engine.parameters

    @override
    def slice_of(self, name: str, key: str, value: Any) -> Tensor | None:
        # An optimizer's state stays in pieces when the module is made whole.
        if not isinstance(value, Tensor) or key in SCALARS:
            return None
        return self._engine.flat_piece(name, value) if self._engine.is_cut(name, value) else None


class _Wrapper(FullyShardedDataParallel):
    """Passes on what is written to it or put on it, as FSDP1's own does with what is read.

    ``self.blocks[0].rate = 0.5`` in a hook would otherwise be an attribute of the wrapper, and the
    block's forward would go on with the old rate. Forward hooks would be gone with the wrapper.
    """

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in self.__dict__ or hasattr(FullyShardedDataParallel, name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    @override
    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    @override
    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self.module.register_forward_pre_hook(*args, **kwargs)

    @override
    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self.module.register_forward_hook(*args, **kwargs)


def _wrap(root: nn.Module, module: nn.Module, options: dict[str, Any]) -> FullyShardedDataParallel:
    if isinstance(module, FullyShardedDataParallel):
        return module
    wrapper = FullyShardedDataParallel(module, **options)
    wrapper.__class__ = _Wrapper
    for owner in list(root.modules()):
        for name, child in owner._modules.items():
            if child is module and owner is not wrapper:
                owner._modules[name] = wrapper
    return wrapper


def _one_by_one(units: list[list[nn.Module]], apart: set[nn.Parameter]) -> list[list[nn.Module]]:
    """A wrapper holds one module; what is tied is left to what encloses both."""
    return [[module] for modules in units for module in modules]


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child)
        elif any(True for _ in child.parameters()):
            yield child


def _refuse_tied_children(module: nn.Module) -> None:
    children = [set(child.parameters()) for child in _callable_children(module)]
    if sum(map(len, children)) > len(set().union(*children)):
        raise NotImplementedError(
            f"{type(module).__name__}: expected no weight shared by two of its children with "
            "manual optimization under FSDP1, where each child is sharded by itself. Put them "
            "into one child module, or use scratch_fsdp or fsdp2_zero3."
        )


def _policy(precision: MixedPrecisionPolicy) -> MixedPrecision:
    return MixedPrecision(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs,
        cast_root_forward_inputs=precision.cast_forward_inputs,
    )
