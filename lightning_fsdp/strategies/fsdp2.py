"""The strategy over torch's FSDP2 (``fully_shard``).

===============  =================================================
name             is
===============  =================================================
``fsdp2_zero3``  parameters, gradients and optimizer state sharded
``fsdp2_zero2``  gradients and optimizer state sharded
===============  =================================================
"""

from __future__ import annotations

from lightning_fsdp.engines.fsdp2 import FSDP2Engine
from lightning_fsdp.strategies.sharded import ShardedStrategy


class FSDP2Strategy(ShardedStrategy):
    """Sharded data parallelism by torch's ``fully_shard``, on CPU and CUDA.

    Options are those of :class:`~lightning_fsdp.strategies.sharded.ShardedStrategy`.
    """

    strategy_name = "fsdp2"
    engine_class = FSDP2Engine
