"""A collective on its way over a simulated network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lightning_fsdp.simulate.network import Cost, Network


@dataclass(frozen=True, eq=False)
class Transfer:
    """What a collective moves, and where.

    Attributes:
        kind: A collective; see :meth:`Network.cost`.
        nbytes: Of the whole tensor.
        group_size: Ranks that take part.
        move: Writes the result, and keeps the tensors until then; ``None`` where it is there as
            it stands.
        result: What DDP reads.
    """

    kind: str
    nbytes: int
    group_size: int
    move: Callable[[], None] | None
    result: list[Tensor]

    @property
    def written_bytes(self) -> int:
        """By ``move``; a reduce-scatter writes one slot."""
        if self.move is None:
            return 0
        return self.nbytes // self.group_size if self.kind == "reduce_scatter" else self.nbytes

    def cost_on(self, network: Network) -> Cost:
        """What it takes there."""
        return network.cost(self.kind, self.nbytes, self.group_size)
