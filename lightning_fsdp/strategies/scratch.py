"""The strategy over this project's own core.

======================  =================================================
name                    is
======================  =================================================
``scratch_fsdp``        ``ScratchFSDPStrategy()``
``scratch_fsdp_zero3``  parameters, gradients and optimizer state sharded
``scratch_fsdp_zero2``  gradients and optimizer state sharded
======================  =================================================
"""

from __future__ import annotations

from typing import Any, get_args

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_fsdp.core.ranks.groups import Comm, way_of
from lightning_fsdp.engines.scratch import ScratchEngine
from lightning_fsdp.strategies.sharded import ShardedStrategy

_WAYS = {
    "direct": "reading each other's memory",
    "pairs": "sending to each other in pairs",
}


class ScratchFSDPStrategy(ShardedStrategy):
    """Sharded data parallelism by :mod:`lightning_fsdp.core`, on CPU (gloo) and CUDA (NCCL).

    Options are those of :class:`~lightning_fsdp.strategies.sharded.ShardedStrategy`, and one:

    Args:
        comm: How gloo's ranks get data from each other; see :func:`~lightning_fsdp.fully_shard`.

    Raises:
        ValueError: ``comm`` is none of the three.
    """

    strategy_name = "scratch_fsdp"
    engine_class = ScratchEngine

    engine: ScratchEngine

    def __init__(self, *args: Any, comm: Comm = "auto", **kwargs: Any) -> None:
        if comm not in get_args(Comm):
            raise ValueError(f"comm: expected one of {get_args(Comm)}, got {comm!r}.")
        super().__init__(*args, **kwargs)
        self.engine.comm = comm

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        communicator = self.engine.communicator
        if communicator is not None and communicator.world_size > 1:
            way = way_of(communicator)
            rank_zero_info(f"Ranks exchange shards by {_WAYS.get(way, f'collectives of {way}')}.")
