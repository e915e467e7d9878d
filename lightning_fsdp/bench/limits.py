"""What this machine can do at best: bytes per second between ranks, operations per second on one.

Processes of their own, all at once, as in a run: ``python -m lightning_fsdp.bench.limits``. So a
reference is measured under the load of as many ranks as share the machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from lightning_fsdp.bench import documents
from lightning_fsdp.bench.arms import Workload
from lightning_fsdp.bench.records import Run
from lightning_fsdp.core.engine.torch_internals import all_gather_single, reduce_scatter_single
from lightning_fsdp.harness.processes import run_command

_ROUNDS = 15
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
    out.mkdir(parents=True, exist_ok=True)
    path = out / "limits.json"
    path.unlink(missing_ok=True)
    given = [workload.num_ranks, workload.accelerator, workload.precision, unit_bytes, path]
    command = [sys.executable, "-m", "lightning_fsdp.bench.limits", *map(str, given)]
    failure = run_command(command, log=out / "limits.txt", timeout_s=_TIMEOUT_S)
    return None if failure is not None else documents.load(Limits, path)


def _measure(rank: int, given: Sequence[str], meeting: str) -> None:
    ranks, device_type, precision, nbytes, path = given
    num_ranks, unit_bytes = int(ranks), int(nbytes)
    dtype = _PRODUCT_DTYPES[precision.partition("-")[0]]
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # as the arms
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=num_ranks
    )
    group = dist.group.WORLD
    assert group is not None
    shard = torch.ones(max(1, unit_bytes // 4 // num_ranks), device=device)
    whole = shard.new_empty(shard.numel() * num_ranks)
    width = _WIDTH[device.type]
    left = torch.randn(width, width, device=device, dtype=dtype)
    gather_s = _seconds(lambda: all_gather_single(whole, shard, group=group), device)
    reduce_s = _seconds(lambda: reduce_scatter_single(shard, whole, group=group), device)
    pairs_s = _seconds(lambda: _exchange(shard, whole.view(num_ranks, -1), rank), device)
    slowest = torch.tensor([gather_s, reduce_s, pairs_s], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    gather_s, reduce_s, pairs_s = slowest.tolist()
    sent = shard.nbytes * (num_ranks - 1)
    if rank > 0:
        dist.barrier()
        dist.destroy_process_group()
        return
    product_s = min(_rounds_s(lambda: left @ left, device))
    dist.barrier()
    found = Limits(
        unit_bytes=whole.nbytes,
        gather_bytes_per_s=sent / gather_s if sent else None,
        reduce_bytes_per_s=sent / reduce_s if sent else None,
        pair_bytes_per_s=sent / pairs_s if sent else None,
        flops_per_s=2 * width**3 / product_s,
    )
    documents.write(Path(path), found)
    dist.destroy_process_group()


def _exchange(mine: Tensor, slots: Tensor, rank: int) -> None:
    peers = [peer for peer in range(len(slots)) if peer != rank]
    operations = [dist.P2POp(dist.irecv, slots[peer], peer) for peer in peers]
    operations += [dist.P2POp(dist.isend, mine, peer) for peer in peers]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    return median(_rounds_s(action, device))


def _rounds_s(action: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of some rounds, after half as many."""
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return found[_ROUNDS // 3 :]


def main(*given: str) -> None:
    """Measure with what :func:`measure_limits` gives, and write a file."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given, f"{folder}/ranks")
        spawn(_measure, args=arguments, nprocs=int(given[0]))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(*sys.argv[1:])
