"""Seconds and process memory of training at sizes that people train, and of a full checkpoint.

    python -m benchmarks.real_size                                  # GPT-2 medium, all engines
    python -m benchmarks.real_size --size large --engines scratch_zero3 fsdp2_zero3
    python -m benchmarks.real_size --size qwen2.5-0.5b --grad-accum 2 --clip

Two gloo ranks with one thread each train through the Trainer on random tokens. Each arm runs in
processes of its own, as what a process had in memory is known once; arms take turns. Per arm and
rank: the median step, the most that the process had in memory (VmHWM) when it started and after its
steps, and what ``plan`` says of its tensors. With ``--checkpoint`` also what ``save_checkpoint`` of
a full one adds to that, its seconds beside those of ``dd`` for as many bytes, and the same of new
processes that go on from it. With ``--more`` what else a run does: a validation, eight tokens of
text, ``save_pretrained``, a sharded checkpoint, and the conversion of the full one; the most that
the process had during each. With ``--tensors`` each arm runs once more, slower, with a callback
that counts the bytes of its tensors in the second step. An arm that would not fit into this
machine's memory is said and not tried.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command import BenchmarkParser, write_record
from lightning_fsdp.harness.amounts import format_bytes
from lightning_fsdp.harness.command_line import at_least, exit_with
from lightning_fsdp.harness.environment import process_bytes
from lightning_fsdp.harness.processes import run_command
from lightning_fsdp.harness.tables import markdown_table

SIZES = {
    "small": "gpt2-small", "medium": "gpt2-medium", "large": "gpt2-large",
    "qwen2.5-0.5b": "qwen2.5-0.5b",
}  # fmt: skip
STRATEGIES = {
    "ddp": "ddp",
    **{f"{e}_zero{s}": f"{e}_zero{s}" for e in ("fsdp1", "fsdp2") for s in (2, 3)},
    **{f"scratch_zero{s}": f"scratch_fsdp_zero{s}" for s in (2, 3)},
}
DEFAULT = ("ddp", "fsdp1_zero3", "fsdp2_zero3", "fsdp2_zero2", "scratch_zero3", "scratch_zero2")
NUM_RANKS = 2
DDP_COPIES = 5  # whole fp32 copies that a rank of DDP holds: weights, gradients, buckets, 2 moments
LIMIT_S = 3600.0


def page_faults() -> int:
    """So far, of this process: what fresh memory costs."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measured(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of a call, and the most that this process had in memory meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets VmHWM
    begin = time.perf_counter()
    call()
    return {"seconds": time.perf_counter() - begin, "peak_bytes": process_bytes("VmHWM") or 0}


