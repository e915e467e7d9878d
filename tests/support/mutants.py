"""Small changes of the core, the tests that notice them, and a run of those tests on one of them.

The list is ``mutants.toml``, by file, as seen from ``lightning_fsdp/core``. A fault of
``faults.py`` is put into running ranks and shows what a kind of test is for; a mutant is put into
the source of a copy of the repository, and shows that one line is held by a test.
"""

import re
import shutil
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from lightning_fsdp.harness.processes import run_command
from tests.support.junit import cases_in

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = Path("lightning_fsdp/core")
TIMEOUT_S = 300.0

Verdict = Literal["noticed", "hangs", "survived", "broken"]


@dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        name: What is done, the end of the sentence "in this file, ...".
        file: As seen from the folder of the core.
        before: Source text that occurs once in the file.
        after: What stands there instead.
        noticed_by: Tests that fail then, below ``tests``; the first of them is enough.
        changes_nothing: Why no test can fail, where none does.
    """

    name: str
    file: str
    before: str
    after: str
    noticed_by: Sequence[str] = ()
    changes_nothing: str = ""

    def applied(self, root: Path = REPOSITORY) -> str:
        """The source of the file with the change.

        Raises:
            ValueError: The place is not there, or not the only one.
        """
        source = (root / CORE / self.file).read_text()
        count = source.count(self.before)
        if count != 1:
            raise ValueError(
                f"mutant {self.name!r}: expected its text once in {self.file}, got it {count} "
                "times. Copy it anew from the file into tests/support/mutants.toml."
            )
        return source.replace(self.before, self.after)


@dataclass(frozen=True)
class Outcome:
    """What the tests said.

    Attributes:
        verdict: ``noticed``: a test failed. ``hangs``: ranks waited for each other, which any test
            would notice. ``survived``: all passed. ``broken``: they did not run.
        says: The test that failed, or what was printed last.
    """

    verdict: Verdict
    says: str
    seconds: float


def load_mutants() -> list[Mutant]:
    """All that are listed, in order."""
    by_file = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return [Mutant(file=file, **entry) for file, entries in by_file.items() for entry in entries]


def try_out(mutant: Mutant, tests: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run tests of a copy of the repository that has the change, until one fails."""
    start = time.perf_counter()
    with TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        for name in ("lightning_fsdp", "recipes", "tests"):
            # Compiled files come along; that of the changed one is older than its source.
            shutil.copytree(REPOSITORY / name, root / name, ignore=_of_other_runs)
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        (root / CORE / mutant.file).write_text(mutant.applied())
        report, log = root / "report.xml", root / "log.txt"
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("--junitxml", str(report), *(f"tests/{test}" for test in tests)),
        ]
        failure = run_command(command, log=log, timeout_s=timeout_s, cwd=root)
        verdict, says = "survived" if failure is None else "broken", ""
        if failure is not None:
            verdict, says = "hangs" if failure.kind == "timed out" else "broken", failure.says
            failed = [c for c in cases_in(report) if c.kind == "failure"] if report.exists() else []
            if failed:
                verdict = "hangs" if _has_only_waited(failed[0].text) else "noticed"
                says = f"{failed[0].file}::{failed[0].name}"
    return Outcome(verdict, says, time.perf_counter() - start)


# Compiled files that a pytest is writing at the moment.
_of_other_runs = shutil.ignore_patterns("*.pyc.*")


def _has_only_waited(text: str) -> bool:
    """Whether a test was ended by its time limit alone, on every rank that did not finish."""
    ends = set(re.findall(r"^(?:E +)?--- rank \d+: (\w+) ---$", text, re.MULTILINE))
    return ends == {"hung"} or "Failed: Timeout" in text
