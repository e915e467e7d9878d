"""What docs/fsdp1-vs-fsdp2.md says is what was measured, and all of its code is run."""

import itertools
import re
from dataclasses import asdict

import pytest
import torch

from benchmarks.guide.behaviours import run_one
from benchmarks.guide.counters import ARMS, count
from benchmarks.guide.probes import BEHAVIOURS
from benchmarks.guide.subjects import ENGINES
from benchmarks.guide.tables import TABLES, read
from benchmarks.update_tables import GUIDE, split
from tests.support.cases import each_on_ranks
from tests.support.guide import PAGE, SNIPPET, STEPS, WRONG


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_was_measured(name):
    _, table, _ = split(PAGE, name)
    assert table == TABLES[name](), "run: make guide"


def test_every_table_of_the_page_is_a_measured_one():
    assert sorted(re.findall(r"<!-- ([\w-]+):begin -->", PAGE)) == sorted(TABLES)
    unmeasured = PAGE
    for name in TABLES:
        before, _, after = split(unmeasured, name)
        unmeasured = before + after
    assert "\n|" not in unmeasured


def _needs_the_torch_of(part):
    measured = read(part)["versions"]["torch"].split(".")[:2]
    if torch.__version__.split(".")[:2] != measured:
        pytest.skip(f"measured with torch {'.'.join(measured)}")


# By turns: the engines are torch's, of the version that was measured, and `make guide` runs all.
@pytest.mark.parametrize(
    ("topic", "engine"),
    [*zip(dict.fromkeys(b.topic for b in BEHAVIOURS.values()), itertools.cycle(ENGINES))],
)
def test_the_engines_still_behave_as_measured(topic, engine):
    _needs_the_torch_of("behaviours")
    measured = {row["name"]: row[engine]["said"] for row in read("behaviours")["rows"]}
    assert measured.keys() == BEHAVIOURS.keys()
    names = [name for name, behaviour in BEHAVIOURS.items() if behaviour.topic == topic]
    found = {name: run_one(name, engine).said for name in names}
    assert found == {name: measured[name] for name in names}


# All of here; of torch's engines one call each, at the one stage and at the other.
COUNTED = [arm for arm in ARMS if arm.engine == "here"] + [
    next(arm for arm in ARMS if (arm.engine, arm.stage) == case)
    for case in (("fsdp1", 3), ("fsdp2", 2))
]


def _as_measured(index):
    return pytest.approx(read("counters")["rows"][index]["memory"], abs=0.02)


def _count(rank, world_size, index):
    return count(rank, world_size, index, is_expected=_as_measured(index).__eq__)


@pytest.fixture(scope="module")
def counted():
    _needs_the_torch_of("counters")
    indices = [ARMS.index(arm) for arm in COUNTED]
    by_index = each_on_ranks(_count, 2, indices, timeout_s=240)
    return dict(zip(COUNTED, by_index.values(), strict=True))


@pytest.mark.parametrize("arm", COUNTED, ids=[f"{a.engine}{a.stage}" for a in COUNTED])
def test_an_engine_still_holds_and_sends_what_was_counted(counted, arm):
    measured, of_ranks = read("counters")["rows"][ARMS.index(arm)], counted[arm]
    assert {name: measured[name] for name in asdict(arm)} == asdict(arm)
    memory = {key: max(r["memory"][key] for r in of_ranks) for key in of_ranks[0]["memory"]}
    assert memory == _as_measured(ARMS.index(arm))
    assert of_ranks[0]["traffic"] == measured["traffic"]


def test_the_suite_and_the_benchmark_ended_well():
    assert read("access")["exit_code"] == 0
    assert read("speed")["exit_code"] == 0


def test_every_place_that_the_page_links_to_exists():
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = (GUIDE.parent / path).resolve() if path else GUIDE
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not anchor or anchor in anchors, link


def test_every_piece_of_code_is_run_by_a_test():
    marked = [code for code in STEPS if code.startswith(("# FSDP1", "# FSDP2", "# here"))]
    assert len(marked) == 9
    assert len(STEPS) == 10
    assert len(SNIPPET.findall(PAGE)) == len(STEPS) + len(WRONG)
