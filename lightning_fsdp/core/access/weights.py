"""Access to weights by original name, at any time: this rank's slice, or the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from lightning_fsdp.core.access.by_name import ByName
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


class Weight:
    """One parameter."""

    def __init__(self, name: str, parameter: ShardedTensor) -> None:
        self.name = name
        self._parameter = parameter

    @property
    def shard(self) -> Tensor:
        """This rank's slice, ``(n,)``, main dtype, sharing memory; may be empty."""
        return self._parameter.to_local().detach()

    def full(self) -> Tensor:
        """The whole parameter in its original shape, a fresh copy. Collective."""
        return self._parameter.full_tensor()


class Weights(ByName, Mapping[str, Weight]):
    """Parameters by original name. Made by :func:`weights`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "weights")

    def __getitem__(self, name: str) -> Weight:
        return Weight(name, self.look_up(name))

    def full(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value of each, one flat parameter whole at a time. Collective."""
        yield from self.stream({name: p.to_local() for name, p in self.parameters.items()})


def weights(module: nn.Module) -> Weights:
    """Access to the parameters of a module with sharded parameters inside.

    Raises:
        ValueError: Nothing in the module is sharded.
    """
    return Weights(module)
