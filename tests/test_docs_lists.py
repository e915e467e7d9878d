"""What the pages link to exists, and what they list is what the code has: names and arguments."""

import inspect
import re
from datetime import timedelta  # noqa: F401 (of a default in a table)

import pytest

import lightning_fsdp
from lightning_fsdp import FSDP1Strategy, FSDP2Strategy, ScratchFSDPStrategy
from lightning_fsdp.core.sharded_module import ShardedModule
from lightning_fsdp.strategies.registry import NAMES
from lightning_fsdp.strategies.sharded import ShardedStrategy
from tests.support.pages import PAGES, ROOT, python_blocks, table

# -- links -----------------------------------------------------------------------------------------


def test_the_readme_is_short_and_links_to_every_page():
    assert len(PAGES["README.md"].splitlines()) <= 150
    named = "\n".join(re.findall(r"^\| (\[.*?) \|", PAGES["README.md"], re.MULTILINE))
    linked = re.findall(r"\]\((docs/[\w-]+\.md)\)", named)
    assert sorted(linked) == sorted(page for page in PAGES if page.startswith("docs/"))


@pytest.mark.parametrize("page", PAGES)
def test_every_place_that_a_page_links_to_exists(page):
    for link in re.findall(r"\]\((?!https://)([^)]+)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, link


def test_every_recipe_that_a_page_names_exists():
    named = {name for text in PAGES.values() for name in re.findall(r"\w+_\w+\.yaml", text)}
    assert named
    assert not [name for name in named if not (ROOT / "recipes" / name).exists()]


def test_no_page_states_a_number_of_tests():
    for page, text in PAGES.items():  # which every change makes wrong
        assert not re.search(r"\d{3,} (tests\b|passed)", text), page


# -- lists -----------------------------------------------------------------------------------------


def _names_in(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r'`"?(\w+)"?`', cell)]


def test_every_public_name_is_listed_and_can_be_imported():
    names = _names_in([row[0] for row in table("docs/training.md", "Public names")])
    assert sorted(names) == sorted(lightning_fsdp.__all__) == sorted(lightning_fsdp._HOME)
    for name in names:
        assert getattr(lightning_fsdp, name) is not None


def test_every_public_name_that_the_code_of_a_page_imports_is_one():
    for page in PAGES:
        for code in python_blocks(page):
            imports = re.findall(r"^from lightning_fsdp import ([\w, ]+)", code, re.MULTILINE)
            used = re.findall(r"\w+", " ".join(imports))
            used += re.findall(r"\blightning_fsdp\.(\w+)", code)
            assert set(used) <= set(lightning_fsdp.__all__), page


def test_the_strategies_and_their_arguments_are_those_of_the_code():
    rows = table("docs/training.md", "Strategies")
    listed = {name: cls for names, cls, _ in rows for name in _names_in([names])}
    assert listed == {name: f"`{cls}`" for name, (cls, _, _) in NAMES.items()}
    rows = table("docs/training.md", "Arguments of the strategies")
    told = {_names_in([name])[0]: eval(default.strip("`")) for name, default, _ in rows}
    for strategy, more in (
        (ScratchFSDPStrategy, {"comm": "auto"}),
        (FSDP2Strategy, {}),
        (ShardedStrategy, {}),
        (FSDP1Strategy, {"use_orig_params": True}),
    ):
        assert _defaults(strategy) == told | more


def _defaults(strategy: type[ShardedStrategy]) -> dict[str, object]:
    """Of the arguments by name; those that are passed on are the base's."""
    defaults = {}
    for cls in (strategy, ShardedStrategy):
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                defaults[name] = parameter.default
    return defaults


def test_every_refused_method_of_fsdp2_is_in_the_limits():
    listed = re.findall(r"`(set_[a-z_]+)`", PAGES["docs/limits.md"])
    assert listed
    for name in listed:
        assert getattr(ShardedModule, name).__doc__.startswith("Refused."), name
