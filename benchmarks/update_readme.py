"""Put measured tables into README.md, between their markers.

make bench && python benchmarks/update_readme.py runs/bench/report.md bench
python benchmarks/core_step.py --out benchmarks/results/core_step.json
python benchmarks/update_readme.py benchmarks/results/core_step.json core
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lightning_fsdp.bench.report import describe

README = Path(__file__).parent.parent / "README.md"


def core_table(results: Path) -> str:
    """The rows of ``core_step.py`` in Markdown."""
    document = json.loads(results.read_text())
    lines = [
        describe(document),
        "",
        "| batch x tokens | engine | step, median (quartiles) ms | of FSDP2's, same stage |",
        "| --- | --- | --- | --- |",
    ]
    for row in document["rows"]:
        ratio = "" if row["ratio_to_fsdp2"] is None else f"{row['ratio_to_fsdp2']:.2f}"
        lines.append(
            f"| {row['batch']} x {row['seq']} | {row['arm']} | {row['median_ms']:.0f} "
            f"({row['q1_ms']:.0f}..{row['q3_ms']:.0f}) | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Replace the text between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``."""
    source, name = Path(sys.argv[1]), sys.argv[2]
    table = core_table(source) if source.suffix == ".json" else source.read_text().strip()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = README.read_text()
    before, rest = text.split(begin)
    _, after = rest.split(end)
    README.write_text(f"{before}{begin}\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
