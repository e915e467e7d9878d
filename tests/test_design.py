"""A reader finds the room of any idea from docs/design.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_fsdp"
DESIGN = (ROOT / "docs" / "design.md").read_text()
FOLDERS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def sections():
    """The headings that name folders, and the files in the first column of the table below each."""
    for section in DESIGN.split("\n#")[1:]:
        folders = re.findall(r"`lightning_fsdp/([a-z]+)`", section.splitlines()[0])
        rows = re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)
        if folders:
            yield folders, [name for row in rows for name in re.findall(r"`(\w+\.py)`", row)]


def files_in(folder):
    return [path.name for path in (PACKAGE / folder).glob("*.py") if path.name != "__init__.py"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_has_its_line_and_every_line_its_file(folder):
    found = [(folders, names) for folders, names in sections() if folder in folders]
    assert len(found) == 1, f"expected one heading with `lightning_fsdp/{folder}`"
    folders, names = found[0]
    assert sorted(names) == sorted(name for each in folders for name in files_in(each))


def test_every_folder_and_every_file_beside_them_is_in_the_first_table():
    table = DESIGN[: DESIGN.index("### `lightning_fsdp/core`")]
    for name in [*(f"{folder}/" for folder in FOLDERS), *files_in("")]:
        assert f"`{name}`" in table, name
