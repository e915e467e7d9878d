"""The strategy over torch's FSDP1 (``FullyShardedDataParallel``).

===============  =================================================
name             is
===============  =================================================
``fsdp1_zero3``  parameters, gradients and optimizer state sharded
``fsdp1_zero2``  gradients and optimizer state sharded
===============  =================================================
"""

from __future__ import annotations

from typing import Any

from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from lightning_fsdp.strategies.sharded import ShardedStrategy


class FSDP1Strategy(ShardedStrategy):
    """Sharded data parallelism by torch's ``FullyShardedDataParallel``, on CPU and CUDA.

    Options are those of :class:`~lightning_fsdp.strategies.sharded.ShardedStrategy`, and one:

    Args:
        use_orig_params: Keep original parameters, always: ``False``, which Lightning's
            ``FSDPStrategy`` passes on to torch, is refused.

    Raises:
        NotImplementedError: ``use_orig_params=False``.
    """

    strategy_name = "fsdp1"
    engine_class = FSDP1Engine

    def __init__(self, *args: Any, use_orig_params: bool = True, **kwargs: Any) -> None:
        if not use_orig_params:
            raise NotImplementedError(
                "use_orig_params=False: expected original parameters, got one flat parameter per "
                "unit, which has no original name and shape for optimizer groups, access to "
                "gradients and checkpoints, and takes no frozen weight among others. Leave it at "
                "True; what is communicated and kept is the same."
            )
        super().__init__(*args, **kwargs)
