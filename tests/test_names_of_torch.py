"""What runs on a GPU alone asks torch for names that it has: here, nobody else would notice."""

import ast
import pkgutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATHS = [
    path
    for folder in ("lightning_fsdp", "benchmarks", "recipes", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "torch_internals.py"  # which has names of several versions
]


def names_in(path):
    """Each name of a module of torch's, where it is imported or by attributes."""
    tree, known = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname: a.name for a in node.names if a.asname}
            known |= {a.name.partition(".")[0]: a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    yield from known.values()
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *reversed(names)])


def problem_with(name):
    """Why torch cannot be asked for a name; ``None`` where it can."""
    if not name.startswith("torch.") or name.startswith("torch._C."):  # of other builds
        return None
    try:
        found = pkgutil.resolve_name(name)
    except ModuleNotFoundError:  # a package that torch itself can do without
        return None
    except AttributeError as error:  # of a variable of the same name, it is no module's
        return str(error) if str(error).startswith(("module", "type object")) else None
    said = getattr(found, "__deprecated__", None)
    return f"{name}: {said}" if isinstance(said, str) else None


@pytest.mark.parametrize("folder", sorted({path.parent for path in PATHS}), ids=str)
def test_torch_has_what_it_is_asked_for(folder):
    for path in (path for path in PATHS if path.parent == folder):
        problems = {problem_with(name) for name in names_in(path)} - {None}
        assert not problems, path
