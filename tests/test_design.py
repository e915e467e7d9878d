"""A reader finds the room of any idea from docs/design.md."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_fsdp"
CORE = PACKAGE / "core"
DESIGN = (ROOT / "docs" / "design.md").read_text()
MEASURING = ("bench", "simulate")
FOLDERS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/**/__init__.py"))


def sections():
    """The headings that name folders, and the files in the first column of the table below each."""
    for section in DESIGN.split("\n#")[1:]:
        folders = re.findall(r"`lightning_fsdp/([a-z/]+)`", section.splitlines()[0])
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
    for name in [*(f"{folder}/" for folder in FOLDERS if "/" not in folder), *files_in("")]:
        assert f"`{name}`" in table, name


def _imported_by(path):
    """The files of the core that one imports."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("lightning_fsdp.core"):
            place = ROOT / node.module.replace(".", "/")
            if place.is_dir():
                yield from (place / f"{name.name}.py" for name in node.names)
            else:
                yield place.with_suffix(".py")


def test_what_is_to_be_read_and_what_that_imports_is_the_engine():
    begin = DESIGN.index("To follow it in the code")
    to_read = re.findall(
        r"\.\./(lightning_fsdp/core/engine/\w+\.py)", DESIGN[begin:].split("\n\n")[0]
    )
    assert to_read
    reached, waiting = set(), [ROOT / name for name in to_read]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting.extend(_imported_by(path))
    assert reached == set((CORE / "engine").glob("[a-z]*.py"))


def _code_lines(path):
    """Numbers of the lines with code: without blanks, comments and docstrings."""
    source = path.read_text()
    prose = set()
    for node in ast.walk(ast.parse(source)):
        may_have_one = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if may_have_one and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - prose


_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}


def test_files_functions_and_the_whole_of_the_core_stay_below_their_limits():
    lines = {path: _code_lines(path) for path in CORE.rglob("*.py")}
    for path, numbers in lines.items():
        assert len(numbers) <= 250, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                own = numbers.intersection(range(node.lineno, node.end_lineno + 1))
                assert len(own) <= 40, f"{path}: {node.name}"
    sizes = {path: len(numbers) for path, numbers in lines.items()}
    assert sum(size for path, size in sizes.items() if path.parent.name == "engine") <= 1250
    assert sum(sizes.values()) <= 4981


def test_what_measures_stays_smaller_than_what_it_measures():
    lines = [len(_code_lines(path)) for name in MEASURING for path in (PACKAGE / name).glob("*.py")]
    assert sum(lines) <= 3040


def test_what_reads_and_packs_text_stays_below_its_limit():
    names = ("corpus", "data", "documents", "packing")
    assert sum(len(_code_lines(ROOT / "recipes" / f"{name}.py")) for name in names) <= 565


def test_a_file_of_tests_has_one_idea_and_350_lines_at_most():
    tests = ROOT / "tests"
    sizes = {path: len(path.read_text().splitlines()) for path in tests.rglob("*.py")}
    long = {str(path.relative_to(tests)): size for path, size in sizes.items() if size > 350}
    assert not long, "cut it by idea"


def _raises(function):
    """Whether a function makes an exception; what derived classes are to write makes none."""
    inside = list(function.body)
    while inside:
        node = inside.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            inside.extend(ast.iter_child_nodes(node))
    return False


def _public_functions(node):
    for inner in node.body:
        if not isinstance(inner, (ast.FunctionDef, ast.ClassDef)) or inner.name.startswith("_"):
            continue
        if isinstance(inner, ast.FunctionDef):
            if not any(ast.unparse(d).endswith(".setter") for d in inner.decorator_list):
                yield inner  # of a property, the getter speaks for both
        else:
            yield from _public_functions(inner)


@pytest.mark.parametrize(
    "path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE))
)
def test_public_functions_of_the_core_that_raise_say_so(path):
    for function in _public_functions(ast.parse(path.read_text())):
        always = function.returns is not None and ast.unparse(function.returns) == "NoReturn"
        if _raises(function) and not always:
            assert "Raises:" in (ast.get_docstring(function) or ""), function.name
