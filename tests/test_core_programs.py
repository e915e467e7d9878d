"""Random programs train sharded as they do in plain torch; see ``tests/support/programs``.

More of them: ``pytest tests/test_core_programs.py --programs 3000 --first-program 1000``.
"""

import re
import traceback

import pytest

from tests.support.programs import running
from tests.support.programs.drawing import (
    Call,
    MicroBatch,
    Part,
    Program,
    Setup,
    Step,
    draw_program,
)
from tests.support.programs.shrinking import shrink
from tests.support.ranks import PLAIN, RanksFailed, run_on_ranks

PER_RUN = 20
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
    """What was wrong, by seed or number; and how many plain torch refused."""
    wrong, num_refused = {}, 0
    for key, program in each.items():
        try:
            running.run_program(rank, world_size, program)
        except running.NotAProgram:
            num_refused += 1
        except Exception:  # noqa: BLE001 (any error of a program that plain torch runs)
            wrong[key] = traceback.format_exc()
    return wrong, num_refused


def _fails_alike(program, world_size, backend, text):
    """Whether another program ends in the same type of error, not one of its own making."""
    try:
        wrong, _ = run_on_ranks(_run_each, world_size, {0: program}, backend=backend)[0]
    except RanksFailed:  # it hangs, or ends the process
        return False
    return bool(wrong) and _type_of(wrong[0]) == _type_of(text)


def _type_of(text):
    return re.findall(r"^([\w.]+):", text, re.MULTILINE)[-1:]


@pytest.mark.timeout(600)
def test_programs_train_as_in_plain_torch(seeds):
    world_size, backend = WAYS[seeds[0] // PER_RUN % len(WAYS)]
    drawn = {seed: draw_program(seed) for seed in seeds}
    by_rank = run_on_ranks(_run_each, world_size, drawn, backend=backend, timeout_s=300.0)
    wrong = {seed: text for found, _ in by_rank for seed, text in found.items()}
    if wrong:
        seed = min(wrong)
        how = world_size, backend, wrong[seed]
        least = shrink(drawn[seed], lambda program: _fails_alike(program, *how))
        pytest.fail(
            f"{len(wrong)} of {len(seeds)} programs on {world_size} ranks over {backend}: "
            f"{sorted(wrong)}. Program {seed}, made smaller:\n{least}\n\n{wrong[seed]}"
        )
    assert by_rank[0][1] <= len(seeds) // 5, "plain torch refuses too many"


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
