"""What this machine can do at best: bytes per second between ranks, operations per second on one.

Processes of their own, all at once, as in a run. So a reference is measured under the load of as
many ranks as share the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.benchmark import Timer

from lightning_fsdp.bench import documents
from lightning_fsdp.bench.arms import Workload
from lightning_fsdp.bench.records import Run
from lightning_fsdp.core.torch_internals import all_gather_single, reduce_scatter_single
from lightning_fsdp.harness.ranks import run_ranks_apart

_ROUNDS = 10
_WIDTH = {"cpu": 1024, "cuda": 8192}  # of the matrices that are multiplied
_TIMEOUT_S = 120.0
# By the precision that is trained in.
_PRODUCT_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Speeds: medians of the slowest rank, but for the last one.

    Attributes:
        unit_bytes: Size of the whole that was gathered and reduced.
        gather_bytes_per_s: That left a rank in all-gathers.
        reduce_bytes_per_s: That left a rank in reduce-scatters.
        pair_bytes_per_s: In sends to every peer and receives from it, all at once.
        flops_per_s: Of matrix products on one rank, which the others leave alone: the best round.
    """

    unit_bytes: int
    gather_bytes_per_s: float | None
    reduce_bytes_per_s: float | None
    pair_bytes_per_s: float | None
    flops_per_s: float

    @property
    def bytes_per_s(self) -> float | None:
        """Of the fastest way, so that none beats the limit; ``None`` on one rank."""
        ways = self.gather_bytes_per_s, self.reduce_bytes_per_s, self.pair_bytes_per_s
        return max((speed for speed in ways if speed is not None), default=None)


def measure_limits(workload: Workload, runs: Sequence[Run], out: Path) -> Limits | None:
    """Measure in processes of their own, with units of the mean size of those that were trained.

    Args:
        workload: Says how many ranks, where they compute, and in what precision.
        runs: With units of the model, or a megabyte is taken.
        out: Folder for a log and the figures.

    Returns:
        The limits, or ``None`` where they could not be measured; the log says why.
    """
    units = next((rank.units for run in runs for rank in run.ranks if rank.units), None)
    unit_bytes = sum(unit.nbytes for unit in units) // len(units) if units else 2**20
    device_type, path = workload.accelerator, out / "limits.json"
    failure = run_ranks_apart(
        _measure, workload.num_ranks, device_type, workload.precision, unit_bytes, str(path),
        folder=out, timeout_s=_TIMEOUT_S, device_type=device_type,
    )  # fmt: skip
    return None if failure is not None else documents.load(Limits, path)


def _measure(rank: int, device_type: str, precision: str, unit_bytes: int, path: str) -> None:
    num_ranks = dist.get_world_size()
    dtype = _PRODUCT_DTYPES[precision.partition("-")[0]]
    device = torch.device(f"cuda:{rank}" if device_type == "cuda" else device_type)
    shard = torch.ones(max(1, unit_bytes // 4 // num_ranks), device=device)
    whole = shard.new_empty(shard.numel() * num_ranks)
    ways = (
        lambda: all_gather_single(whole, shard, group=dist.group.WORLD),
        lambda: reduce_scatter_single(shard, whole, group=dist.group.WORLD),
        lambda: _exchange(shard, whole.view(num_ranks, -1), rank),
    )
    slowest_s = torch.tensor([median(_rounds_s(way)) for way in ways], device=device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    if rank == 0:
        sent = shard.nbytes * (num_ranks - 1)
        gather, reduce, pair = (sent / s if sent else None for s in slowest_s.tolist())
        width = _WIDTH[device_type]
        left = torch.randn(width, width, device=device, dtype=dtype)
        product_s = min(_rounds_s(lambda: left @ left))
        found = Limits(
            unit_bytes=whole.nbytes, flops_per_s=2 * width**3 / product_s,
            gather_bytes_per_s=gather, reduce_bytes_per_s=reduce, pair_bytes_per_s=pair,
        )  # fmt: skip
        documents.write(Path(path), found)
    dist.barrier()  # which the others wait in, and leave the machine alone


def _exchange(mine: Tensor, slots: Tensor, rank: int) -> None:
    peers = [peer for peer in range(len(slots)) if peer != rank]
    operations = [dist.P2POp(dist.irecv, slots[peer], peer) for peer in peers]
    operations += [dist.P2POp(dist.isend, mine, peer) for peer in peers]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _rounds_s(action: Callable[[], object]) -> list[float]:
    """Seconds of some rounds, each after two more, with what the device does of them."""
    timer = Timer("action()", globals={"action": action})
    return [timer.timeit(1).mean for _ in range(_ROUNDS)]
