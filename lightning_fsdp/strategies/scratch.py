"""The strategy over this project's own core.

======================  ==========================================================================
name                    is
======================  ==========================================================================
``scratch_fsdp``        ``ScratchFSDPStrategy()``
``scratch_fsdp_zero3``  the same: parameters, gradients and optimizer state sharded
``scratch_fsdp_zero2``  ``ScratchFSDPStrategy(zero_stage=2)``: gradients and optimizer state sharded
======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed.constants import default_pg_timeout

from lightning_fsdp.engines.scratch import ScratchEngine
from lightning_fsdp.strategies.guards import refuse_unsupported_options
from lightning_fsdp.strategies.sharded import ShardedStrategy


class ScratchFSDPStrategy(ShardedStrategy):
    """Sharded data parallelism by :mod:`lightning_fsdp.core`, on CPU (gloo) and CUDA (NCCL).

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Writes and reads checkpoint files.
        precision_plugin: Set by the Trainer from ``precision``: 32-true, bf16-true, bf16-mixed or
            16-mixed.
        zero_stage: 2 keeps parameters whole during an optimizer step, 3 only while they compute.
        units: Which modules are gathered at a time. ``None``: repeated blocks, embedding, head and
            what is left are found. Class names; or a function that says yes to a module; or the
            smallest number of parameters of a unit.
        accumulation: ``"local"``: micro-batches communicate no gradient before the last one, and
            hold whole gradients (4 bytes per parameter in fp32). ``"sum"``: every micro-batch is
            reduced into the shard.
        checkpoint: ``"full"``: one file of whole tensors.
        activation_checkpointing: Not implemented yet.
        cpu_offload: Parameters, gradients and optimizer state live on the host, a shard on each
            rank, and the optimizer steps there; pinned memory beside an accelerator.
        compile: Not implemented yet.
        process_group_backend: ``None``: NCCL for CUDA, gloo for CPU.
        timeout: Of the process group.

    Raises:
        NotImplementedError: An option that does not work yet.
        ValueError: A value that no option has.
    """

    strategy_name = "scratch_fsdp"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        zero_stage: Literal[2, 3] = 3,
        units: list[str] | int | Callable[[nn.Module], bool] | None = None,
        accumulation: Literal["local", "sum"] = "local",
        checkpoint: Literal["full", "sharded"] = "full",
        activation_checkpointing: list[str] | bool | None = None,
        cpu_offload: bool = False,
        compile: bool = False,  # noqa: A002 (a public name)
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        refuse_unsupported_options(
            checkpoint=checkpoint,
            activation_checkpointing=activation_checkpointing,
            compiles=compile,
            accumulation=accumulation,
        )
        super().__init__(
            ScratchEngine(zero_stage=zero_stage, units=units, cpu_offload=cpu_offload),
            communicates_every_micro_batch=accumulation == "sum",
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
