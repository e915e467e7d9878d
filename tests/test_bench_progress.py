import io

import pytest

from lightning_fsdp.bench import progress
from lightning_fsdp.bench.arms import choose_arms
from lightning_fsdp.bench.largest_batch import find_largest
from lightning_fsdp.bench.progress import in_turns, time_left
from lightning_fsdp.bench.records import RankMeasurement, Run
from tests.support.bench_results import workload


def arms(batch_sizes):
    return choose_arms(
        engines=["scratch"], zero_stages=[3], batch_sizes=batch_sizes, grad_accums=[1]
    )


def test_the_time_left_is_unknown_before_the_first_run_ended():
    assert time_left({}, arms([1])) is None


def test_an_arm_that_has_run_takes_as_long_again():
    single, ddp, scratch = arms([1])
    spent = {single: [300.0], ddp: [10.0], scratch: [20.0, 24.0]}
    assert time_left(spent, [single, scratch]) == pytest.approx(322)
    assert time_left(spent, []) == 0


def test_an_arm_that_has_not_run_takes_as_long_as_one_of_its_size_would():
    one, _, _, two, _, _, eight, *_ = arms([1, 2, 8])
    # Ten seconds to start, and five per sequence.
    assert time_left({one: [15.0], two: [20.0]}, [eight, eight]) == pytest.approx(100)
    assert time_left({one: [15.0]}, [eight]) == pytest.approx(15), "one size tells no slope"


@pytest.fixture
def screen(monkeypatch):
    """What somebody who watches sees of a bar."""
    screen = io.StringIO()
    plain = progress.tqdm
    monkeypatch.setattr(
        progress, "tqdm",
        lambda **options: plain(**{**options, "disable": False}, file=screen, mininterval=0),
    )  # fmt: skip
    return screen


def test_the_bar_says_until_when_few_long_runs_will_last(monkeypatch, screen):
    """A bar's own guess would be the mean pace: here 110 s for each run to come."""
    clock = iter([0.0, 200.0, 200.0, 220.0, 220.0, 230.0] + [230.0 + i for i in range(6)])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    seen = [(repeat, arm.name) for repeat, arm in in_turns(arms([1]), 2)]
    assert seen == [(r, name) for r in (0, 1) for name in
                    ("single_b1_a1", "ddp_b1_a1", "scratch_zero3_b1_a1")]  # fmt: skip
    told = screen.getvalue()
    assert "single_b1_a1, round 1/2:" in told
    assert "time left not known yet" in told
    # After the first round of 200, 20 and 10 s the second is known to take as long.
    (line,) = [
        line for line in told.split("\r") if "single_b1_a1, round 2" in line and "left" in line
    ][:1]
    assert " 3/6 " in line
    assert "about 4 min left, until " in line


def test_a_search_has_a_bar_over_arms(screen, tmp_path):
    def run(arm, workload, out):
        ranks = [RankMeasurement(0, 1, [], [], [], peak_bytes=arm.batch_size)]
        return Run(arm.name, 0, 1.0, tmp_path / "log.txt", ranks=ranks)

    _, *searched = arms([1])
    found = find_largest(searched, workload(), run, cap=8, device_bytes=5, out=tmp_path)
    assert [each.search.largest for each in found] == [5, 5]
    told = screen.getvalue()
    assert "ddp_a1: 0/2 " in told
    assert "time left not known yet" in told
    (line, *_) = [line for line in told.split("\r") if "scratch_zero3_a1: 1/2 " in line]
    assert "about 0 s left, until " in line
