"""Put measured tables between the markers of README.md and of docs/, and pictures beside.

make bench && python -m benchmarks.update_tables bench runs/bench/report.md
make bench-full && python -m benchmarks.update_tables sweep runs/bench-full/report.md
python -m benchmarks.update_tables scaling runs/scaling/scaling.md
python -m benchmarks.core_step --out benchmarks/results/core_step.json
python -m benchmarks.update_tables core benchmarks/results/core_step.json
python -m benchmarks.host_cost --out benchmarks/results/host_cost.json
python -m benchmarks.update_tables host benchmarks/results/host_cost.json
python -m benchmarks.exact_counters --out benchmarks/results/exact_counters.json
python -m benchmarks.update_tables counters benchmarks/results/exact_counters.json
python -m benchmarks.recipe_losses --out benchmarks/results/recipe_losses.json
python -m benchmarks.update_tables losses benchmarks/results/recipe_losses.json
python -m benchmarks.simulation_check --out benchmarks/results/simulation_check.json
python -m benchmarks.update_tables simulation benchmarks/results/simulation_check.md
python -m benchmarks.checkpoint_speed --out benchmarks/results/checkpoint_speed.json
python -m benchmarks.update_tables checkpoint benchmarks/results/checkpoint_speed.json
python -m benchmarks.muon_step --out benchmarks/results/muon_step.json
python -m benchmarks.update_tables muon benchmarks/results/muon_step.json
python -m benchmarks.head_loss --repeats 2 --out benchmarks/results/head_loss.json
python -m benchmarks.update_tables head-loss benchmarks/results/head_loss.json
python -m benchmarks.one_host
python -m benchmarks.update_tables one-host benchmarks/results/one_host.json
(so one-host-threads, of one_host_threads.json)
python -m benchmarks.hosts
python -m benchmarks.update_tables hosts benchmarks/results/hosts.json
python -m benchmarks.scaling_suggested
python -m benchmarks.update_tables scaling-suggested benchmarks/results/scaling_suggested.json
python -m benchmarks.muon_ranks --out benchmarks/results/muon_ranks.json
python -m benchmarks.update_tables muon-ranks benchmarks/results/muon_ranks.json
python -m benchmarks.gpu --part speed --out benchmarks/results/gpu
python -m benchmarks.update_tables gpu benchmarks/results/gpu/speed.json
make bench-optimizer && python -m benchmarks.update_tables optimizer runs/optimizer/report.md
python -m benchmarks.real_size --checkpoint --out benchmarks/results/real_size/medium.json
python -m benchmarks.update_tables medium benchmarks/results/real_size/medium.json
(so large and large-more, of large.json; qwen, of qwen2.5-0.5b.json; medium-accum; medium-bf16)
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    head_loss,
    hosts,
    muon_ranks,
    muon_step,
    one_host,
    real_size,
    scaling_suggested,
)
from benchmarks.command import BenchmarkParser
from benchmarks.gpu.table import table_of as table_of_gpu
from lightning_fsdp.harness.environment import describe

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
GUIDE = ROOT / "docs" / "fsdp1-vs-fsdp2.md"  # written by `make guide`
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = {  # of the report's folder
    "bench": ("plots/time_breakdown.png", "plots/memory_over_time.png"),
    "sweep": ("plots/tokens_per_s.png", "plots/memory.png"),
    "scaling": ("scaling.png",),
}
PICTURES_ALONE = ("sweep", "scaling")  # and the line that says how they came about
UNITS = {"written_bytes": ("written GB", 1e9), "payload_bytes": ("payload GB", 1e9)}
GIB = ("peak GiB", 2**30)


def core_table(document: dict[str, Any]) -> list[str]:
    """The rows of ``core_step.py``."""
    lines = [
        "| batch x tokens | engine | step, median (quartiles) ms | of FSDP2's, same stage |",
        "| --- | --- | --- | --- |",
    ]
    for row in document["rows"]:
        ratio = "" if row["ratio_to_fsdp2"] is None else f"{row['ratio_to_fsdp2']:.2f}"
        lines.append(
            f"| {row['batch']} x {row['seq']} | {row['arm']} | {row['median_ms']:.0f} "
            f"({row['q1_ms']:.0f}..{row['q3_ms']:.0f}) | {ratio} |"
        )
    return lines


def host_table(document: dict[str, Any]) -> list[str]:
    """The rows of ``host_cost.py``."""
    lines = [
        "| case | this core, µs | FSDP2, µs | of FSDP2's (quartiles) | bare slices, µs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in document["rows"]:
        bare = f"{row['bare_us']:.0f}" if "bare_us" in row else ""
        low, ratio, high = row["ratio_quartiles"]
        lines.append(
            f"| {row['case']} | {row['scratch_us']:.0f} | {row['fsdp2_us']:.0f} "
            f"| {ratio:.2f} ({low:.2f}..{high:.2f}) | {bare} |"
        )
    return lines


def counters_table(document: dict[str, Any]) -> list[str]:
    """The rows of ``exact_counters.py``."""
    lines = [
        "| ranks | dtypes | figure | core | hand | FSDP2 | split | of FSDP2 | hand of | of split |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    arms = ("scratch", "scratch_by_hand", "fsdp2", "fsdp2_split")
    for row in document["rows"]:
        figure, unit = UNITS.get(row["figure"], GIB)
        values = " | ".join(f"{row[arm] / unit:.3f}" for arm in arms)
        lines.append(
            f"| {row['world_size']} | {row['dtypes']} | {figure} | {values} "
            f"| {row['of_fsdp2']:.3f} | {row['by_hand_of_fsdp2']:.3f} "
            f"| {row['of_fsdp2_split']:.3f} |"
        )
    return lines


def checkpoint_table(document: dict[str, Any]) -> list[str]:
    """The rows of ``checkpoint_speed.py``, an operation a line."""
    about = document["about"]
    names = {"scratch": "this core", "fsdp2": "FSDP2", "dcp": "FSDP2, by torch's DCP"}
    head = [f"{names[arm]}, ms" for arm in about]
    head += [f"{names[arm]}, of DCP's" for arm in list(about)[:-1]]
    lines = [f"| {' | '.join(['', *head])} |", "| --- " * (len(head) + 1) + "|"]
    for operation in dict.fromkeys(row["operation"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["operation"] == operation]
        cells = [
            f"{row['median_s'] * 1e3:.0f} ({row['q1_s'] * 1e3:.0f}..{row['q3_s'] * 1e3:.0f}), "
            f"{row['bytes_per_s'] / 1e6:.0f} MB/s"
            for row in rows
        ]
        ratios = ["" if r["ratio_to_dcp"] is None else f"{r['ratio_to_dcp']:.2f}" for r in rows]
        lines.append(f"| {' | '.join([operation, *cells, *ratios[:-1]])} |")
    for operation in ("save", "async save", "load"):
        extra = [f"{each['extra_bytes'][operation] / 1e6:.1f} MB" for each in about.values()]
        lines.append(f"| memory of a rank: {' | '.join([operation, *extra])}{' |' * len(about)}")
    written = [f"{each['written_bytes'] / 1e6:.1f} MB" for each in about.values()]
    lines.append(f"| {' | '.join(['bytes in the folder', *written])}{' |' * len(about)}")
    return lines


def losses_table(document: dict[str, Any]) -> list[str]:
    """The rows of ``recipe_losses.py``."""
    rows = document["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    what = (
        f"Validation loss (perplexity) after {document['num_steps']} optimizer steps of "
        f"{document['batch_size']} sequences, {document['num_ranks']} ranks:"
    )
    lines = [
        what,
        "",
        f"| strategy | {' | '.join(models)} |",
        "| --- |" + " --- |" * len(models),
    ]
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        found = {row["model"]: row["validation"] for row in rows if row["strategy"] == strategy}
        cells = [f"{found[model]:.4f} ({math.exp(found[model]):.0f})" for model in models]
        lines.append(f"| {strategy} | {' | '.join(cells)} |")
    first = {row["model"]: row["first"] for row in rows}
    before = [f"{first[model]:.4f} ({math.exp(first[model]):.0f})" for model in models]
    lines.append(f"| before training | {' | '.join(before)} |")
    return lines


def more_table(document: dict[str, Any]) -> list[str]:
    """What else ``real_size.py`` did."""
    return real_size.more_of(document).splitlines()


def real_size_table(document: dict[str, Any]) -> list[str]:
    """The arms of ``real_size.py``."""
    return real_size.table_of(document).splitlines()


def muon_table(document: dict[str, Any]) -> list[str]:
    """The arms of ``muon_step.py``."""
    return muon_step.table_of(document["rows"]).splitlines()


def head_loss_table(document: dict[str, Any]) -> list[str]:
    """The ways of ``head_loss.py``."""
    return head_loss.table_of(document["rows"]).splitlines()


def one_host_table(document: dict[str, Any]) -> list[str]:
    """The arms of ``one_host.py``."""
    return one_host.table(document["rows"]).splitlines()


def hosts_table(document: dict[str, Any]) -> list[str]:
    """The arms of ``hosts.py``."""
    return hosts.table(document["rows"]).splitlines()


def scaling_suggested_table(document: dict[str, Any]) -> list[str]:
    """The rows of ``scaling_suggested.py``."""
    return scaling_suggested.table(document).splitlines()


def muon_ranks_table(document: dict[str, Any]) -> list[str]:
    """What ``muon_ranks.py`` computed."""
    rows = [muon_ranks.Row(**row) for row in document["rows"]]
    return muon_ranks.table_of(rows).splitlines()


def gpu_table(document: dict[str, Any]) -> list[str]:
    """Goals and cases of the part ``speed`` of ``benchmarks.gpu``."""
    return table_of_gpu(document).splitlines()


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "core": core_table,
    "host": host_table,
    "counters": counters_table,
    "checkpoint": checkpoint_table,
    "losses": losses_table,
    "medium": real_size_table,
    "large": real_size_table,
    "large-more": more_table,
    "qwen": real_size_table,
    "muon": muon_table,
    "muon-ranks": muon_ranks_table,
    "head-loss": head_loss_table,
    "one-host": one_host_table,
    "one-host-threads": one_host_table,
    "hosts": hosts_table,
    "scaling-suggested": scaling_suggested_table,
    "medium-accum": real_size_table,
    "medium-bf16": real_size_table,
    "gpu": gpu_table,
}


def made_of(name: str, document: dict[str, Any]) -> str:
    """A table, under the line that says how it came about."""
    ran = document["sessions"][-1] if "sessions" in document else document
    return "\n".join([describe(ran), "", *TABLES[name](document)])


def page_of(name: str) -> Path:
    """The page that has the markers of a table."""
    (page,) = (page for page in PAGES if f"<!-- {name}:begin -->" in page.read_text())
    return page


def split(page: str, name: str) -> tuple[str, str, str]:
    """What is before, between and after ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""
    before, rest = page.split(f"<!-- {name}:begin -->\n")
    table, after = rest.split(f"\n<!-- {name}:end -->")
    return before, table, after


