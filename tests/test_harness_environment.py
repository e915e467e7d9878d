"""What stands beside a result."""

import subprocess
from importlib import metadata
from pathlib import Path

import torch

from lightning_fsdp.harness.environment import environment

ROOT = Path(__file__).parent.parent


def git(folder, *arguments):
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_that_of_this_project_wherever_it_is_asked_for(tmp_path, monkeypatch):
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-m", "x", "--allow-empty")
    monkeypatch.chdir(tmp_path)
    changed = git(ROOT, "status", "--porcelain", "--untracked-files=no")
    expected = git(ROOT, "rev-parse", "HEAD") + ("-dirty" if changed else "")
    assert environment()["commit"] == expected != git(tmp_path, "rev-parse", "HEAD")


def test_what_a_machine_lacks_is_left_out(monkeypatch):
    assert set(environment()["versions"]) == {"torch", "lightning", "transformers"}
    found = metadata.distribution

    def without_lightning(name):
        if name == "lightning":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", without_lightning)
    monkeypatch.setenv("PATH", "")
    lacking = environment()
    assert set(lacking["versions"]) == {"torch", "transformers"}
    assert lacking["commit"] is None


def test_processors_of_one_name_are_told_apart_by_what_they_can(monkeypatch):
    names = []
    for instructions in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda i=instructions: i)
        names.append(environment()["machine"]["processor"])
    assert names == [f"{names[0].removesuffix(' (AVX2)')} ({each})" for each in ("AVX2", "AVX512")]
