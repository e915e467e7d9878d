"""The tables of the pages are those that the benchmarks' records make, to the letter."""

import csv
import json
import re
from dataclasses import fields

import pytest
from pydantic import TypeAdapter

from benchmarks import muon_step, update_tables
from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.table import farthest_losses
from lightning_fsdp.bench.records import Row
from lightning_fsdp.bench.report_page import format_table
from tests.support.pages import PAGES, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("tests", "speed", "recipes")
RECORDS = {
    "core": "core_step",
    "host": "host_cost",
    "counters": "exact_counters",
    "checkpoint": "checkpoint_speed",
    "losses": "recipe_losses",
    "medium": "real_size/medium",
    "large": "real_size/large",
    "large-more": "real_size/large",
    "qwen": "real_size/qwen2.5-0.5b",
    "muon": "muon_step",
    "muon-ranks": "muon_ranks",
    "head-loss": "head_loss",
    "one-host": "one_host",
    "one-host-threads": "one_host_threads",
    "hosts": "hosts",
    "scaling-suggested": "scaling_suggested",
    "medium-accum": "real_size/medium-accum",
    "medium-bf16": "real_size/medium-bf16",
    "gpu": "gpu/speed",
}


def test_every_table_with_a_record_is_looked_at():
    assert RECORDS.keys() == update_tables.TABLES.keys()


def test_the_readme_says_what_the_columns_and_arms_of_its_tables_are():
    page = PAGES["README.md"]
    prose = re.sub(r"^\|.*$", "", page, flags=re.MULTILINE)
    assert all(f"{word}" in prose for word in ("`scratch`", "*Planned*", "*dd*", "1.00"))
    assert set(muon_step.SAYS) == set(muon_step.ARMS)
    assert all(words in page for words in muon_step.SAYS.values())


@pytest.mark.parametrize("name", RECORDS)
def test_a_table_is_the_one_that_its_record_makes(name):
    record = ROOT / "benchmarks" / "results" / f"{RECORDS[name]}.json"
    document = json.loads(record.read_text())
    _, shown, _ = update_tables.split(update_tables.page_of(name).read_text(), name)
    assert shown == update_tables.made_of(name, document)


def rows_of(name):
    """Of the bench's CSV, as :func:`~lightning_fsdp.bench.documents.write_csv` wrote them."""
    with (RESULTS / f"{name}.csv").open() as stream:
        for line in csv.DictReader(stream):
            values = {
                name: json.loads(v) if v[:1] == "{" else v or None for name, v in line.items()
            }
            for field in fields(Row):
                if field.default_factory is list and (text := line.get(field.name)):
                    values[field.name] = [figure or None for figure in text.split(" ")]
            yield TypeAdapter(Row).validate_python(values)


def test_the_bench_table_is_the_one_that_its_record_makes():
    _, shown, _ = update_tables.split(update_tables.page_of("bench").read_text(), "bench")
    assert shown.partition("\n\n")[2] == format_table(list(rows_of("bench")))


@pytest.mark.parametrize("name", ["bench", "sweep"])
def test_a_recorded_step_is_compared_with_two_known_limits_or_none(name):
    for row in rows_of(name):
        of = row.step_ms, row.compute_limit_ms, row.communication_limit_ms
        assert (row.times_limit is None) == (None in of), row.arm


def test_the_page_about_gpus_says_what_its_records_hold():
    records = {p: json.loads((RESULTS / "gpu" / f"{p}.json").read_text())["results"] for p in PARTS}
    page = " ".join(PAGES["docs/gpu.md"].split())
    passed = sum(result["state"] == "done" for result in records["tests"].values())
    assert f"Of {len(records['tests'])} tests, {passed} passed." in page
    assert f"{len(records['speed'])} of {len(all_cases())} cases" in page
    apart, _ = farthest_losses(records["speed"])
    assert f"{apart:.2g} at most" in page
    recipe = records["recipes"]["gpt2_xl_zero3"]
    losses, saved = recipe["fit"]["train/loss"], recipe["checkpoint_bytes"] / 1e9
    assert f"from a loss of {losses[0]:.2f} to {losses[-1]:.2f}" in page
    assert f"{saved:.1f} GB with losses {recipe['most_apart']:.1e}".replace("e-0", "e-") in page


def test_what_the_page_says_of_steps_on_one_host_is_of_the_records():
    page = " ".join((ROOT / "docs" / "core-measured.md").read_text().split())
    rows = json.loads((RESULTS / "core_step.json").read_text())["rows"]
    of = {(row["batch"], row["arm"]): row for row in rows}
    said = []
    for arm in ("scratch_zero3", "scratch_zero2"):
        for batch in (1, 2):
            of_ddp = of[batch, arm]["median_ms"] / of[batch, "ddp"]["median_ms"]
            said += [f"{of[batch, arm]['ratio_to_fsdp2']:.2f}", f"{of_ddp:.2f}"]
    assert (
        "ZeRO-3 takes {} of FSDP2's step and {} of DDP's; bound by compute, {} and {}. "
        "ZeRO-2 takes {} and {}, and {} and {}."
    ).format(*said) in page  # fmt: skip

    rows = json.loads((RESULTS / "one_host.json").read_text())["rows"]
    said = [
        f"{row[of]:.2f}"
        for arm in ("direct_zero3", "direct_zero2")
        for row in rows
        if row["arm"] == arm
        for of in ("of_fsdp2", "of_ddp")
    ]
    assert (
        "On two ranks ZeRO-3 takes {} of FSDP2's step and {} of DDP's, on four {} and {}; "
        "ZeRO-2 {} and {}, and {} and {}."
    ).format(*said) in page  # fmt: skip
