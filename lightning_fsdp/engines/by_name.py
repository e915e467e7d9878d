"""Sharded parameters by original name, at any time: this rank's slices, or whole, streamed.

Gradients by name (``gradients.py``) stand on the same table and the same stream.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from torch import Tensor, nn

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.hooks import unit_of
from lightning_fsdp.core.sharded_module import schedules_of
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, flat_param_of, spec_of_leaf

_P = TypeVar("_P", bound=Tensor)


class Named(Generic[_P]):
    """What every access by name has, whoever has sharded the parameters.

    Attributes:
        parameters: The sharded parameters by original name.
    """

    _what: str  # is asked for, for messages
    parameters: Mapping[str, _P]

    def names(self) -> list[str]:
        """Original names, relative to the module that was given."""
        return list(self.parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def look_up(self, name: str) -> _P:
        """A parameter by its original name.

        Raises:
            KeyError: There is none; the message names similar ones.
        """
        parameters = self.parameters
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=3)
            raise KeyError(
                f"{name!r}: expected the original name of a sharded parameter, such as "
                f"{near or list(parameters)[:3]}."
            )
        return parameters[name]


class ByName(Named[ShardedTensor]):
    """The sharded parameters of a module by name, and the flat parameters that they belong to.

    Args:
        module: Any module with sharded parameters inside.

    Attributes:
        module: As given.
        schedules: Those that run its units, or a unit around it that has parameters inside.
        parameters: The sharded parameters by original name.

    Raises:
        ValueError: Nothing in the module is sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        inner = list(module.modules())
        around = [owner for unit in filter(None, map(unit_of, inner)) for owner in unit.modules]
        self.schedules = schedules_of([*inner, *around])
        self._flat_params = {f for schedule in self.schedules for f in schedule.flat_params}
        self.parameters = self._find()

    def flat_params(self) -> dict[FlatParameter, list[str]]:
        """Names by flat parameter, in order.

        Raises:
            ValueError: A parameter belongs to no unit of the module: it was put there later.
        """
        flat_params: dict[FlatParameter, list[str]] = {}
        for name, parameter in self.parameters.items():
            flat_param = flat_param_of(parameter)
            if flat_param not in self._flat_params:
                raise ValueError(
                    f"{name!r}: expected a parameter of the module's units, got one that was "
                    "registered after sharding. Register it before fully_shard, or remove it."
                )
            flat_params.setdefault(flat_param, []).append(name)
        return flat_params

    def stream(self, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Gather slices, one flat parameter after the other, by one collective each. Collective.

        Args:
            shards: By name, this rank's ``(n,)`` elements of values with the parameter's shape.

        Yields:
            Name and whole value, original shape, where shards live. One flat parameter is whole at
            a time, beside what the caller still holds; its smallest tensor comes last.
        """
        for flat_param, names in self.flat_params().items():
            specs = {name: self.parameters[name].spec for name in names if name in shards}
            if not specs:
                continue
            layout, home = flat_param.layout, flat_param.home
            region = flat_param.shard.new_zeros(layout.numel, device=home.compute_device)
            for name, spec in specs.items():
                start = spec.slot.offset + spec.slice.start
                home.to_device(shards[name].detach(), region[start:][: spec.slice.numel])
            region = home.to_host(
                flat_param.communicator.gather(region, flat_param.name).wait(), may_pin=False
            ).wait()
            wholes = {
                name: region.narrow(0, spec.slot.offset, spec.slot.numel).view(spec.slot.shape)
                for name, spec in specs.items()
            }
            del region
            *others, smallest = sorted(specs, key=lambda name: -specs[name].slot.numel)
            for name in others:
                yield name, wholes.pop(name)
            # The caller's loop variable keeps the last one while the next flat parameter is
            # gathered: a copy, so that it does not keep the whole region.
            if others:
                wholes[smallest] = wholes[smallest].clone()
            yield smallest, wholes.pop(smallest)

    def _find(self) -> dict[str, ShardedTensor]:
        """Sharded parameters by name, also while their unit computes and leaves are in place."""
        by_spec = {id(p.spec): p for f in self._flat_params for p in f.parameters}
        found = {}
        for name, parameter in self.module.named_parameters():
            sharded = by_spec.get(id(spec_of_leaf(parameter)), parameter)
            if isinstance(sharded, ShardedTensor):
                found[name] = sharded
        if not found:
            raise ValueError(
                f"{self._what}: expected a module with sharded parameters, got "
                f"{type(self.module).__name__} without any. Call fully_shard or shard_model first."
            )
        return found


class Weight:
    """Access to one parameter."""

    def __init__(self, name: str, parameter: ShardedTensor) -> None:
        self.name = name
        self._parameter = parameter

    @property
    def shard(self) -> Tensor:
        """This rank's slice, ``(n,)``, main dtype, sharing memory; may be empty."""
        return self._parameter.to_local().detach()

    def full(self) -> Tensor:
        """The whole parameter in its original shape, main dtype, a fresh copy. Collective."""
        return self._parameter.full_tensor()


class Weights(ByName, Mapping[str, Weight]):
    """Parameters by original name. Made by :func:`weights`."""

    _what = "weights"

    def __getitem__(self, name: str) -> Weight:
        return Weight(name, self.look_up(name))

    def full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole value of each, one flat parameter whole at a time. Collective."""
        yield from self.stream({name: p.to_local() for name, p in self.parameters.items()})


def weights(module: nn.Module) -> Weights:
    """Access the parameters of a module with sharded parameters inside.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    return Weights(module)
