"""Tables that read well as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


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
