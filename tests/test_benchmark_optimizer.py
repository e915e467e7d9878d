"""The arms of the benchmark of optimizers: what each of them trains, and that judging can fail."""

import argparse
import dataclasses
import importlib.util
import json
import os

import pytest

from benchmarks import optimizer
from benchmarks.optimizer import KINDS, NOT_FIXED, PEER
from benchmarks.optimizer_ranks import ArmRank, Outcome, Phase, write_outcome
from lightning_fsdp.bench import documents
from lightning_fsdp.harness.environment import environment
from tests.support.trainer import on_trainer_ranks

STEPS = 3


def _run(rank, world_size, arms):
    return {arm: ArmRank(arm, rank, STEPS).run() for arm in arms}


def _run_quietly(rank, world_size, arms):
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate warns that it sets it
    return _run(rank, world_size, arms)


def _by_arm(arms):
    by_rank = on_trainer_ranks(_run, 2, arms, timeout_s=280)
    return {arm: [outcomes[arm] for outcomes in by_rank] for arm in arms}


@pytest.fixture(scope="module")
def outcomes():
    return _by_arm([f"{engine}_{kind}" for engine in ("fsdp2", "scratch") for kind in KINDS])


@pytest.mark.parametrize("kind", ["before_fixed", "lightning"])
@pytest.mark.parametrize("engine", ["fsdp2", "scratch"])
def test_a_fixed_arm_ends_in_the_bits_of_an_optimizer_built_after(outcomes, engine, kind):
    for ours, theirs in zip(outcomes[f"{engine}_{kind}"], outcomes["fsdp2_after"], strict=True):
        assert len(ours.losses) == STEPS
        assert ours.losses == theirs.losses
        assert ours.weights == theirs.weights
        assert ours.trained == list(ours.weights)
        assert ours.num_held == ours.num_entries == len(ours.weights) == 52


def test_under_fsdp2_the_arm_that_is_not_fixed_trains_nothing(outcomes):
    for outcome, right in zip(outcomes[NOT_FIXED], outcomes["fsdp2_after"], strict=True):
        assert outcome.trained == []
        assert outcome.num_held == 0
        assert outcome.num_entries == 52
        assert outcome.losses[0] == right.losses[0]
        assert outcome.losses[1:] != right.losses[1:]


def test_the_core_needs_no_fixing(outcomes):
    after, not_fixed = (
        [dataclasses.replace(o, arm="", phases=[], rss_bytes=None) for o in outcomes[arm]]
        for arm in ("scratch_after", "scratch_before_not_fixed")
    )
    assert after == not_fixed


def test_memory_is_that_of_an_optimizer_built_after_and_not_fixed_keeps_the_old_model(outcomes):
    weights = 4 * 1_059_584  # bytes of the whole model
    for engine in ("fsdp2", "scratch"):
        after = outcomes[f"{engine}_after"][0]
        # Weights and two moments, half of each.
        assert 1.5 * weights <= after.resting_bytes < 1.6 * weights
        fixed = outcomes[f"{engine}_before_fixed"][0]
        assert fixed.peak_bytes == pytest.approx(after.peak_bytes, rel=0.05)
        # Less than the smallest shard, but for messages of ranks that agree, still on their way.
        assert fixed.resting_bytes == pytest.approx(after.resting_bytes, abs=250)
    # Half of the new weights and their gradients, and all of the old ones.
    assert outcomes[NOT_FIXED][0].resting_bytes >= 2.0 * weights


def test_the_judge_finds_every_arm_right_and_the_picture_is_drawn(outcomes, tmp_path):
    assert optimizer.judge(outcomes) == {}
    table = optimizer.format_table(list(outcomes), outcomes, {})
    assert "| fsdp2_before_not_fixed   | other, other" in table
    assert table.count("52/52") == 2 * 7
    figure = optimizer.draw({arm: ranks[0].phases for arm, ranks in outcomes.items()})
    figure.savefig(tmp_path / "memory.png")
    assert [len(axes.lines) for axes in figure.axes] == [4, 4]


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="the extra 'peers' is not installed"
)
def test_accelerate_ends_in_the_same_bits(outcomes):
    by_rank = on_trainer_ranks(_run_quietly, 2, [PEER], timeout_s=280)
    compared = {"fsdp2_after": outcomes["fsdp2_after"], PEER: [rank[PEER] for rank in by_rank]}
    assert optimizer.judge(compared) == {}


