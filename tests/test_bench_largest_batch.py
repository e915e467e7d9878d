"""The search over arms, with runs made up here; one test runs the command itself.

How a run says that it ran out of memory is tested here as well.
"""

import json
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_fsdp.bench import largest_batch
from lightning_fsdp.bench.__main__ import main
from lightning_fsdp.bench.arms import Arm, Workload
from lightning_fsdp.bench.largest_batch import find_largest, format_found, write_found
from lightning_fsdp.bench.records import RankMeasurement, Run
from lightning_fsdp.bench.runner import run_arm
from lightning_fsdp.harness import processes
from lightning_fsdp.harness.environment import environment
from lightning_fsdp.harness.failures import RankFailure
from tests.support import warm

WORKLOAD = Workload(
    config=Path("recipe.yaml"), num_ranks=2, accelerator="cpu", precision="32-true",
    warmup_steps=5, timed_steps=20,
    profiled_steps=0, observed_steps=2,
)  # fmt: skip
ARMS = [
    Arm(engine=engine, zero_stage=stage, batch_size=1, grad_accum=1)
    for engine, stage in (("ddp", None), ("scratch", 3))
]
BYTES_PER_SEQUENCE = 100


class Runs:
    """Arms whose second rank takes 100 bytes a sequence; some fail."""

    def __init__(self, *, failing_from=None, failing_at_length_from=None):
        self.failing_from, self.failing_at_length_from = failing_from, failing_at_length_from
        self.made = []

    def __call__(self, arm, workload, out):
        self.made.append((arm.batch_size, workload.total_steps, out.name))
        is_full = workload == WORKLOAD
        limit = self.failing_at_length_from if is_full else self.failing_from
        if limit is not None and arm.batch_size >= limit:
            failure = "exit code 1: boom"
            return Run(arm.name, 0, 1.0, Path("log.txt"), failure=failure, failure_kind="error")
        peaks = [arm.batch_size * n for n in (BYTES_PER_SEQUENCE // 2, BYTES_PER_SEQUENCE)]
        ranks = [RankMeasurement(r, 2, [], [], [], peak_bytes=peak) for r, peak in enumerate(peaks)]
        return Run(arm.name, 0, 1.0, Path("log.txt"), ranks=ranks)


def search(runs, *, arms=ARMS[:1], cap=64, device_bytes=750):
    out = Path("out")
    return [
        find_largest(arm, WORKLOAD, runs, cap=cap, device_bytes=device_bytes, out=out)
        for arm in arms
    ]


def test_the_rank_that_takes_most_decides_and_what_is_found_was_run_at_full_length():
    runs = Runs()
    found = search(runs, arms=ARMS)
    assert [each.search.largest for each in found] == [7, 7]
    assert [each.arm for each in found] == ["ddp_a1", "scratch_zero3_a1"]
    assert runs.made[:6] == [
        (1, 4, "short"), (2, 4, "short"), (4, 4, "short"), (8, 4, "short"), (6, 4, "short"),
        (7, 4, "short"),
    ]  # fmt: skip
    assert runs.made[6] == (7, WORKLOAD.total_steps, "full")


def test_a_failed_run_is_a_reason_like_any_other():
    (found,) = search(Runs(failing_from=4))
    assert found.search.largest == 3
    assert found.search.limit == "4: exit code 1: boom"


def test_what_fails_at_full_length_is_given_up():
    (found,) = search(Runs(failing_at_length_from=5))
    assert found.search.largest == 4
    assert found.search.limit == "at full length, 5: exit code 1: boom"


def test_nothing_is_found_where_the_smallest_fails(tmp_path):
    found = search(Runs(failing_from=1))
    assert found[0].search.largest is None
    write_found(tmp_path, found, {"command": "bench", **environment()})
    (arm,) = json.loads((tmp_path / "largest_batch.json").read_text())["arms"]
    assert arm["largest"] is None
    assert arm["tried"] == [
        {
            "size": 1, "failure": "exit code 1: boom", "is_verification": False,
            "failure_kind": "error", "peak_bytes": None, "wall_s": 1.0, "log": "log.txt",
        }
    ]  # fmt: skip
    assert "none" in format_found(found)


def test_a_run_that_did_not_measure_its_memory_does_not_fit():
    def run(arm, workload, out):
        ranks = [
            RankMeasurement(rank, 2, [], [], [], peak_bytes=n) for rank, n in ((0, 1), (1, None))
        ]
        return Run(arm.name, 0, 1.0, Path("log.txt"), ranks=ranks)

    (found,) = search(run)
    assert found.search.largest is None
    assert found.search.limit == "1: its memory was not measured"


def test_after_an_interrupt_the_attempts_so_far_are_written(tmp_path, monkeypatch, capsys):
    runs = Runs()

    def run_arm(arm, workload, *, repeat, out, timeout_s):
        if len(runs.made) == 3:
            raise KeyboardInterrupt
        return runs(arm, workload, out)

    monkeypatch.setattr(largest_batch, "run_arm", run_arm)
    given = ["--device-memory", "1GB", "--engines", "scratch", "--stages", "3"]
    assert main(["largest-batch", *given, "--out", str(tmp_path)]) == 130
    assert "interrupted: 2 of 2 arms were not searched to the end" in capsys.readouterr().err
    (ddp,) = json.loads((tmp_path / "largest_batch.json").read_text())["arms"]
    assert (ddp["arm"], ddp["largest"], ddp["limit"]) == ("ddp_a1", 4, "8: interrupted")
    tried = [(each["size"], each["failure"], each["peak_bytes"]) for each in ddp["tried"]]
    assert tried == [(1, None, 100), (2, None, 200), (4, None, 400), (8, "interrupted", None)]
    assert "| 8: interrupted " in (tmp_path / "largest_batch.md").read_text()


@pytest.fixture
def forked(monkeypatch):
    """Runs in processes that have torch already; ``test_bench_arms.py`` has them start anew."""
    monkeypatch.setattr(processes, "run_command", warm.run_command)


RECIPE = """\
seed_everything: 1
model:
  class_path: recipes.gpt2.GPT2
  init_args: {size: nano}
data: {vocab_size: 300, seq_len: 128, standard_library_mb: 0.3}
"""


@pytest.mark.timeout(400)
def test_the_command_finds_one_and_says_where_there_is_none(tmp_path, capsys, forked):
    # One sequence takes 27 MB under DDP and 16 MB here, two take 24 MB.
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE)
    arguments = ["largest-batch", "--max-batch-size", "4", "--device-memory", "20MB"]
    arguments += ["--recipe", str(recipe), "--steps", "2", "--warmup", "0"]
    arguments += ["--engines", "scratch", "--stages", "3", "--out", str(tmp_path / "out")]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "error: ddp_a1: no batch fits; 1: takes 2" in printed.err
    ddp, scratch = json.loads((tmp_path / "out" / "largest_batch.json").read_text())["arms"]
    assert (ddp["arm"], ddp["largest"], len(ddp["tried"])) == ("ddp_a1", None, 1)
    assert ddp["tried"][0]["peak_bytes"] > 20e6
    assert (scratch["arm"], scratch["largest"]) == ("scratch_zero3_a1", 1)
    tried = [(t["size"], t["is_verification"], t["failure"] is None) for t in scratch["tried"]]
    assert tried == [(1, False, True), (2, False, False), (1, True, True)]
    assert 10e6 < scratch["tried"][2]["peak_bytes"] < 20e6 < scratch["tried"][1]["peak_bytes"]
    for attempt in scratch["tried"]:
        measured = json.loads(Path(attempt["log"]).with_name("rank1.json").read_text())
        assert len(measured["losses"]) == 4  # optimizer steps, short or full
    assert f"| {scratch['limit']} " in (tmp_path / "out" / "largest_batch.md").read_text()


# -- why a run failed --------------------------------------------------------------------------


class Fails(L.Callback):
    """Given to a run by its command line: raises on rank 1, in the second step."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 1:
            if self.how == "by type":
                bytearray(1 << 62)
            raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize(
    ("how", "kind", "failure"),
    [
        ("by type", "out of memory", "out of memory on rank 1: MemoryError"),
        ("by its text only", "error", "exit code 1: "),
    ],
)
def test_a_run_out_of_memory_is_known_by_the_type_that_a_rank_raised(
    tmp_path, forked, how, kind, failure
):
    callback = {"class_path": f"{__name__}.Fails", "init_args": {"how": how}}
    overrides = ("--trainer.callbacks+", json.dumps(callback))
    workload = replace(
        WORKLOAD, config=Path("recipes/gpt2_zero3.yaml"), timed_steps=2, overrides=overrides
    )
    run = run_arm(ARMS[1], workload, repeat=0, out=tmp_path, timeout_s=200)
    assert run.failure_kind == kind, run.log.read_text()
    assert run.failure.startswith(failure)
    assert "CUDA out of memory" in run.log.read_text() or kind == "out of memory"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("no room\nfor 2 GiB"), ("torch.OutOfMemoryError", "no room", True)),
        (MemoryError(), ("MemoryError", "", True)),
        (RuntimeError("out of memory"), ("RuntimeError", "out of memory", False)),
        (KeyError("x"), ("KeyError", "'x'", False)),
    ],
)
def test_a_failure_is_told_by_type(error, expected):
    assert RankFailure.of(3, error) == RankFailure(3, *expected)


@pytest.mark.parametrize("is_explicit", [True, False])
def test_what_led_to_a_failure_counts(is_explicit):
    first, then = MemoryError("here"), RuntimeError("unit 'h.0' could not be gathered")
    then.__cause__, then.__context__ = (first, None) if is_explicit else (None, first)
    assert RankFailure.of(0, then) == RankFailure(0, "MemoryError", "here", True)


def test_a_chain_of_errors_that_closes_ends():
    first, then = RuntimeError("a"), RuntimeError("b")
    first.__cause__, then.__cause__ = then, first
    assert not RankFailure.of(0, first).is_out_of_memory
