"""Arms of a benchmark take turns in processes of their own."""

import itertools
import os
import time

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from benchmarks.turns import take_turns


def _note_turns(arm, rank):
    if arm == "broken":
        raise ValueError("this arm cannot be built")

    def take_turn(number):
        begin = time.monotonic()  # of the machine, so that processes can be compared
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, os.getpid())
        time.sleep(0.1)  # in which another arm's turn would begin
        return {"number": number, "pids": everybody, "begin": begin, "end": time.monotonic()}

    return take_turn


def test_each_arm_has_its_own_processes_and_one_turn_after_the_other(tmp_path):
    found = take_turns(_note_turns, ["a", "b"], 2, [7, 8, 9], str(tmp_path))
    assert {arm: [turn["number"] for turn in turns] for arm, turns in found.items()} == {
        "a": [7, 8, 9],
        "b": [7, 8, 9],
    }
    pids = {arm: {tuple(turn["pids"]) for turn in turns} for arm, turns in found.items()}
    assert len(pids["a"]) == len(pids["b"]) == 1, "an arm keeps its processes"
    assert len({*pids["a"].pop(), *pids["b"].pop(), os.getpid()}) == 5
    in_turns = [turn for pair in zip(found["a"], found["b"], strict=True) for turn in pair]
    for before, after in itertools.pairwise(in_turns):
        assert before["end"] <= after["begin"], "only one arm at a time"


def test_an_arm_that_fails_ends_all_of_them(tmp_path):
    with pytest.raises(ProcessRaisedException, match="this arm cannot be built"):
        take_turns(_note_turns, ["a", "broken"], 1, [7], str(tmp_path))
