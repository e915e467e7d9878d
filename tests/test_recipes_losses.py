"""The losses that docs/recipes.md records: the same under every strategy, and fallen."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipe_losses, update_tables
from lightning_fsdp.harness.environment import describe
from tests.support import warm

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "recipe_losses.json"


def _rows(**changed: float) -> list[dict[str, Any]]:
    """Of one model: loss 6.0 from 8.3 under all strategies but those that are named."""
    return [
        {"model": "m", "strategy": name, "first": 8.3, "validation": changed.get(name, 6.0)}
        for name in (recipe_losses.SINGLE, *recipe_losses.STRATEGIES)
    ]


def test_the_page_shows_the_record_and_the_record_is_right() -> None:
    document = json.loads(RECORD.read_text())
    rows = document["rows"]
    strategies = {recipe_losses.SINGLE, *recipe_losses.STRATEGIES}
    assert {(row["model"], row["strategy"]) for row in rows} == {
        (model, strategy) for model in recipe_losses.RECIPES for strategy in strategies
    }
    assert recipe_losses.mistakes(rows) == []
    table = "\n".join([describe(document), "", *update_tables.losses_table(document)])
    _, shown, _ = update_tables.split(update_tables.page_of("losses").read_text(), "losses")
    assert shown == table


@pytest.mark.parametrize(("factor", "is_wrong"), [(1.019, False), (1.021, True), (0.979, True)])
def test_a_loss_two_percent_off_is_a_mistake(factor: float, is_wrong: bool) -> None:
    found = recipe_losses.mistakes(_rows(fsdp2_zero3=6.0 * factor))
    assert len(found) == is_wrong
    assert all("m under fsdp2_zero3: expected a loss within 2% of 6.0000" in m for m in found)


def test_a_loss_that_did_not_fall_is_a_mistake() -> None:
    same = dict.fromkeys((recipe_losses.SINGLE, *recipe_losses.STRATEGIES), 8.2)
    found = recipe_losses.mistakes(_rows(**same))
    assert len(found) == len(same)
    assert all("expected a loss that falls from 8.3000, got 8.2" in mistake for mistake in found)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both recipes read the same tokens."""
    return tmp_path_factory.mktemp("cache")


def _run_on_less_text(command: list[str], **options: Any) -> Any:
    return warm.run_command([*command, "--data.standard_library_mb", "2"], **options)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("recipe", "strategy"), [("gpt2_zero3", "scratch_fsdp_zero3"), ("qwen_zero3", "fsdp1_zero2")]
)
def test_a_recipe_learns_the_same_on_two_ranks(
    recipe: str, strategy: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recipe in recipe_losses.RECIPES.values()
    monkeypatch.setattr(recipe_losses, "run_command", _run_on_less_text)
    rows = [
        {"model": recipe, "strategy": name}
        | recipe_losses.train(recipe, name, cache, num_steps=25, batch_size=4)
        for name in (recipe_losses.SINGLE, strategy)
    ]
    assert rows[0]["first"] == pytest.approx(math.log(4096), rel=0.05)
    assert recipe_losses.mistakes(rows) == []
