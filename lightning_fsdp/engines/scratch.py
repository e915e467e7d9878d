"""The engine over this project's own core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fsdp.config import CPUOffloadPolicy, MixedPrecisionPolicy
from lightning_fsdp.core.engine.communicator import Communicator
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.hooks import hooks_of
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.fully_shard import shard_model
from lightning_fsdp.core.ranks.groups import Comm
from lightning_fsdp.core.ranks.hosts import kept_of
from lightning_fsdp.core.sharded_module import ShardedModule, units_in
from lightning_fsdp.core.tensors.norms import global_norm, reduced_gradients
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from lightning_fsdp.core.torch_internals import device_type_of
from lightning_fsdp.engines.access import GradientAccess, WeightAccess
from lightning_fsdp.engines.autocast import keep_main_dtype
from lightning_fsdp.engines.base import Engine, agree_on_module, broadcast_from_rank0
from lightning_fsdp.engines.by_name import weights
from lightning_fsdp.engines.full_state import load_full_optimizer_state_dict, load_full_state_dict
from lightning_fsdp.engines.gatherable import Gatherable, gatherable_of
from lightning_fsdp.engines.gradients import GradientUnavailable, gradients, keeps_apart
from lightning_fsdp.engines.methods import call_as_forward
from lightning_fsdp.engines.owned_state import map_leaves, state_of_all
from lightning_fsdp.engines.undo import give_back
from lightning_fsdp.units import UnitSelector


class ScratchEngine(Engine):
    """Shards with :func:`~lightning_fsdp.shard_model`.

    Attributes:
        comm: How data moves; see :func:`~lightning_fsdp.fully_shard`.
    """

    name = "scratch"
    offers_state_over_all = True
    comm: Comm = "auto"

    def __init__(self, *, zero_stage: int, units: UnitSelector, cpu_offload: bool) -> None:
        super().__init__(zero_stage=zero_stage, units=units, cpu_offload=cpu_offload)
        self._plan_of_held: dict[Unit, bool | None] = {}  # what hold_whole changed

    @override
    def shard(
        self, module: nn.Module, *, device: torch.device, precision: MixedPrecisionPolicy
    ) -> None:
        moved = device_type_of(self.grid.shard_group)
        if self.grid.mesh is None and moved != device.type:
            backend = dist.get_backend(self.grid.shard_group)
            raise ValueError(
                f"process_group_backend: expected one with which this core shards on {device}, got "
                f"{backend!r}, for {moved!r}. Leave it out; or use fsdp2_zero3."
            )
        agree_on_module(module)
        broadcast_from_rank0(module, device)
        module.zero_grad(set_to_none=True)  # the Trainer does it before the first step anyway
        if any(True for _ in module.parameters()):
            shard_model(
                module,
                self.plan,
                units=self.units,
                mesh=self.grid.mesh,
                mp_policy=precision,
                offload_policy=CPUOffloadPolicy(device.type != "cpu") if self.cpu_offload else None,
                comm=self.comm,
                state_over=self.grid.state_over,
            )
            keep_main_dtype(module, precision)
        else:
            module.to(device)
        self.module = module

    @override
    def make_whole(self, module: nn.Module) -> None:
        self.module = None
        self._plan_of_held.clear()
        if isinstance(module, ShardedModule):
            give_back(module)

    @override
    def run(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.module is None or hooks_of(self.module) is None:
            return method(*args, **kwargs)
        return call_as_forward(self.module, method, *args, **kwargs)

    @property
    def communicator(self) -> Communicator | None:
        """The sharded module's communicator; ``None`` if nothing is sharded."""
        hooks = None if self.module is None else hooks_of(self.module)
        return None if hooks is None else hooks.schedule.communicator

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        assert isinstance(self.module, ShardedModule), (
            "there is a module between setup and teardown"
        )
        return self.module.no_sync()

    @contextmanager
    @override
    def within_replica(self) -> Iterator[None]:
        units = [] if self.keeps_apart else self._all_units()
        for unit in units:
            unit.averages_replicas = self.grid.num_replicas == 1
        try:
            yield
        finally:
            for unit in units:
                unit.averages_replicas = True

    @property
    @override
    def keeps_apart(self) -> bool:
        return any(map(keeps_apart, self._flat_params()))

    @override
    def kept_parts(self) -> Iterator[Tensor]:
        for flat_param in self._flat_params():
            yield from kept_of(flat_param.communicator, flat_param.buffer.flat)

    @override
    def reduced_gradients(self, parameters: Iterable[Tensor], what: str) -> list[Tensor]:
        return reduced_gradients(parameters, what)

    @override
    def norm_of(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        return global_norm(gradients, norm_type, self.communicator)

    @override
    def _kept_apart(self) -> Iterator[Tensor]:
        assert self.module is not None, "there are gradients"
        for parameter in self.module.parameters():
            if isinstance(parameter.grad, ShardedTensor):
                yield from parameter.grad.micro_batches.values()

    @override
    def end_step(self) -> None:
        for flat_param in self._flat_params():
            flat_param.micro_batch = 0

    @override
    def hold_whole(self) -> None:
        for module in self._sharded_modules():
            module.unshard()
        for unit in self._all_units():
            self._plan_of_held.setdefault(unit, unit.reshard_after_forward)
            unit.reshard_after_forward = False

    @override
    def release_whole(self) -> None:
        for unit, reshard_after_forward in self._plan_of_held.items():
            unit.reshard_after_forward = reshard_after_forward
        self._plan_of_held.clear()
        self.read_shards_again()

    @override
    def read_shards_again(self) -> None:
        for module in self._sharded_modules():
            module.reshard()

    @override
    def gatherable_state_dict(self) -> dict[str, Any]:
        known: dict[tuple[int, int], Gatherable] = {}  # tied parameters are one
        state: dict[str, Any] = {}
        for name, value in self.sharded_module("state").state_dict().items():
            state[name] = gatherable_of(value)
            if isinstance(value, ShardedTensor):
                state[name] = known.setdefault(value.identity, state[name])
        return state

    @override
    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        load_full_state_dict(self.sharded_module("state"), state, strict=strict)

    @override
    def gatherable_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        state_dict: dict[str, Any] = optimizer.state_dict()
        state = map_leaves(gatherable_of, state_of_all(optimizer, state_dict["state"]))
        return {**state_dict, "state": state}

    @override
    def load_full_optimizer_state_dict(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        load_full_optimizer_state_dict(optimizer, state)

    @property
    @override
    def gradients(self) -> GradientAccess:
        return gradients(self.sharded_module("gradients", GradientUnavailable))

    @property
    @override
    def weights(self) -> WeightAccess:
        return weights(self.sharded_module("weights"))

    def _sharded_modules(self) -> list[ShardedModule]:
        modules = [] if self.module is None else self.module.modules()
        return [module for module in modules if isinstance(module, ShardedModule)]

    def _all_units(self) -> list[Unit]:
        return [] if self.module is None else units_in(self.module)

    def _flat_params(self) -> Iterator[FlatParameter]:
        return (flat_param for unit in self._all_units() for flat_param in unit.flat_params)
