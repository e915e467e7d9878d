"""What each rank has to step whole, and keeps for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_fsdp.engines.owned_state import owned_by_number

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lightning_fsdp.core.optimizers.owners import Cut


@dataclass(frozen=True)
class Load:
    """What a rank steps whole.

    Attributes:
        numel: Elements of its tensors: of each moment as many.
        copied: Elements of those of which others hold a part: it keeps a copy of each.
        work: Of its steps, up to a factor.
    """

    numel: int
    copied: int
    work: int


def loads_of(optimizer: Optimizer) -> list[Load]:
    """Per rank of the sharding group, what it steps whole; empty if that is nothing."""
    cuts: dict[int, list[Cut]] = {}
    for tensor in owned_by_number(optimizer).values():
        cuts = cuts or {rank: [] for rank in range(tensor.communicator.world_size)}
        cuts[tensor.owner].append(tensor.cut)
    return [
        Load(
            sum(cut.numel for cut in of_rank),
            sum(cut.numel for cut in of_rank if cut.num_held(rank) < cut.numel),
            sum(cut.work for cut in of_rank),
        )
        for rank, of_rank in cuts.items()
    ]
