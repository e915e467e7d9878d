"""Every picture, of results of all kinds: it comes out, can be read, and says what is missing."""

import functools
import itertools
import random

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from lightning_fsdp.bench import output, plot_style
from lightning_fsdp.bench.arms import ENGINES
from lightning_fsdp.bench.output import PICTURES
from lightning_fsdp.bench.plot_style import PARTS, line_style
from tests.support.bench_results import (
    as_results,
    document_of,
    results_of,
    without,
)
from tests.support.pictures import FAILURES, SMALL, arms_of, words

FEWER = {**SMALL, "accums": [1]}


def one_arm():
    return without(document_of(engines=["scratch"], stages=[3], batch_sizes=[4], accums=[1]),
                   "single_b4_a1", "ddp_b4_a1")  # fmt: skip


def all_failed():
    reason = "exit code 1: ModuleNotFoundError: No module named 'recipes' anywhere"
    failures = {arm.name: ("error", reason) for arm in arms_of(accums=[1])}
    return document_of(**FEWER, failures=failures)


def renamed(engine, **choice):
    document = document_of(**FEWER, **choice)
    for row in document["rows"]:
        if row["engine"] == "fsdp2":
            row.update(engine=engine, arm=row["arm"].replace("fsdp2", engine))
    for run in document["runs"]:
        run["arm"] = run["arm"].replace("fsdp2", engine)
    return document


DOCUMENTS = {
    "a sweep": lambda: document_of(),
    "equal global batches": lambda: document_of(
        engines=["scratch"], batch_sizes=[1, 2, 4], accums=[1, 2, 4], stages=[3]
    ),
    "one arm": one_arm,
    "no arms": lambda: without(one_arm(), "scratch_zero3_b4_a1"),
    # Which each add a line to every picture: with both there is least room.
    "failed arms and arms that are not there": lambda: {
        **without(document_of(**SMALL, failures=FAILURES), "single_b1_a1", "fsdp2_zero3_b2_a2"),
        "interrupted": "21 runs were not made; nothing of single_b1_a1, fsdp2_zero3_b2_a2",
    },
    "only failed arms": all_failed,
    "an older version": lambda: document_of(**FEWER, is_old=True),
    # A name takes room in legends and beside bars, whatever else the panels hold.
    "one rank and a long name": lambda: renamed(
        "a_strategy_of_somebody_else_with_a_long_name", num_ranks=1
    ),
}


@pytest.fixture(scope="module")
def drawn():
    """By case, the figures; each case is drawn once."""
    return functools.cache(lambda case: output.draw(as_results(DOCUMENTS[case]())))


def shown_texts(figure):
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip():
            yield text


def ticks_out_of_view(figure):
    """Matplotlib keeps labels for ticks beyond the limits of an axis, and does not draw them."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick, place in zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=True):
                if not low <= place <= high or not axes.get_visible():
                    yield from (tick.label1, tick.label2)


@pytest.mark.parametrize("case", DOCUMENTS)
def test_every_picture_comes_out_and_no_text_lies_on_another(drawn, case):
    for name, figure in drawn(case).items():
        canvas = FigureCanvasAgg(figure)
        figure.draw_without_rendering()  # which places all of it
        hidden = set(ticks_out_of_view(figure))
        hidden |= {t for axes in figure.axes if not axes.get_visible() for t in axes.findobj(Text)}
        boxes = [
            (text.get_text(), text.get_window_extent(canvas.get_renderer()))
            for text in shown_texts(figure)
            if text not in hidden
        ]
        width, height = canvas.get_width_height()
        for text, box in boxes:
            room = min(box.x0, box.y0, width - box.x1, height - box.y1)
            assert room > -1, f"{name}: {text!r} is cut off"
        for (one, a), (other, b) in itertools.combinations(boxes, 2):
            over = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(over) < 1.5, f"{name}: {one!r} lies on {other!r}"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("no arms", "There are no arms in these results."),
        ("only failed arms", "Failed (error): single_b1_a1, ddp_b1_a1, scratch_zero2_b1_a1"),
        ("only failed arms", "fsdp2_zero2_b1_a1, fsdp2_zero3_b1_a1 and 6 more."),
        (
            "failed arms and arms that are not there",
            "Not in these results: single at 1 x 1, fsdp2 ZeRO-3 at 2 x 2",
        ),
        ("failed arms and arms that are not there", "Failed (timed out): ddp_b2_a2."),
        ("failed arms and arms that are not there", "Interrupted: 21 runs were not made."),
    ],
)  # fmt: skip
def test_every_picture_says_what_is_missing(drawn, case, sentence):
    for name, figure in drawn(case).items():
        assert sentence in words(figure).replace("\n", " "), name


def test_pictures_of_older_results_say_which_figures_they_lack(drawn):
    figures = drawn("an older version")
    for name, what in {
        "communication": "Exposed communication", "utilization": "Utilization",
        "time_breakdown": "Parts of a step", "memory_at_peak": "Memory by owner",
        "memory_over_time": "Memory over time", "memory": "Peak of the process (RSS)",
    }.items():  # fmt: skip
        assert f"{what}: not measured for any arm." in words(figures[name])


@pytest.mark.parametrize("seed", range(4))
def test_pictures_come_out_whatever_fields_are_null(seed):
    choice = random.Random(seed)
    document = document_of(**FEWER)

    kept = {"arm", "engine", "zero_stage", "batch_size", "grad_accum", "num_processes"}

    def thinned(figures):
        nulls = {name for name in figures if name not in kept and choice.random() < 0.4}
        return {name: None if name in nulls else figure for name, figure in figures.items()}

    for row in document["rows"]:
        row.update({**thinned(row), "failure": None})
        for name in ("parts_ms", "theory"):
            row[name] = row[name] and thinned(row[name])
    for run in document["runs"]:
        for rank in run["ranks"]:
            for name in ("timeline", "utilization", "peak_by_kind", "utilization_of"):
                rank[name] = None if choice.random() < 0.4 else rank[name]
    assert set(output.draw(as_results(document))) == set(PICTURES)


def test_engines_stages_and_parts_differ_without_colour():
    results = results_of()
    styles = [line_style(kind) for kind in results.kinds]
    looks = [(s["marker"], s["markerfacecolor"] == "white", str(s["linestyle"])) for s in styles]
    assert len(set(looks)) == len(looks)

    def grey(color):
        return np.dot(to_rgb(color), (0.299, 0.587, 0.114))

    shades = sorted({round(grey(style["color"]), 3) for style in styles})
    assert len(shades) == 2 + len(ENGINES)
    assert min(b - a for a, b in itertools.pairwise(shades)) > 0.05
    for (one, hatch), (other, pattern) in itertools.pairwise(PARTS.values()):  # neighbours in a bar
        assert hatch != pattern or abs(grey(one) - grey(other)) > 0.1


def test_the_same_results_give_the_same_files(tmp_path):
    results = as_results(one_arm())
    for folder in ("one", "two"):
        for name, figure in output.draw(results).items():
            plot_style.save(figure, tmp_path / folder, name)
    for name, suffix in itertools.product(PICTURES, ("png", "svg")):
        file = f"{name}.{suffix}"
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
