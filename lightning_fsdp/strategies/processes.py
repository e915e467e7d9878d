"""One process among many: its device, its rank, how the others are started, what they exchange.

    started by      environment                 launcher
    the script      Lightning's own             runs the script again, once per further device
    a notebook      Lightning's own             forks a process per device, at each fit
    torchrun        TorchElastic                starts nothing, checks the sizes
    SLURM and such  their own                   starts nothing, checks the sizes

The same on CPU with gloo and on CUDA with NCCL.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_fsdp.strategies import lightning_internals

T = TypeVar("T")


class ProcessStrategy(ParallelStrategy):
    """A process per device, in one process group.

    Args:
        process_group_backend: ``None``: NCCL for CUDA, gloo for CPU.
        timeout: Time limit of the process group.
        of_lightning: What Lightning's strategies take.
    """

    num_nodes: int  # set by the Trainer

    def __init__(
        self,
        *,
        process_group_backend: str | None,
        timeout: timedelta | None,
        **of_lightning: Any,
    ) -> None:
        super().__init__(**of_lightning)
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout

    @property
    def is_distributed(self) -> bool:
        """Without it the Trainer gives every rank the same data and reduces no metric."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None, "the Trainer sets parallel_devices"
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment, and what logs on one rank only, which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        lightning_internals.set_rank_zero(self.global_rank)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None, "the Trainer sets cluster_environment"
        environment = self.cluster_environment
        if lightning_internals.is_notebook() and not environment.creates_processes_externally:
            # There is no script to run again, and nothing of a notebook's can be pickled.
            self._launcher = lightning_internals.fork_launcher(self)
            return
        # Also under torchrun or SLURM: the launcher is what compares devices with the world size.
        self._launcher = lightning_internals.script_launcher(
            environment, self.num_processes, self.num_nodes
        )

    @override
    def setup_environment(self) -> None:
        if lightning_internals.forks(self._launcher):
            # A forked process lacks the other threads of OpenMP, and would wait for them for ever.
            torch.set_num_threads(1)
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None, "the Trainer sets cluster_environment"
        device = self.root_device
        backend = self._process_group_backend or lightning_internals.default_backend(device)
        lightning_internals.init_process_group(
            self.cluster_environment, backend, device, self._timeout
        )

    def _before_collective(self, what: str) -> None:
        """Called before each of the following; may refuse it."""

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        self._before_collective("reduce")
        if isinstance(tensor, Tensor):
            if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
                # Lightning drops what is behind the point, also of the batch sizes that it divides
                # logged sums by.
                tensor = tensor.float()
            return lightning_internals.reduce_tensor(tensor, group, reduce_op)
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._before_collective("all_gather")
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._before_collective("barrier")
        if not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        self._before_collective("broadcast")
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]
