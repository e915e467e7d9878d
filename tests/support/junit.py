"""What a pytest that another one started says of its tests: the file of ``--junitxml``."""

import xml.etree.ElementTree as ET
from pathlib import Path


class Case:
    """A test as pytest's report has it."""

    def __init__(self, element: ET.Element) -> None:
        self.name = element.get("name", "")
        self.file = element.get("classname", "").rpartition(".")[2] + ".py"
        outcome = next((e for e in element if e.tag in ("failure", "error", "skipped")), None)
        self.kind = "passed" if outcome is None else outcome.tag
        self.text = "" if outcome is None else outcome.text or ""


def cases_in(report: Path) -> list[Case]:
    """All tests of a report, in the order in which they ran."""
    return [Case(element) for element in ET.parse(report).iter("testcase")]
