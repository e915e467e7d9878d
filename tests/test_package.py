"""What people install: built as it is published, and used where no checkout is.

The environment holds the wheel and what its own metadata demands, linked from the one that runs the
tests; so a dependency that is not declared is missing there, and so is every extra.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

pytest.importorskip("hatchling", reason="hatchling, of the extra 'dev', is not installed")

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NAME = f"lightning_fsdp-{VERSION}"


def run(*command, cwd, check=True, **environment):
    """A command that sees nothing of the checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    return folder / f"{NAME}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist, so that all that it takes is in there."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "-w", folder, sdist, cwd=folder)
    return folder / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a new environment, with the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    link(distributions(requirements_in(site)), site)
    return python


@pytest.fixture(scope="module")
def recipes_extra(python, tmp_path_factory):
    """A folder for ``PYTHONPATH`` with what the extra adds."""
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    folder = tmp_path_factory.mktemp("extra")
    link(distributions(requirements_in(site), extra="recipes"), folder)
    return folder


def requirements_in(site):
    return map(Requirement, Distribution.at(site / f"{NAME}.dist-info").requires)


def link(found, folder):
    for each in found:
        for top in {path.parts[0] for path in each.files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(each.locate_file(top))


def distributions(requirements, *, extra="", seen=None):
    """What is installed here of some requirements, and of theirs."""
    seen = set() if seen is None else seen
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for each in {"", *requirement.extras}:
            if (requirement.name, each) not in seen:
                seen.add((requirement.name, each))
                found = distribution(requirement.name)
                yield found
                inner = map(Requirement, found.requires or ())
                yield from distributions(inner, extra=each, seen=seen)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_sdist_is_the_repository_without_what_runs_leave_behind(sdist):
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    if not listed:
        pytest.skip("no repository")
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    assert names == {*listed.split(), "PKG-INFO"} - {".ci/run"}
    for name in ("LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "docs/design.md"):
        assert name in names
    assert "benchmarks/core_step.py" in names


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel):
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{NAME}.dist-info/METADATA").decode()
    of_package = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    sources = (ROOT / "lightning_fsdp").rglob("*")
    there = {str(path.relative_to(ROOT)) for path in sources if path.is_file()}
    assert of_package == {path for path in there if "__pycache__" not in path}
    assert "lightning_fsdp/py.typed" in names
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


@pytest.mark.quick
def test_the_first_example_of_the_readme_trains_where_no_checkout_is(
    python, recipes_extra, tmp_path
):
    code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(code.replace("max_steps=100", "max_steps=3"))
    done = run(python, "train.py", cwd=tmp_path, PYTHONPATH=str(recipes_extra))
    assert "Starting with 2 processes" in done.stderr
    assert "`max_steps=3` reached" in done.stderr


def test_neither_recipes_nor_tests_are_installed(python, tmp_path):
    code = "from importlib.util import find_spec as find\nimport lightning_fsdp as package\n"
    code += "names = 'recipes', 'tests', 'benchmarks'\n"
    code += "print(package.__file__, *map(find, names))"
    where, *found = run(python, "-c", code, cwd=tmp_path).stdout.split()
    assert Path(where).is_relative_to(python.parent.parent)
    assert found == ["None"] * 3


def test_the_version_is_that_of_the_metadata_and_of_a_checkout(python, tmp_path):
    code = "import lightning_fsdp; print(lightning_fsdp.__version__)"
    assert run(python, "-c", code, cwd=tmp_path).stdout.strip() == VERSION
    # Without site-packages, so with the metadata of no installation.
    plain = run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert plain.stdout.strip() == VERSION


# All of them, with torch imported once; of each what it said, and its exit status.
COMMANDS = """
import os, runpy, sys
import torch.distributed.fsdp

for folder, command in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        module, *sys.argv[1:] = command.split()
        runpy.run_module(f"lightning_fsdp.{module}", run_name="__main__", alter_sys=True)
        sys.exit()
    _, status = os.waitpid(pid, 0)
    for stream in (sys.stdout, sys.stderr):
        print(f"ended: {os.waitstatus_to_exitcode(status)}", file=stream, flush=True)
"""
SHOWN = ["bench", "compare", "convert", "plan"]
MISSING = {
    "bench": ("bench", "matplotlib, pydantic, tensorboard, jsonargparse, psutil, "),
    "bench plot .": ("bench", "matplotlib, pydantic, tensorboard"),
    "plan --model gpt2-nano --world 2": ("recipes", "transformers"),
}


@pytest.fixture(scope="module")
def commands_without_extras(python, tmp_path_factory):
    """By command what it printed, what it said of an error, and its exit status."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "recipes").symlink_to(ROOT / "recipes")  # as in a checkout
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    folders = dict.fromkeys([*(f"{command} --help" for command in SHOWN), *MISSING], folder)
    folders["bench run"] = elsewhere
    words = [word for command, where in folders.items() for word in (where, command)]
    done = run(python, "-c", COMMANDS, *words, cwd=elsewhere)
    pattern = re.compile(r"(.*?)^ended: (-?\d+)\n", re.DOTALL | re.MULTILINE)
    printed, said = (pattern.findall(text) for text in (done.stdout, done.stderr))
    return {
        command: (out, error, int(status))
        for command, (out, _), (error, status) in zip(folders, printed, said, strict=True)
    }


def test_every_command_has_its_help_without_extras(commands_without_extras):
    for command in SHOWN:
        told, _, status = commands_without_extras[f"{command} --help"]
        assert f"usage: python -m lightning_fsdp.{command} " in told, command
        assert status == 0, command


def test_a_command_names_the_extra_that_is_missing(commands_without_extras):
    for command, (extra, missing) in MISSING.items():
        _, said, status = commands_without_extras[command]
        assert status == 1, command
        (line,) = said.splitlines()
        assert line.startswith(f"error: expected the extra {extra!r}, got no {missing}"), command
        assert line.endswith(f"Install it: pip install 'lightning-fsdp[{extra}]'"), command


def test_the_benchmark_asks_for_a_checkout(commands_without_extras):
    _, said, status = commands_without_extras["bench run"]
    assert status == 2
    last = said.splitlines()[-1]
    assert "expected a checkout, whose recipes are trained" in last
    assert last.endswith("pip install 'lightning-fsdp[bench]'")
