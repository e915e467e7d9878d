import io

import pytest

from lightning_fsdp.bench import runner
from lightning_fsdp.bench.arms import choose_arms
from lightning_fsdp.bench.runner import in_turns
from lightning_fsdp.harness.command_line import Interrupted


def arms():
    return choose_arms(engines=["scratch"], zero_stages=[3], batch_sizes=[1], grad_accums=[1])


@pytest.fixture
def screen(monkeypatch):
    """What somebody who watches sees of a bar."""
    screen = io.StringIO()
    plain = runner.tqdm
    monkeypatch.setattr(
        runner, "tqdm",
        lambda **options: plain(**{**options, "disable": False}, file=screen, mininterval=0),
    )  # fmt: skip
    return screen


def test_the_bar_says_which_run_and_how_long_all_will_take(screen):
    named = {arm.name: arm for arm in arms()}
    made, not_made = in_turns(named, 2, lambda arm, repeat: f"{repeat}: {arm.name}")
    assert made == [(arm, f"{repeat}: {arm.name}") for repeat in (0, 1) for arm in arms()]
    assert not_made is None
    told = screen.getvalue().split("\r")
    assert any("single_b1_a1, round 1/2: 0/6 " in line and "about ? left" in line for line in told)
    assert any("single_b1_a1, round 2/2: 3/6 " in line and "about 00:00 l" in line for line in told)


def test_searches_have_a_bar_without_rounds(screen):
    in_turns({"ddp_a1": None, "scratch_zero3_a1": None}, 1, lambda arm, repeat: None)
    assert "ddp_a1: 0/2 " in screen.getvalue()
    assert "scratch_zero3_a1: 1/2 " in screen.getvalue()


def test_after_an_interrupt_there_is_what_was_made_unless_there_is_nothing(screen):
    def run(last, repeat):
        if repeat == last:
            raise KeyboardInterrupt
        return repeat

    made = [(9, 0), (1, 0), (9, 1)]
    assert in_turns({"a": 9, "b": 1}, 2, run) == (made, "1 of 4 runs were not made")
    assert in_turns({"a": 9, "b": 1}, 2, run, "arms are not") == (made, "1 of 4 arms are not")
    with pytest.raises(KeyboardInterrupt):
        in_turns({"a": 0}, 2, run)


def test_a_part_of_a_result_that_an_interrupt_leaves_is_there_and_counts_as_not_made(screen):
    def run(turn, repeat):
        if turn == "y":
            raise Interrupted("half of y")
        return turn

    made = [("x", "x"), ("y", "half of y")]
    expected = (made, "2 of 3 runs were not made; nothing of c")
    assert in_turns({"a": "x", "b": "y", "c": "z"}, 1, run) == expected
    assert in_turns({"b": "y"}, 1, run) == (made[1:], "1 of 1 runs were not made")
