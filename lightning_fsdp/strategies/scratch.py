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

from lightning_fsdp.engines.scratch import ScratchEngine
from lightning_fsdp.strategies.sharded import ShardedStrategy


class ScratchFSDPStrategy(ShardedStrategy):
    """Sharded data parallelism by :mod:`lightning_fsdp.core`, on CPU (gloo) and CUDA (NCCL).

    Options are those of :class:`~lightning_fsdp.strategies.sharded.ShardedStrategy`.
    """

    strategy_name = "scratch_fsdp"
    engine_class = ScratchEngine
