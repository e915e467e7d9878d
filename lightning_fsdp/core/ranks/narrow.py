"""Gradients that are narrower than the dtype of their sum are sent as they are, by an all-to-all.

Every rank gets all ranks' parts of its shard, and widens them as it adds them up. A reduce-scatter,
which sums on the way, would have to send them widened: twice the bytes for bf16 summed in fp32, and
the same values. fp16 is sent so even if the mean is to be fp16 as well, since the sum may overflow.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fsdp.core.engine.communicator import Communicator, LocalRegion, Pending, collective

_BLOCK_NUMEL = 2**20  # widened at a time: 4 MB in fp32, which caches hold


class NarrowCommunicator(Communicator):
    """An all-to-all in the place of a reduce-scatter whose sum would be wider."""

    def _reduce_narrow(self, region: LocalRegion, what: str) -> Pending:
        sent = region.pack()
        received = torch.empty_like(sent)
        self.traffic["reduce_scatter"].add(sent.nbytes // self.world_size * (self.world_size - 1))
        how = {"group": self.group, "async_op": True}
        work = collective(what, "every rank", dist.all_to_all_single, received, sent, **how)
        rows = received.view(self.world_size, region.layout.shard_numel)
        mean = functools.partial(_mean_of, rows, region.dtype)
        return Pending(what, [(work.wait, "every rank")], mean, keeps=(sent,))


def _mean_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean over the first dimension, ``(n,)`` of ``dtype``; fp16 is summed in fp32."""
    num_rows, numel = rows.shape
    mean = rows.new_empty(numel, dtype=sum_dtype(dtype))
    # On CUDA the sum widens as it reads. On CPU torch first makes a wide copy of all it sums, hence
    # the blocks.
    step = numel if rows.is_cuda else max(_BLOCK_NUMEL // num_rows, 1)
    for start in range(0, numel, step):
        block = slice(start, start + step)
        torch.mean(rows[:, block], 0, dtype=mean.dtype, out=mean[block])
    return mean.to(dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in, for a mean in ``dtype``: a sum over ranks in fp16 may overflow."""
    return torch.float32 if dtype == torch.float16 else dtype
