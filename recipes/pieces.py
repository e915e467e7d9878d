"""Text in pieces: what is in memory of a file, however large it is.

A document longer than a piece is cut in front of a word, where no tokenizer that splits text at
words joins what lies on both sides: its tokens are those of the whole. Only a piece without any
such place is cut elsewhere.
"""

from __future__ import annotations

import codecs
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from recipes.errors import RecipeError

PIECE_LENGTH = 2**16  # characters; tokens take a hundred times their bytes while they are made
BLOCK_BYTES = 2**20  # read at once

# In front of a space, or of a line that begins with a letter.
_WORD_BEGINS = re.compile(r"(?<=\S)(?=[ \t])|(?<=\S\n)(?=[^\W\d_])")


class CorpusError(RecipeError):
    """A corpus that cannot be read; the message names the file and, if any, the line."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of one document; the pieces of a document follow one another.

    Attributes:
        source: Where the document was found, as ``path:line``.
        text: As it stands in the file, line ends included; empty only if the document is.
        is_last: The document ends here.
    """

    source: str
    text: str
    is_last: bool = True


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read.

    Attributes:
        text_field: The field of a JSON object that holds its text.
        max_object_size: Characters of a JSON object, at most.
        report: Takes what cannot be read; if it returns, that is left out.
    """

    text_field: str
    max_object_size: int
    report: Callable[[CorpusError], None]


def open_regular(path: Path) -> BufferedReader:
    """The file, open for reading.

    Raises:
        CorpusError: It is something else, which might never end.
        OSError: It cannot be opened.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        names = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
        raise CorpusError(
            f"{path}: expected a file, got a {names.get(kind, 'device')}. Put a file there, or "
            f"give it another suffix."
        )
    return path.open("rb")


def unreadable(path: Path, error: OSError) -> CorpusError:
    """The error for what the system will not read."""
    return CorpusError(
        f"{path}: expected a file that can be read, got '{error.strerror}'. Make it readable, or "
        f"take it away."
    )


def changed(path: Path) -> CorpusError:
    """The error for a file that somebody writes to."""
    return CorpusError(
        f"{path}: expected a file that stays as it is, got one that changed while it was read. "
        f"Start again when nothing writes to it."
    )


def decoded(path: Path, file: BufferedReader) -> Iterator[str]:
    """The file's text in blocks, none empty, line ends as they are, without a byte order mark."""
    rest, line, is_first = b"", 1, True
    while True:
        block = file.read(BLOCK_BYTES)
        content, failure = rest + block, None
        try:
            text, used = codecs.utf_8_decode(content, "strict", not block)
        except UnicodeDecodeError as error:
            text, used = content[: error.start].decode("utf-8"), error.start
            failure = error
        if is_first and text:
            text, is_first = text.removeprefix("\ufeff"), False
        if text:
            yield text
        line += content.count(b"\n", 0, used)
        if failure is not None:  # what comes before it was read, whatever the size of a block
            raise not_utf8(f"{path}:{line}", failure)
        if not block:
            return
        rest = content[used:]


def cut(texts: Iterable[str], source: str) -> Iterator[Piece]:
    """A document in pieces of :data:`PIECE_LENGTH` at most; its text comes in blocks."""
    rest = ""
    for text in texts:
        rest += text
        begin = 0
        while len(rest) - begin > PIECE_LENGTH:
            end = _place_to_cut(rest, begin)
            yield Piece(source=source, text=rest[begin:end], is_last=False)
            begin = end
        rest = rest[begin:]
    yield Piece(source=source, text=rest)


def _place_to_cut(text: str, begin: int) -> int:
    """The last place in front of a word; most are near the end of the piece."""
    end = begin + PIECE_LENGTH
    for near in (end - PIECE_LENGTH // 64, begin + 1):
        places = [found.start() for found in _WORD_BEGINS.finditer(text, near, end)]
        if places:
            return places[-1]
    return end


def not_utf8(source: str, error: UnicodeDecodeError) -> CorpusError:
    """The error for bytes that are no text."""
    return CorpusError(
        f"{source}: expected UTF-8, got byte 0x{error.object[error.start]:02x}. "
        f"Convert the file, for example with iconv."
    )
