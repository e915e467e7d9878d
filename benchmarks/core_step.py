"""Time one training step of the core beside torch's FSDP2, FSDP1 and DDP, in one run.

    python -m benchmarks.core_step                        # both cases of the table
    python -m benchmarks.core_step --batch-size 1 --seq-len 32 --arms scratch_zero3 fsdp2_zero3

Two gloo ranks with one thread each train the same GPT-2 (6 layers, width 512, V=8192) on the same
random tokens. Each arm has processes of its own, as a training program has, and they take turns, a
round of one step each, so that a slow moment of the machine falls on all of them. Reported per arm:
median and quartiles over the rounds, and the median of the per-round ratios to FSDP2 of the same
stage.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from benchmarks.command import BenchmarkParser, write_record
from benchmarks.turns import take_turns
from lightning_fsdp import shard_model
from lightning_fsdp.config import plan_of_stage
from lightning_fsdp.harness.gpt2 import build_gpt2
from lightning_fsdp.plan.models import block_classes

CASES = ((1, 32), (2, 256))  # batch and tokens: communication-bound, compute-bound
VOCABULARY = 8192


def build_model() -> GPT2LMHeadModel:
    """The same weights on every rank and in every arm."""
    return build_gpt2(
        num_layers=6, width=512, num_heads=8, vocabulary=VOCABULARY, num_positions=1024
    )


def _scratch(model: nn.Module, stage: int) -> nn.Module:
    return shard_model(model, plan_of_stage(stage))


def _fsdp2(model: nn.Module, stage: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=stage == 3)
    return fully_shard(model, reshard_after_forward=None if stage == 3 else False)


def _fsdp1(model: nn.Module, stage: int) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    strategy = {2: ShardingStrategy.SHARD_GRAD_OP, 3: ShardingStrategy.FULL_SHARD}[stage]
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks_of(model)}),
        sharding_strategy=strategy,
        device_id=next(model.parameters()).device,
        use_orig_params=True,
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, in order."""
    names = set(block_classes(model))
    return [module for module in model.modules() if type(module).__name__ in names]


# How a model of transformers, where it computes, is sharded by each engine's own documentation.
SHARD: dict[str, Callable[[nn.Module], nn.Module]] = {
    "scratch_zero3": lambda model: _scratch(model, 3),
    "scratch_zero2": lambda model: _scratch(model, 2),
    "fsdp2_zero3": lambda model: _fsdp2(model, 3),
    "fsdp2_zero2": lambda model: _fsdp2(model, 2),
    "fsdp1_zero3": lambda model: _fsdp1(model, 3),
    "fsdp1_zero2": lambda model: _fsdp1(model, 2),
    "ddp": nn.parallel.DistributedDataParallel,
}


def _build_sharded(arm: str) -> nn.Module:
    return SHARD[arm](build_model())


ARMS: dict[str, Callable[[], nn.Module]] = {
    arm: functools.partial(_build_sharded, arm) for arm in SHARD
}


def prepare(arm: str, rank: int) -> Callable[[tuple[int, int]], tuple[float, float]]:
    """One arm on one rank: what it does at a turn, given sequences and tokens of each."""
    model = ARMS[arm]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(rank)  # the same tokens in every arm

    def take_turn(shape: tuple[int, int]) -> tuple[float, float]:
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        start = time.perf_counter()
        loss = train_one_step(model, optimizer, tokens)
        return time.perf_counter() - start, loss

    return take_turn


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All arms in all cases; of rank 0 seconds per step and losses."""
    turns = [case for case in args.cases for _ in range(args.warmup + args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        found = take_turns(prepare, args.arms, args.ranks, turns, folder)
    results = []
    for number, (batch, seq) in enumerate(args.cases):
        stop = (number + 1) * (args.warmup + args.rounds)
        timed = {arm: steps[stop - args.rounds : stop] for arm, steps in found.items()}
        seconds = {arm: [step[0] for step in steps] for arm, steps in timed.items()}
        losses = {arm: [step[1] for step in steps] for arm, steps in timed.items()}
        results.append({"batch": batch, "seq": seq, "seconds": seconds, "losses": losses})
    return results


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def summarize(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and quartiles per arm, and the ratio to FSDP2 of the same stage round by round."""
    rows = []
    for case in results:
        for name, seconds in case["seconds"].items():
            reference = case["seconds"].get(f"fsdp2_{name.split('_')[-1]}")
            ratios = [a / b for a, b in zip(seconds, reference, strict=True)] if reference else []
            low, median, high = statistics.quantiles(seconds, n=4)
            rows.append({
                "batch": case["batch"], "seq": case["seq"], "arm": name,
                "median_ms": median * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3,
                "ratio_to_fsdp2": statistics.median(ratios) if ratios else None,
                "last_loss": case["losses"][name][-1],
            })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'batch x tokens':>14}  {'arm':<14} {'median ms':>9}  {'quartiles':>13}  of FSDP2  loss"
    )
    for row in rows:
        ratio = "-" if row["ratio_to_fsdp2"] is None else f"{row['ratio_to_fsdp2']:.2f}"
        quartiles = f"{row['q1_ms']:.0f} .. {row['q3_ms']:.0f}"
        print(
            f"{row['batch']:>7} x {row['seq']:<4}  {row['arm']:<14} {row['median_ms']:>9.0f}  "
            f"{quartiles:>13}  {ratio:>8}  {row['last_loss']:.5f}"
        )


def main() -> None:
    """Parse the command line, run, print, write JSON."""
    parser = make_parser()
    args = parser.parse(None)
    if (args.batch_size is None) != (args.seq_len is None):
        parser.error("--batch-size and --seq-len: expected both or neither. Give the other one.")
    args.cases = ((args.batch_size, args.seq_len),) if args.batch_size else CASES
    results = measure(args)
    rows = summarize(results)
    show(rows)
    document = {"rows": rows, "world_size": args.ranks, "rounds": results}
    write_record(args.out, "core_step", document)


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "core_step",
        __doc__,
        examples=["--rounds 10", "--batch-size 1 --seq-len 32 --arms scratch_zero3 fsdp2_zero3"],
    )
    parser.add_arms(ARMS)
    cases = " and ".join(f"{batch} x {seq}" for batch, seq in CASES)
    parser.add_batch(None, None, f" (default: both cases, {cases})")
    parser.add_rounds(30, 3)
    parser.add_ranks(2)
    parser.add_out()
    return parser


if __name__ == "__main__":
    main()
