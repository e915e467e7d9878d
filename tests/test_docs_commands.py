"""The commands that the pages show take the options that they are given.

No command is run: a program is asked for its help, which has to name each option, the recipes'
command line parses all values, and ``make`` says what it would run.
"""

import functools
import io
import re
import runpy
import shlex
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.support.pages import PAGES, ROOT, commands
from tests.test_makefile import plan

# Of runpy, for a command that another one has imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


def _options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--\w", word)]


def _options_in(told: str) -> set[str]:
    return set(re.findall(r"--[\w.-]*\w", told))


def _output(program: list[str], *arguments: str) -> str:
    """What a Python program prints that only says something; ``program`` may be -m and a name."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [program[-1], *arguments])
        patch.syspath_prepend(str((ROOT / program[0]).parent))  # as Python does for a script
        run = functools.partial(runpy.run_path, program[0])
        if program[0] == "-m":
            run = functools.partial(runpy.run_module, program[1], alter_sys=True)
        with pytest.raises(SystemExit) as end:
            run(run_name="__main__")
    assert not end.value.code, f"{program} {arguments}: {printed.getvalue()[-2000:]}"
    return printed.getvalue()


def _parse_recipe(*arguments: str) -> None:
    _output(["-m", "recipes.train"], *arguments, "--print_config")


def _help_of(words: list[str], folder: Path) -> str:
    """Check a command, and give the help of the programs that it runs."""
    match words:
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            assert all((ROOT / word).exists() for word in rest if word.startswith("tests/"))
            told = (ROOT / "tests" / "conftest.py").read_text()
        case ["python", "-m", "recipes.train"]:
            return _output(["-m", "recipes.train"], "--help")
        case ["python", "-m", "recipes.train", *rest]:
            _parse_recipe(*(word for word in rest if word != "--help"))
            return ""
        case ["python", "-m", module, *rest]:
            told = _output(["-m", module], *rest, "--help")
        case ["python", script, *rest]:
            told = _output([script], *rest, "--help")
        case ["perf", "record", *command]:
            return _help_of(command, folder)
        case ["make", *rest]:
            planned = plan(folder, *rest)
            assert not planned.returncode, planned.stderr
            assert set(re.findall(r"^(\w+)=", "\n".join(rest), re.MULTILINE)) <= _make_variables()
            lines = planned.stdout.replace("\\\n", " ").splitlines()
            runs = [line.partition("python -m ")[2] for line in lines]
            own = [
                run for run in runs if run.startswith(("lightning_fsdp", "benchmarks", "recipes"))
            ]
            helps = [_help_of(["python", "-m", *shlex.split(run)], folder) for run in own]
            return "\n".join(helps)
        case ["torchrun", *rest]:
            given = get_args_parser().parse_args(rest)
            program = ["python", "-m", given.training_script, *given.training_script_args]
            return _help_of(program, folder) if given.module else ""
        case ["sbatch", *rest]:
            assert all((ROOT / word).exists() for word in rest if word.startswith("recipes/"))
            return ""
        case ["pip", "install", *editable, requirement]:
            name, _, extras = requirement.rstrip("]").partition("[")
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert name == ("." if editable == ["-e"] else project["name"])
            assert extras in project["optional-dependencies"]
            return ""
        case _:
            raise AssertionError(f"expected a command that can be checked, got {words}")
    missing = set(_options(words)) - _options_in(told)
    assert not missing, f"{words}: no such options: {missing}"
    return told


def _make_variables() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^(\w+) [?:]?=", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands(page)]])
def test_the_options_of_every_command_of_a_page_parse(page, tmp_path):
    told = [_help_of(words, tmp_path) for words in commands(page) if not _options(words[:1])]
    for words in commands(page):
        if _options(words[:1]) and page != "docs/recipes.md":
            missing = set(_options(words)) - _options_in("\n".join(told))
            assert not missing, f"{words}: no command of the page has {missing}"


def test_the_commands_of_bench_that_pages_name_are_there():
    told = _output(["-m", "lightning_fsdp.bench"], "--help")
    there = set(re.findall(r"^  ([a-z-]+) +[A-Z]", told, re.MULTILINE))
    named = set(re.findall(r"`bench\s([\w-]+)", "".join(PAGES.values())))
    assert {"run", "plot"} <= named <= there


def test_the_options_of_the_recipes_parse():
    told = _output(["-m", "recipes.train"], "fit", "--help")
    for words in commands("docs/recipes.md"):
        if words == _options(words):  # without a value
            assert words[0] in _options_in(told)
        elif _options(words[:1]):
            recipe = "qwen_zero3" if "0.5b" in words else "gpt2_zero3"
            _parse_recipe("fit", "--config", f"recipes/{recipe}.yaml", *words)