# -- one arm, in processes of its own --------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Run on both ranks of an arm: Lightning starts the second."""
    import lightning.pytorch as pl
    import torch

    import lightning_fsdp  # noqa: F401 (names its strategies)
    from lightning_fsdp import MemoryProbe
    from recipes.gpt2 import GPT2
    from recipes.qwen import Qwen

    torch.set_num_threads(1)
    started = process_bytes("VmRSS")
    model_class, size = (GPT2, args.size) if SIZES[args.size].startswith("gpt2") else (Qwen, "0.5b")
    tokens = args.batch_size * args.seq_len
    data = torch.randint(
        0, 50_000, (1024, args.seq_len), generator=torch.Generator().manual_seed(0)
    )
    loader = torch.utils.data.DataLoader(
        [{"input_ids": row, "labels": row} for row in data], batch_size=args.batch_size
    )

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.ready_s, self.ready_peak = time.perf_counter() - begun, process_bytes("VmHWM")
            self.first = trainer.global_step
            self.faults = [page_faults()]
            self.resident: list[int | None] = []
            self.ends.append(time.perf_counter())

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step - self.first == len(self.ends):
                self.ends.append(time.perf_counter())
                self.faults.append(page_faults())
                self.resident.append(process_bytes("VmRSS"))

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            record = {
                "rank": trainer.global_rank,
                "steps_s": [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)],
                "page_faults": [b - a for a, b in zip(self.faults, self.faults[1:], strict=False)],
                "resident_bytes": self.resident,
                "tokens": tokens,
                "started_bytes": started,
                "ready_s": self.ready_s,
                "initialised_peak_bytes": self.ready_peak,
                "trained_peak_bytes": process_bytes("VmHWM"),
                "trained_bytes": process_bytes("VmRSS"),
            }
            if args.checkpoint and not path.exists():
                disk_s = []
                if trainer.is_global_zero:
                    # Parameters and two moments; FSDP1 shows a rank's part of them.
                    num_bytes = 3 * 4 * sum(p.numel() for p in pl_module.parameters())
                    num_bytes *= NUM_RANKS if args.arm.startswith("fsdp1") else 1
                    disk_s.append(seconds_of_disk(path.with_name("dd"), num_bytes))
                trainer.strategy.barrier()
                begin = time.perf_counter()
                trainer.save_checkpoint(path)
                record |= {
                    "saved_s": time.perf_counter() - begin,
                    "saved_peak_bytes": process_bytes("VmHWM"),
                    "saved_bytes": process_bytes("VmRSS"),
                    "file_bytes": path.stat().st_size,
                }
                if trainer.is_global_zero:
                    disk_s.append(seconds_of_disk(path.with_name("dd"), record["file_bytes"]))
                    record["disk_s"] = disk_s
            if args.more and not resumes:
                record["more"] = {
                    what: measured(functools.partial(call, trainer, pl_module, path.parent))
                    for what, call in MORE.items()
                }
            Path(f"{args.record}.{trainer.global_rank}").write_text(json.dumps(record))

    path, begun = Path(args.record).parent / "checkpoint", time.perf_counter()
    resumes = path.exists() and not args.counts
    probe = MemoryProbe(steps=[1])
    torch.manual_seed(0)
    module = model_class(size=size, max_seq_len=1024, meta_init=args.arm != "ddp")
    pl.Trainer(
        strategy=STRATEGIES[args.arm],
        accelerator="cpu",
        devices=NUM_RANKS,
        precision=args.precision,
        max_steps=2 if args.counts else args.steps + resumes,
        accumulate_grad_batches=args.grad_accum,
        gradient_clip_val=1.0 if args.clip else None,
        callbacks=[probe if args.counts else Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader, ckpt_path=path if resumes else None)
    for report in probe.reports:  # the same on all ranks
        phases = [of_rank.values() for of_rank in report.ranks]
        peaks = [max(sum(phase.peak.values()) for phase in of_rank) for of_rank in phases]
        for rank, peak in enumerate(peaks):
            Path(f"{args.record}.{rank}").write_text(json.dumps(peak))


def forward_twice(trainer: Any, module: Any, folder: Path) -> None:
    """As a validation does."""
    module.eval()
    for row in rows_of_tokens(2, 128):
        trainer.strategy.predict_step({"input_ids": row, "labels": row}, 0)
    module.train()


def write_text(trainer: Any, module: Any, folder: Path) -> None:
    """The likeliest eight tokens."""
    row = rows_of_tokens(1, 8)[0]
    module.eval()
    for _ in range(8):
        logits = trainer.strategy.predict_step({"input_ids": row}, 0)
        row = row.new_tensor([[*row[0].tolist(), int(logits[0, -1].argmax())]])
    module.train()


def rows_of_tokens(num_rows: int, seq_len: int) -> Any:
    """Tokens, ``(num_rows, 1, seq_len)``."""
    import torch

    return torch.arange(num_rows * seq_len).view(num_rows, 1, seq_len)


def save_shards(trainer: Any, module: Any, folder: Path) -> None:
    """A folder of slices."""
    from lightning_fsdp import save_sharded

    save_sharded(folder / "shards", module, trainer.optimizers)


MORE: dict[str, Callable[[Any, Any, Path], None]] = {
    "two forwards without gradients": forward_twice,
    "eight tokens of text": write_text,
    "`save_pretrained`": lambda trainer, module, folder: trainer.strategy.save_pretrained(
        folder / "pretrained"
    ),
    "a sharded checkpoint": save_shards,
}
CONVERSIONS = {"the full checkpoint to safetensors": ("checkpoint", "safetensors"),
               "the sharded one to a full one": ("shards", "full")}  # fmt: skip


def convert(args: argparse.Namespace) -> None:
    """Convert what an arm has left, in a process of its own."""
    from lightning_fsdp.checkpoint.convert import convert

    folder = Path(args.record).parent
    record = {}
    for what, (source, form) in CONVERSIONS.items():
        target = folder / f"as_{form}"
        record[what] = measured(functools.partial(convert, folder / source, target, to=form))
    Path(args.record).write_text(json.dumps(record))


def seconds_of_disk(path: Path, num_bytes: int) -> float:
    """What ``dd`` takes to write as many bytes in blocks of 16 MiB until they are on the disk."""
    begin = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", "iflag=count_bytes", "conv=fsync"]
    subprocess.run([*command, f"count={num_bytes}"], check=True, capture_output=True)
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


# -- all of them -----------------------------------------------------------------------------------


def plan_of(args: argparse.Namespace, arm: str) -> int | None:
    """What ``plan`` says of a rank's tensors; it knows the core."""
    from lightning_fsdp.plan.dry_run import Run, dry_run
    from lightning_fsdp.plan.models import config_of

    if not arm.startswith("scratch"):
        return None
    run = Run(
        world_size=NUM_RANKS,
        zero_stage=int(arm[-1]),
        precision=args.precision,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        grad_accum=args.grad_accum,
        backend="gloo",
    )
    return dry_run(config_of(SIZES[args.size]), run).peak_bytes


def needed_bytes(args: argparse.Namespace, arm: str) -> int:
    """What all ranks of an arm are going to need at least."""
    import torch

    from lightning_fsdp.plan.models import build, config_of

    with torch.device("meta"):
        numel = sum(p.numel() for p in build(config_of(SIZES[args.size])).parameters())
    copies = DDP_COPIES * NUM_RANKS if arm == "ddp" else 4
    return 4 * numel * copies


def run_arm(args: argparse.Namespace, arm: str, folder: Path) -> dict[str, Any]:
    """One run of an arm: what its ranks wrote down, or why there is nothing."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = needed_bytes(args, arm)
    if needed > available:
        return {
            "arm": arm,
            "failure": f"needs {format_bytes(needed)}, the machine has {format_bytes(available)}",
        }
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()

    def run(name: str, arm: str = arm, *more: str) -> Any:
        failure = run_command(
            [sys.executable, "-m", "benchmarks.real_size", *sys.argv[1:], "--arm", arm,
             "--record", str(folder / name), *more],
            log=folder / "log", timeout_s=LIMIT_S,
        )  # fmt: skip
        if failure is not None:
            return failure.says
        if arm == "convert":
            return json.loads((folder / name).read_text())
        return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in range(NUM_RANKS)]

    ranks = run("record")
    if isinstance(ranks, str):
        return {"arm": arm, "failure": ranks}
    if args.checkpoint:
        resumed = run("resumed")
        if isinstance(resumed, str):
            return {"arm": arm, "failure": f"resuming: {resumed}"}
        for rank, again in zip(ranks, resumed, strict=True):
            rank |= {
                "resumed_s": again["ready_s"],
                "resumed_peak_bytes": again["trained_peak_bytes"],
            }
    if args.tensors:
        counted = run("counted", arm, "--counts")
        if isinstance(counted, str):
            return {"arm": arm, "failure": f"counting tensors: {counted}"}
        for rank, peak in zip(ranks, counted, strict=True):
            rank["tensors_peak_bytes"] = peak
    if args.more and args.checkpoint:
        converted = run("converted", "convert")
        if isinstance(converted, str):
            return {"arm": arm, "failure": f"converting: {converted}"}
        return {"arm": arm, "ranks": ranks, "converted": converted}
    return {"arm": arm, "ranks": ranks}


def more_of(document: dict[str, Any]) -> str:
    """What else was done, as Markdown: of the rank that took most."""
    rows = []
    for run in document["runs"]:
        done: dict[str, list[dict[str, float]]] = {}
        for rank in run.get("ranks", ()):
            for what, each in rank.get("more", {}).items():
                done.setdefault(what, []).append(each)
        for what, each in run.get("converted", {}).items():
            done[f"{what}, one process"] = [each]
        for what, each in done.items():
            peak, seconds = (max(m[key] for m in each) for key in ("peak_bytes", "seconds"))
            rows.append([run["arm"], what, f"{peak / 1e9:.2f}", f"{seconds:.1f}"])
    return markdown_table(["engine", "what", "peak, GB", "s"], rows)


def table_of(document: dict[str, Any]) -> str:
    """The arms as Markdown; the higher rank's memory, medians over steps and repeats."""
    gb = 1e9
    counts = any(
        "tensors_peak_bytes" in r for run in document["runs"] for r in run.get("ranks", ())
    )
    head = ["engine", "step, s", "at start, GB", "planned, GB"]
    head += ["tensors, GB"] * counts + ["initialised, GB", "peak, GB"]
    head += ["a checkpoint adds, GB", "saved in s (dd before, after)", "peak after resuming, GB"]
    body = []
    for arm in document["arms"]:
        runs = [run for run in document["runs"] if run["arm"] == arm]
        failures = [run["failure"] for run in runs if "failure" in run]
        if failures:
            body.append([arm, failures[0], *[""] * (len(head) - 2)])
            continue
        ranks = [rank for run in runs for rank in run["ranks"]]
        steps = [s for rank in ranks for s in rank["steps_s"][1:] or rank["steps_s"]]
        planned = document["plans"][arm]
        most = {
            key: max(rank[key] for rank in ranks) / gb
            for key in ("started_bytes", "initialised_peak_bytes", "trained_peak_bytes")
        }
        saved = ["", "", ""]
        if "saved_s" in ranks[0]:
            grown = max(rank["saved_peak_bytes"] - rank["trained_peak_bytes"] for rank in ranks)
            before, after = next(rank["disk_s"] for rank in ranks if "disk_s" in rank)
            saved = [
                f"{grown / gb:.2f}",
                f"{max(rank['saved_s'] for rank in ranks):.1f} ({before:.1f}, {after:.1f})",
                f"{max(rank['resumed_peak_bytes'] for rank in ranks) / gb:.2f}",
            ]
        body.append(
            [
                arm,
                f"{statistics.median(steps):.2f}",
                f"{most['started_bytes']:.2f}",
                "" if planned is None else f"{planned / gb:.2f}",
                *(f"{max(r['tensors_peak_bytes'] for r in ranks) / gb:.2f}" for _ in range(counts)),
                f"{most['initialised_peak_bytes']:.2f}",
                f"{most['trained_peak_bytes']:.2f}",
                *saved,
            ]
        )
    return markdown_table(head, body)


def main() -> int:
    """Measure, print the table and write the JSON."""
    args = make_parser().parse(None)
    if args.arm is not None:
        convert(args) if args.arm == "convert" else train(args)
        return 0
    runs = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        for repeat in range(args.repeats):
            for arm in args.engines:
                runs.append(run_arm(args, arm, Path(folder)))
                print(f"round {repeat + 1}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    document = {
        "arms": list(args.engines),
        "plans": {arm: plan_of(args, arm) for arm in args.engines},
        "runs": runs,
    }
    print(table_of(document))
    if args.more:
        print(more_of(document))
    write_record(args.out, "real_size", document)
    return int(all("failure" in run for run in runs))


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "real_size",
        __doc__,
        examples=["--size large --engines scratch_zero3 fsdp2_zero3", "--size qwen2.5-0.5b --clip"],
    )
    parser.old["--json"] = "--out"
    parser.add_argument(
        "--size", choices=list(SIZES), default="medium", help="size of the model, by its name"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=list(STRATEGIES), default=list(DEFAULT),
        help="engines to measure, one after the other",
    )  # fmt: skip
    parser.add_batch(1, 128)
    for option, default, says in (
        ("--steps", 3, "optimizer steps of a run; the first is not timed"),
        ("--repeats", 1, "times that all engines are measured"),
        ("--grad-accum", 1, "micro-batches in an optimizer step"),
    ):
        parser.add_argument(option, type=at_least(1), default=default, metavar="N", help=says)
    parser.add_argument("--clip", action="store_true", help="clip gradients to a norm of 1")
    parser.add_argument(
        "--precision", default="32-true", help="precision of the Trainer, such as bf16-mixed"
    )
    parser.add_argument(
        "--checkpoint", action="store_true", help="write a full checkpoint at the end, and resume"
    )
    parser.add_argument(
        "--more", action="store_true",
        help="convert the checkpoint and read it in other ways, and time each",
    )  # fmt: skip
    parser.add_argument(
        "--tensors", action="store_true",
        help="run each engine once more, and count the bytes of its tensors",
    )  # fmt: skip
    parser.add_argument(
        "--scratch", metavar="DIR",
        help="folder for checkpoints (default: where temporary files are)",
    )  # fmt: skip
    parser.add_out(says="everything that was measured")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    exit_with(main)
