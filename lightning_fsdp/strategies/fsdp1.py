"""The strategy over torch's FSDP1 (``FullyShardedDataParallel``).

===============  =================================================
name             is
===============  =================================================
``fsdp1_zero3``  parameters, gradients and optimizer state sharded
``fsdp1_zero2``  gradients and optimizer state sharded
===============  =================================================
"""

from __future__ import annotations

from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from lightning_fsdp.strategies.sharded import ShardedStrategy


class FSDP1Strategy(ShardedStrategy):
    """Sharded data parallelism by torch's ``FullyShardedDataParallel``, on CPU and CUDA.

    Options are those of :class:`~lightning_fsdp.strategies.sharded.ShardedStrategy`.
    """

    strategy_name = "fsdp1"
    engine_class = FSDP1Engine
