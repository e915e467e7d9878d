"""The Makefile's environments: one per torch, and none with another Python than was asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PINNED = next(
    line.removeprefix("torch==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def plan(folder, *arguments):
    """What ``make`` would do in a copy where nothing is installed."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    outer = ("MAKE", "MFLAGS", "TORCH", "PYTHON", "VENV")  # of the make that runs the tests
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def pins_of(folder, *arguments):
    """The versions that ``make`` would install."""
    (command,) = [
        line for line in plan(folder, *arguments).stdout.splitlines() if line.startswith("sed")
    ]
    command = command.partition(">")[0]
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    return done.stdout


def python_of(folder, name, version):
    python = folder / name
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return python


def test_all_is_pinned(tmp_path):
    assert pins_of(tmp_path, "install") == (ROOT / "constraints.txt").read_text()


def test_what_was_compiled_is_kept_whatever_the_environment_says():
    """Packages are installed uncompiled, and to compile torch takes longer than its start."""
    command = ["make", "--no-print-directory", "--eval", "shown: ; @env", "shown"]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "PATH=" in told.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in told.stdout


def test_another_torch_has_an_environment_of_its_own(tmp_path):
    told = plan(tmp_path, "test", "TORCH=2.11.0").stdout
    assert ".venv-torch-2.11.0/bin/python -m pytest" in told
    assert ".venv/" not in told
    pins = pins_of(tmp_path, "test", "TORCH=2.11.0").splitlines()
    assert "torch==2.11.0" in pins
    assert f"torch=={PINNED}" not in pins
    assert not [pin for pin in pins if pin.startswith("setuptools==")]
    assert ".venv/bin/python -m pytest" in plan(tmp_path, "test", f"TORCH={PINNED}").stdout


def test_another_python_than_that_of_the_environment_is_refused(tmp_path):
    python_of(tmp_path, ".venv/bin/python", "3.11")
    asked = python_of(tmp_path, "python-of-mine", "3.12")
    refused = plan(tmp_path, "install", f"PYTHON={asked}")
    assert refused.returncode != 0
    assert ".venv has Python 3.11. Name another: VENV=" in refused.stderr
    assert plan(tmp_path, "install", f"PYTHON={asked}", "VENV=.venv-new").returncode == 0
    python_of(tmp_path, "python-of-mine", "3.11")
    assert plan(tmp_path, "install", f"PYTHON={asked}").returncode == 0
