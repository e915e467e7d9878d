"""Random programs train sharded as they do in plain torch; see ``tests/support/programs``.

A run of the suite draws a few over each transport. More of them:
``pytest tests/test_core_programs.py --programs 3000 --first-program 1000``. They take about 40
minutes on two cores, each 0.2 s (one rank) to 2 s (four). Fifty fail under ``--fault
no_division_by_world_size``, and under others that change values.
"""

import re

import pytest

from tests.support import ranks
from tests.support.programs.drawing import (
    Call,
    MicroBatch,
    Part,
    Program,
    Setup,
    Step,
    draw_program,
)
from tests.support.programs.modules import replicas
from tests.support.programs.running import NotAProgram, run_program
from tests.support.programs.shrinking import shrink
from tests.support.ranks import PLAIN, RanksFailed, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

PER_RUN = 3
WAYS = [
    *((2, "gloo"), (2, "mixed"), (3, "late"), (2, "early"), (1, "gloo")),
    *((2, "late"), (4, "gloo"), (2, PLAIN), (3, "gloo"), (2, "mixed"), (4, "mixed")),
]


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-program")
        last = first + metafunc.config.getoption("--programs")
        runs = [range(start, min(start + PER_RUN, last)) for start in range(first, last, PER_RUN)]
        metafunc.parametrize("seeds", runs, ids=[f"{run[0]}-{run[-1]}" for run in runs])


def _run_each(rank, world_size, each):
    """How many of them plain torch refused."""
    num_refused = 0
    replicas.cache_clear()  # of a call before
    for program in each:
        try:
            run_program(rank, world_size, program)
        except NotAProgram:
            num_refused += 1
    return num_refused


def _failure_of(program, world_size, backend):
    try:
        run_on_ranks(_run_each, world_size, [program], backend=backend, timeout_s=30.0)
    except RanksFailed as failed:
        return str(failed)
    return ""


def _kind_of(failure):
    """The type of the error that the first rank with one raised; nothing for a hang."""
    return re.findall(r"^([\w.]+): ", failure, re.MULTILINE)[:1]


@pytest.mark.timeout(900)
def test_programs_train_as_in_plain_torch(seeds):
    way = WAYS[seeds[0] // PER_RUN % len(WAYS)]
    world_size, backend = way
    drawn = {seed: draw_program(seed) for seed in seeds}
    try:
        refused = run_on_ranks(
            _run_each, world_size, [*drawn.values()], backend=backend, timeout_s=300.0
        )
    except RanksFailed as failed:
        failures = ((seed, _failure_of(drawn[seed], *way)) for seed in seeds)
        seed, failure = next((each for each in failures if each[1]), (None, ""))
        if seed is None:
            raise  # it needs the programs before it
        kind, least = _kind_of(failure), drawn[seed]
        if kind and ranks.active_fault is None:
            least = shrink(least, lambda program: _kind_of(_failure_of(program, *way)) == kind)
        pytest.fail(
            f"Program {seed} on {world_size} ranks over {backend}, made smaller:\n{least}\n\n"
            f"{failure}\n\nFound in:\n{failed}"
        )
    assert refused[0] <= max(2, len(seeds) // 5), "plain torch refuses too many"


def test_a_failing_program_is_made_smaller():
    program = draw_program(3)
    calls = Call(0, "detached")
    needed = Part("group", True, children=(Part("norm", False),), calls=(calls,))
    root = Part("group", True, children=(*program.root.children, needed), calls=program.root.calls)

    def fails(each):
        return any(child.calls == (calls,) for child in each.root.children)

    drawn = Program(root, program.steps, Setup("adamw", stage="zero2", is_meta=True))
    least = shrink(drawn, fails, max_tries=500)
    assert fails(least)
    assert least.root.calls == ()
    only_backward = MicroBatch(syncs=True, num_backwards=1)
    assert least.steps == (Step((only_backward,), sets_to_none=True),)
    assert least.setup == Setup()
