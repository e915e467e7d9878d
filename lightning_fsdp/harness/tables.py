"""Tables that read well as text and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
UNKNOWN = "?"


def table_of(
    items: Sequence[T],
    columns: Mapping[str, Callable[[T], str]],
    *,
    has_failed: Callable[[T], bool] = lambda _: False,
    num_names: int = 1,
) -> str:
    """A line per item.

    Args:
        items: What it is about.
        columns: Title -> an item's cell.
        has_failed: Of such an item there are no figures.
        num_names: Columns that say which item it is, and come first.
    """

    def line(item: T) -> list[str]:
        cells = list(columns.values())
        if not has_failed(item):
            return [cell(item) for cell in cells]
        names = [cell(item) for cell in cells[:num_names]]
        return [*names, "FAILED", *[""] * (len(cells) - num_names - 1)]

    return markdown_table(list(columns), [line(item) for item in items])


def number(value: float | None, form: str, unit: float = 1.0) -> str:
    """A cell; of what was not measured a question mark, never 0."""
    return UNKNOWN if value is None else format(value / unit, form)


def three_digits(value: float | None) -> str:
    """A cell of three significant digits, or of all before the point; never with an exponent."""
    is_large = value is not None and abs(value) >= 999.5
    return number(value, ",.0f" if is_large else ".3g")


def bullets(lines: Iterable[str]) -> str:
    """A list in Markdown; empty without any."""
    return "\n".join(f"* {line}" for line in lines)


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns of even width.

    Args:
        head: One cell per column.
        body: Lines of as many cells.
    """
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [
        " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [head, *body]
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)
