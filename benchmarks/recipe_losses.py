"""What the recipes learn: the same loss under every strategy as in one process without sharding.

python -m benchmarks.recipe_losses --out benchmarks/results/recipe_losses.json

GPT-2 nano and Qwen2.5 tiny on the default corpus. All see the same global batches; exits with an
error where a validation loss is more than 2% off that of the single process, or did not fall.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command import BenchmarkParser, write_record
from lightning_fsdp.harness.command_line import at_least
from lightning_fsdp.harness.processes import run_command
from lightning_fsdp.strategies.registry import NAMES

ROOT = Path(__file__).parent.parent
RECIPES = {"GPT-2 nano": "gpt2_zero3", "Qwen2.5 tiny": "qwen_zero3"}
STRATEGIES = tuple(name for name in NAMES if name != "scratch_fsdp")
SINGLE = "one process"
NUM_RANKS = 2
NUM_VAL_BATCHES = 16  # the same sequences under all, as a global batch is as large
TOLERANCE = 0.02
TIMEOUT_S = 600.0


def train(recipe: str, strategy: str, cache: Path, *, num_steps: int, batch_size: int) -> Any:
    """The losses of one run.

    Args:
        recipe: Name of a YAML.
        strategy: Of the Trainer; or ``SINGLE``, which takes the sequences of all ranks.
        cache: Where the tokenised corpus is kept.
        num_steps: Optimizer steps.
        batch_size: Sequences in a global batch.

    Returns:
        ``first``, ``last``: training losses; ``validation``: at the end.
    """
    num_ranks = 1 if strategy == SINGLE else NUM_RANKS
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "recipes.train", "fit"),
            *("--config", str(ROOT / "recipes" / f"{recipe}.yaml")),
            *("--trainer.strategy", "auto" if strategy == SINGLE else strategy),
            *("--trainer.devices", str(num_ranks)),
            *("--trainer.max_steps", str(num_steps)),
            *("--trainer.val_check_interval", str(num_steps)),
            *("--trainer.limit_val_batches", str(NUM_VAL_BATCHES)),
            *("--trainer.num_sanity_val_steps", "0"),
            *("--trainer.log_every_n_steps", "1"),
            *("--trainer.callbacks", "[]"),
            *("--trainer.enable_checkpointing", "false"),
            *("--trainer.enable_progress_bar", "false"),
            *("--trainer.logger", "lightning.pytorch.loggers.CSVLogger"),
            *("--trainer.logger.save_dir", folder),
            *("--data.batch_size", str(batch_size // num_ranks)),
            *("--data.cache_dir", str(cache)),
        ]
        log = Path(folder) / "log.txt"
        failure = run_command(command, log=log, timeout_s=TIMEOUT_S)
        if failure is not None:
            sys.exit(f"{recipe} under {strategy}: {failure}\n{log.read_text()[-2000:]}")
        (path,) = Path(folder).rglob("metrics.csv")
        with path.open() as file:
            rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    (validation,) = [float(row["val/loss"]) for row in rows if row["val/loss"]]
    return {"first": losses[0], "last": losses[-1], "validation": validation}


def mistakes(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the losses, in words."""
    found = []
    for row in rows:
        (reference,) = [r for r in rows if r["model"] == row["model"] and r["strategy"] == SINGLE]
        name, loss = f"{row['model']} under {row['strategy']}", row["validation"]
        expected = reference["validation"]
        if abs(loss - expected) > TOLERANCE * expected:
            found.append(f"{name}: expected a loss within 2% of {expected:.4f}, got {loss:.4f}.")
        if loss > 0.85 * row["first"]:
            found.append(f"{name}: expected a loss that falls from {row['first']:.4f}, got {loss}.")
    return found


def main() -> None:
    """Train all, write what came out, and judge it."""
    options = make_parser().parse(None)
    arms = [(model, strategy) for model in RECIPES for strategy in (SINGLE, *STRATEGIES)]
    rows = []
    for model, strategy in tqdm(arms):
        losses = train(
            RECIPES[model],
            strategy,
            options.cache.resolve(),
            num_steps=options.steps,
            batch_size=options.batch_size,
        )
        rows.append({"model": model, "strategy": strategy, **losses})
    document = {
        "num_steps": options.steps,
        "num_ranks": NUM_RANKS,
        "batch_size": options.batch_size,
        "rows": rows,
    }
    write_record(options.out, "recipe_losses", document)
    if wrong := mistakes(rows):
        sys.exit("\n".join(wrong))


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "recipe_losses",
        __doc__,
        examples=["--steps 20", "--out benchmarks/results/recipe_losses.json"],
    )
    for option, default, says in (
        ("--steps", 50, "optimizer steps of each run"),
        ("--batch-size", 8, "sequences per step, of all ranks together"),
    ):
        parser.add_argument(option, type=at_least(1), default=default, metavar="N", help=says)
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/cache"), metavar="DIR",
        help="folder of the tokenized corpus; made where it is missing",
    )  # fmt: skip
    parser.add_out(Path("runs/recipe_losses.json"), says="losses of each run")
    return parser


if __name__ == "__main__":
    main()
