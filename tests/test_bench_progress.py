import io

import pytest

from lightning_fsdp.bench import progress
from lightning_fsdp.bench.arms import choose_arms
from lightning_fsdp.bench.largest_batch import find_largest
from lightning_fsdp.bench.progress import in_turns
from lightning_fsdp.bench.records import RankMeasurement, Run
from tests.support.bench_results import workload


def arms():
    return choose_arms(engines=["scratch"], zero_stages=[3], batch_sizes=[1], grad_accums=[1])


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


def test_the_bar_says_which_run_and_how_long_all_will_take(screen):
    seen = [(repeat, arm.name) for repeat, arm in in_turns(arms(), 2)]
    assert seen == [(r, name) for r in (0, 1) for name in
                    ("single_b1_a1", "ddp_b1_a1", "scratch_zero3_b1_a1")]  # fmt: skip
    told = screen.getvalue().split("\r")
    assert any("single_b1_a1, round 1/2: 0/6 " in line and "about ? left" in line for line in told)
    assert any("single_b1_a1, round 2/2: 3/6 " in line and "about 00:00 l" in line for line in told)


def test_a_search_has_a_bar_over_arms(screen, tmp_path):
    def run(arm, workload, out):
        ranks = [RankMeasurement(0, 1, [], [], [], peak_bytes=arm.batch_size)]
        return Run(arm.name, 0, 1.0, tmp_path / "log.txt", ranks=ranks)

    _, *searched = arms()
    found = find_largest(searched, workload(), run, cap=8, device_bytes=5, out=tmp_path)
    assert [each.search.largest for each in found] == [5, 5]
    assert "ddp_a1: 0/2 " in screen.getvalue()
    assert "scratch_zero3_a1: 1/2 " in screen.getvalue()