def put(path: Path, name: str, table: str) -> None:
    """Replace a table of a page."""
    before, _, after = split(path.read_text(), name)
    path.write_text(f"{before}<!-- {name}:begin -->\n{table}\n<!-- {name}:end -->{after}")


def main() -> None:
    """Put the table of a result into the page that has its markers."""
    args = make_parser().parse(None)
    name, source = args.table, args.source
    if name in TABLES:
        shown = made_of(name, json.loads(source.read_text()))
    elif name in PICTURES_ALONE:
        shown = source.read_text().partition("\n\n")[0]
    else:
        shown = source.read_text().split("\n## ")[0].strip()  # the report's first table
    if name == "muon-ranks":
        shutil.copy(source.with_suffix(".png"), PICTURES)
    if name in ("bench", "sweep"):
        shutil.copy(source.parent / "comparison.csv", RESULTS / f"{name}.csv")
    for picture in SHOWN.get(name, ()):
        PICTURES.mkdir(exist_ok=True)
        shutil.copy(source.parent / picture, PICTURES)
    put(page_of(name), name, shown)


def make_parser() -> BenchmarkParser:
    """The options."""
    parser = BenchmarkParser(
        "update_tables",
        __doc__,
        examples=["bench runs/bench/report.md", "core benchmarks/results/core_step.json"],
    )
    tables = sorted({*TABLES, *SHOWN, "optimizer", "simulation"})
    parser.add_argument("table", choices=tables, metavar="TABLE", help="name of the markers")
    parser.add_argument(
        "source", type=Path, metavar="FILE", help="JSON or report that the benchmark has written"
    )
    return parser


if __name__ == "__main__":
    main()
