"""The pages for readers, at the top and in docs/, and what is code in them.

A block is what stands between two fences; blocks of Python are marked ``python``, commands and
their output are not marked. A record is what ``benchmarks/update_tables.py`` or ``make guide`` put
between two markers: it says how something was measured, whatever the commands are today.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_RECORD = re.compile(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", re.DOTALL)
_PROGRAMS = ("make", "perf", "pip", "pytest", "python", "sbatch", "torchrun")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    return _BLOCK.findall(PAGES[page])


def python_blocks(page: str) -> list[str]:
    """Each block of Python of a page."""
    return [code for language, code in blocks(page) if language == "python"]


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command of a page, and of options that stand alone; none of records."""
    lines = [
        line.removeprefix("$ ")
        for language, code in blocks(page)
        if not language
        for line in code.replace("\\\n", " ").splitlines()
    ]
    prose = _BLOCK.sub("", _RECORD.sub("", PAGES[page]))
    for line in [*lines, *re.findall(r"`([^`]+)`", prose)]:
        if re.match(rf"({'|'.join(_PROGRAMS)})\b|--\w", line):
            yield shlex.split(line, comments=True)


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its own."""
    section = PAGES[page].split(f"\n## {heading}\n")[1]
    rows = re.search(r"^\|.*\n\|[ |-]*\n((?:\|.*\n)*)", section, re.MULTILINE)[1]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()]