def _outcome(arm, **changes):
    right = Outcome(
        arm=arm, rank=0, losses=[2.0, 1.0], weights={"a": "1", "b": "2"}, trained=["a", "b"],
        num_entries=2, num_held=2, phases=[Phase("build", [1])],
    )  # fmt: skip
    return dataclasses.replace(right, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": [2.0, 1.0000001]}, "losses .* are not those of fsdp2_after"),
        ({"weights": {"a": "1", "b": "3"}}, "weights are not those of fsdp2_after"),
        ({"trained": ["a"]}, "not trained: b"),
        ({"num_held": 1}, "holds 1 of the model's 2"),
    ],
)
def test_an_arm_that_is_wrong_is_told(changes, reason):
    outcomes = {
        "fsdp2_after": [_outcome("fsdp2_after")],
        "fsdp2_before_fixed": [_outcome("fsdp2_before_fixed", **changes)],
    }
    wrong = optimizer.judge(outcomes)
    assert list(wrong) == ["fsdp2_before_fixed"]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(wrong["fsdp2_before_fixed"])
    assert "WRONG" in optimizer.format_table(list(outcomes), outcomes, wrong)


def test_an_arm_that_is_not_fixed_and_trains_is_told():
    assert optimizer.judge({NOT_FIXED: [_outcome(NOT_FIXED)]}) == {
        NOT_FIXED: "rank 0: expected an optimizer that trains nothing, got 2 tensors"
    }
    silent = _outcome(NOT_FIXED, trained=[], num_held=0)
    assert optimizer.judge({NOT_FIXED: [silent]}) == {}


def test_an_outcome_survives_its_file(tmp_path):
    outcome = _outcome("fsdp2_after")
    documents.write(tmp_path / "rank0.json", outcome)
    assert documents.load(Outcome, tmp_path / "rank0.json") == outcome


def _stopped_in(monkeypatch, *, num_made):
    """Ranks that are made up; somebody presses Ctrl-C once some arms are done."""
    arms = []

    def run(function, num_ranks, arm, *given, folder, timeout_s):
        if len(arms) == num_made:
            raise KeyboardInterrupt
        arms.append(arm)
        folder.mkdir(parents=True)
        documents.write(folder / "rank0.json", _outcome(arm))

    monkeypatch.setattr(optimizer, "run_ranks_apart", run)


def test_after_an_interrupt_the_arms_that_were_done_are_written(tmp_path, monkeypatch, capsys):
    args = argparse.Namespace(engines=["scratch"], ranks=1, steps=2, timeout=1.0, out=tmp_path)
    document = {"command": "optimizer", **environment()}
    _stopped_in(monkeypatch, num_made=2)
    assert optimizer.compare(args, document) == 130
    says = "2 of 4 arms were not run; nothing of scratch_before_not_fixed, scratch_lightning"
    assert capsys.readouterr().err == f"interrupted: {says}\n"
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["arms"]) == ["scratch_after", "scratch_before_fixed"]
    assert results["failures"] == {}, "what has not run has not failed"
    report = (tmp_path / "report.md").read_text()
    assert "FAILED" not in report
    assert f"Interrupted: {says}." in report
    assert (tmp_path / "memory.png").exists()
    _stopped_in(monkeypatch, num_made=0)
    with pytest.raises(KeyboardInterrupt):
        optimizer.compare(args, document)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "argument --ranks: expected 2 or more, got '1'"),
        (["--engines", "fsdp1"], "argument --engines: invalid choice: 'fsdp1'"),
        (["--out", __file__], "argument --out: expected a folder, got the file"),
    ],
)
def test_wrong_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit) as raised:
        optimizer.main(options)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_results_say_what_each_rank_took(tmp_path, monkeypatch):
    def run(function, num_ranks, arm, *given, folder, timeout_s):
        assert function is write_outcome
        assert (num_ranks, given, timeout_s) == (1, (2, str(folder)), 1.0)
        folder.mkdir(parents=True)
        documents.write(folder / "rank0.json", _outcome(arm, phases=[Phase("build", [3, 1])]))

    monkeypatch.setattr(optimizer, "run_ranks_apart", run)
    args = argparse.Namespace(engines=["scratch"], ranks=1, steps=2, timeout=1.0, out=tmp_path)
    optimizer.compare(args, {"command": "optimizer", **environment()})
    (outcome,) = json.loads((tmp_path / "results.json").read_text())["arms"]["scratch_after"]
    assert (outcome["resting_bytes"], outcome["peak_bytes"]) == (1, 3)
    assert outcome["phases"] == [{"name": "build", "live_bytes": [3, 1]}]
