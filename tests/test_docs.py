"""Every block of Python on a page runs, and does what the page says.

A test names its block by the page and a part of it (``runs``); a block that no test names fails.
Those of docs/fsdp1-vs-fsdp2.md are run by ``test_guide_*.py``, which find out as well that they run
all of them.
"""

import importlib
import os
import re
import shlex

import pytest

from lightning_fsdp.plan import __main__ as plan
from lightning_fsdp.plan import dry_run
from lightning_fsdp.plan.dry_run import Run
from lightning_fsdp.plan.models import config_of
from tests.support.pages import PAGES, ROOT, blocks, python_blocks
from tests.support.snippets import named, runs
from tests.support.trainer import on_trainer_ranks


def test_every_block_of_python_is_run():
    for path in (ROOT / "tests").glob("test_docs_*.py"):
        importlib.import_module(f"tests.{path.stem}")  # which names the blocks that it runs
    pages = PAGES.keys() - {"docs/fsdp1-vs-fsdp2.md", "docs/a-step.md"}  # which have their own
    assert {language for page in pages for language, _ in blocks(page)} == {"", "python"}
    assert sorted(named) == sorted(code for page in pages for code in python_blocks(page))


def _run_example(rank, world_size, code, folder):
    os.chdir(folder)
    names = {"__name__": "__main__"}
    exec(code.replace("max_steps=100", "max_steps=3"), names)
    return names["trainer"].global_step


@runs("README.md", "trainer.fit(GPT2(")
def test_the_example_trains(tmp_path, code):
    """Here on ranks that are there already; ``test_package.py`` starts it as a script."""
    assert "recipes" not in code  # which are not installed with the package
    assert on_trainer_ranks(_run_example, 2, code, tmp_path) == [3, 3]


@runs("docs/recipes.md", "trainer.fit(GPT2(")
def test_the_script_with_a_recipe_trains(tmp_path, code):
    """On less text; ``test_recipes_train.py`` starts a recipe as a command."""
    assert "TextData(vocab_size" in code
    code = code.replace("TextData(", "TextData(standard_library_mb=0.3, ")
    assert on_trainer_ranks(_run_example, 2, code, tmp_path) == [3, 3]


def _shown_plans():
    page = PAGES["docs/planning.md"]
    return re.findall(r"```\n\$ python -m lightning_fsdp\.plan (.*?)\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize(("arguments", "shown"), _shown_plans(), ids=["plan", "suggest"])
def test_the_plan_prints_what_the_page_shows(arguments, shown, capsys):
    assert plan.main(shlex.split(arguments)) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("loss", "most"), [("plain", 35), ("chunked", 235)])
def test_the_batches_that_pages_name_fit_and_one_more_does_not(loss, most):
    run = Run(world_size=8, loss=loss, activation_checkpointing=True)
    with dry_run.dry_runs(config_of("gpt2-small"), run) as plan_of:
        fits, too_large = (plan_of(size, 1).peak_bytes for size in (most, most + 1))
    assert fits <= 24e9 < too_large
    for page in ("README.md", "docs/planning.md"):
        assert re.search(rf"\b{most}\b", PAGES[page]), page
