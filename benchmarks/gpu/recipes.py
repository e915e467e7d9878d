"""The part ``recipes``: the large YAMLs for some steps, a checkpoint, and on from there.

::

    fit       1 ............ 15 ..... 20    losses; a checkpoint after step 15; text at the end
    resumed                  15 ..... 20    the same losses, from the checkpoint
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import end_of, run_job
from benchmarks.gpu.record import DONE, FAILED, Record
from lightning_fsdp.harness.processes import Failure

STEPS, SAVED_AFTER = 20, 15
MOST_APART = 0.02  # of losses in nats, where kernels add in an order of their own
RECIPE_LIMIT_S = 250.0  # two of them are done in the time of the part
_FOLDER = Path(__file__).resolve().parents[2] / "recipes"
# New weights for both, since nothing can be fetched; each keeps what else its YAML says.
_OVERRIDES = {
    "gpt2_xl_zero3": [],
    "qwen_1_5b_zero3": [
        "--model.pretrained=null", "--model.size=1.5b", "--data.tokenizer=null",
        "--data.vocab_size=151936",
    ],
}  # fmt: skip
_SMALL = [
    "--trainer.accelerator=cpu", "--trainer.accumulate_grad_batches=1", "--data.vocab_size=300",
    "--data.standard_library_mb=0.1", "--data.seq_len=16", "--data.batch_size=2",
    "--data.num_workers=0",
]  # fmt: skip
_SMALL_SIZE = {"gpt2_xl_zero3": "nano", "qwen_1_5b_zero3": "tiny"}
NAMES = tuple(_OVERRIDES)


def run_recipes(record: Record, *, device: str, method: str, deadline: float) -> None:
    """Run what is not done yet.

    Args:
        record: Takes a result per recipe.
        device: ``cpu`` or ``cuda``.
        method: To start processes by.
        deadline: Of ``time.monotonic()``.
    """
    todo = [name for name in NAMES if record.state_of(name) != DONE]
    todo.sort(key=lambda name: record.state_of(name) is not None)
    for name in todo:
        left_s = deadline - time.monotonic()
        limit_s = min(left_s, RECIPE_LIMIT_S)
        with tempfile.TemporaryDirectory() as folder:
            result = _run(name, Path(folder), device, method, limit_s=limit_s)
        if result is None:
            if limit_s < RECIPE_LIMIT_S:
                return  # the time is over for all of them, and not for this one
            result = {"state": FAILED, "says": f"took longer than {limit_s:.0f} s"}
        record.put(name, **result)
        print(f"recipes: {name}: {result['state']} {result.get('says', '')}"[:160])


def _run(
    name: str, folder: Path, device: str, method: str, *, limit_s: float
) -> dict[str, Any] | None:
    """The result of one recipe; ``None`` where the time was over before."""
    deadline = time.monotonic() + limit_s
    result: dict[str, Any] = {"arguments": _arguments(name, folder, "fit", device)}
    for run, more in (("fit", ()), ("resumed", (f"--ckpt_path={folder / 'saved.ckpt'}",))):
        log, start = folder / f"{run}.txt", time.monotonic()
        arguments = [*_arguments(name, folder, run, device), *more]
        left_s = max(1.0, deadline - start)
        failure = run_job(_train, arguments, log=log, limit_s=left_s, method=method)
        result[f"{run}_wall_s"] = time.monotonic() - start
        if failure is not None and failure.kind == "timed out":
            return None
        if failure is None:
            result[run] = _logged(folder / run / "metrics.csv")
            failure = _misses(result, run)
        if failure is not None:
            says = f"{run}: {failure.says}"
            return {**result, "state": FAILED, "says": says, "log": end_of(log)}
        if run == "fit":
            saved = folder / "saved.ckpt"
            result["checkpoint_bytes"] = sum(f.stat().st_size for f in saved.rglob("*"))
            result["text"] = re.findall(r"Sample of rank 0: (.*)", log.read_text())
    rest = result["fit"]["train/loss"][SAVED_AFTER:]
    pairs = zip(rest, result["resumed"]["train/loss"], strict=True)
    result["most_apart"] = max(abs(one - other) for one, other in pairs)
    if not result["most_apart"] <= MOST_APART:
        says = f"resumed losses are {result['most_apart']:.3g} from those of the first run"
        return {**result, "state": FAILED, "says": says}
    if not result["text"]:
        return {**result, "state": FAILED, "says": "no text was sampled"}
    return {**result, "state": DONE}


def _train(arguments: list[str]) -> None:
    """``python -m recipes.train``, in this process."""
    from recipes.train import main

    sys.argv = ["recipes/train.py", *arguments]
    main()


def _arguments(name: str, folder: Path, run: str, device: str) -> list[str]:
    saving: dict[str, Any] = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {
            "dirpath": str(folder), "filename": "saved", "every_n_train_steps": SAVED_AFTER,
        },
    }  # fmt: skip
    sampling = {"class_path": "recipes.sample.SampleText"}
    small = [*_SMALL, f"--model.size={_SMALL_SIZE[name]}"] if device == "cpu" else []
    return [
        "fit",
        f"--config={_FOLDER / name}.yaml",
        *_OVERRIDES[name],
        f"--data.cache_dir={folder / 'cache'}",
        "--trainer.devices=1",
        f"--trainer.max_steps={STEPS}",
        "--trainer.limit_val_batches=0",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.log_every_n_steps=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        f"--trainer.callbacks={json.dumps([saving, sampling] if run == 'fit' else [])}",
        f"--trainer.enable_checkpointing={str(run == 'fit').lower()}",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        f"--trainer.logger.name={run}",
        "--trainer.logger.version=",
        *small,
    ]


def _logged(path: Path) -> dict[str, list[float]]:
    """What a run logged, by name."""
    logged: dict[str, list[float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    logged.setdefault(name, []).append(float(value))
    return logged


def _misses(result: dict[str, Any], run: str) -> Failure | None:
    """What is wrong with the losses of a run."""
    losses: Sequence[float] = result[run].get("train/loss", [])
    expected = STEPS if run == "fit" else STEPS - SAVED_AFTER
    if len(losses) != expected:
        return Failure("error", f"expected losses of {expected} steps, got {len(losses)}")
    if not all(map(math.isfinite, losses)):
        return Failure("error", f"expected finite losses, got {losses}")
    return None
