"""A file's documents, a piece at a time: memory does not grow with the file.

========  =====================================  ===================  ==============================
suffix    one file holds                         one document is      in memory at a time
========  =====================================  ===================  ==============================
.txt      text                                   the file             a block of it
.json     an object, or a list of objects        one object's field   one object
.jsonl    one object per line                    one line's field     one object
========  =====================================  ===================  ==============================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from recipes.json_documents import read_json, read_json_lines
from recipes.pieces import (
    CorpusError,
    Piece,
    Reading,
    changed,
    cut,
    decoded,
    open_regular,
    unreadable,
)


def read_documents(path: Path, reading: Reading) -> Iterator[Piece]:
    """The pieces of all documents in a file, in order.

    Raises:
        CorpusError: What ``reading.report`` raises; or the file changed meanwhile.
    """
    is_whole = True
    try:
        for piece in READERS.get(path.suffix.lower(), _read_text)(path, reading):
            is_whole = piece.is_last
            yield piece
    except (OSError, CorpusError) as error:
        if not is_whole:  # its first pieces were read without an error a moment ago
            raise changed(path) from error
        reading.report(error if isinstance(error, CorpusError) else unreadable(path, error))


def _read_text(path: Path, reading: Reading) -> Iterator[Piece]:
    del reading  # plain text has no fields
    with open_regular(path) as file:
        for _ in decoded(path, file):
            pass  # before a piece is given out, so that a document comes as a whole or not at all
        file.seek(0)
        yield from cut(decoded(path, file), f"{path}:1")


READERS: dict[str, Callable[[Path, Reading], Iterator[Piece]]] = {
    ".txt": _read_text,
    ".json": read_json,
    ".jsonl": read_json_lines,
}
