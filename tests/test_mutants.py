"""The list of mutants holds what it says of the core, and the command tells what survives.

``python -m tests.mutants`` runs all of them. Here each is only looked at, and a few are run.
"""

import ast
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from lightning_fsdp.harness.command_line import INTERRUPTED
from tests import mutants as command
from tests.support.jobs import mind_interrupts
from tests.support.mutants import CORE, REPOSITORY, Mutant, load_mutants
from tests.support.processes import run_forked

MUTANTS = load_mutants()
LAYOUT = "test_layout.py::test_every_element_is_owned_by_exactly_one_rank"
RUN_HERE = "a leaf that was freed answers operations"


def test_there_are_enough_of_them_of_all_parts():
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    files = Counter(mutant.file for mutant in MUTANTS)
    assert len(files) >= 15
    assert files["engine/schedule.py"] == max(files.values())


@functools.cache
def _as_it_is(file):
    return ast.dump(ast.parse((REPOSITORY / CORE / file).read_text()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.name}")
def test_each_changes_one_place_of_a_file_and_is_held_by_tests_or_has_a_reason(mutant):
    changed = ast.dump(ast.parse(mutant.applied()))
    assert changed != _as_it_is(mutant.file), "it changes no more than layout and comments"
    assert bool(mutant.noticed_by) != bool(mutant.changes_nothing)


def test_the_tests_that_are_named_exist(tmp_path):
    named = {test for mutant in MUTANTS for test in mutant.noticed_by}
    log = tmp_path / "log.txt"
    assert run_forked(_collect, sorted(named), log=log, timeout_s=280) == 0, log.read_text()[-4000:]


def _collect(tests):
    os.environ["PYTEST_ADDOPTS"] = ""
    os.chdir(REPOSITORY)
    options = ["--collect-only", "-q", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are there
    return int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))


def test_a_place_that_is_not_there_or_not_the_only_one_is_refused():
    for before in ("no such text", "return"):
        mutant = Mutant("nothing", "engine/layout.py", before, "")
        with pytest.raises(
            ValueError, match=r"'nothing': expected its text once in engine/layout\.py"
        ):
            mutant.applied()


def test_the_command_tells_what_is_noticed_what_survives_and_searches(monkeypatch, capsys):
    """Two that are noticed: one on ranks, by the test that is named, and one by those searched."""
    (listed,) = [mutant for mutant in MUTANTS if mutant.name == RUN_HERE]
    file, begins = "tensors/flat_chunks.py", "start % n == 0 and "
    harmless = Mutant("says it otherwise", file, begins, "not start % n and ", [LAYOUT])
    harmful = Mutant("begins within a row", file, begins, "")
    monkeypatch.setattr(command, "load_mutants", lambda: [listed, harmless, harmful])
    assert command.main(["--only", RUN_HERE, "says it"]) == 1
    printed = capsys.readouterr().out
    assert f"| noticed  | {listed.noticed_by[0]}" in printed
    assert re.search(
        r"^\| tensors/flat_chunks.py \| says it otherwise +\| survived", printed, re.MULTILINE
    )
    monkeypatch.setattr(command, "SEARCHED", ["lifecycle", "layout"])
    assert command.main(["--search", "--only", "within a row"]) == 0
    assert "noticed | test_layout.py::test_boxes_" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_behind_when_the_command_is_ended(kind, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.mutants", "--only", RUN_HERE],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
        preexec_fn=mind_interrupts,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("mutant-*/log.txt")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(kind)
    assert process.wait(30) == INTERRUPTED
    assert list(tmp_path.iterdir()) == []
