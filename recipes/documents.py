"""A file's documents, a piece at a time: memory does not grow with the file.

==============  ===============================  ===================  ==============================
suffix          one file holds                   one document is      in memory at a time
==============  ===============================  ===================  ==============================
.txt            text                             the file             a block of it
.json           objects, or lists of objects     one object's field   one object
.jsonl          one object per line              one line's field     one object
.csv            a table                          one row's field      one row
.parquet        a table                          one row's field      a page of a column, 64 rows
==============  ===============================  ===================  ==============================

A document longer than a piece is cut in front of a word, where no tokenizer that splits text at
words joins what lies on both sides: its tokens are those of the whole. Only a piece without any
such place is cut elsewhere.

What cannot be read is given out between the pieces, as the error that names it. Nothing more of a
file can be read after an object of a ``.json``'s list whose end is not found, or after a damaged
page of a ``.parquet``. A quote that nobody closed takes in what follows it in a ``.csv``, up to the
largest cell. A table without the column is one mistake.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import NamedTuple

from recipes.errors import RecipeError

PIECE_LENGTH = 2**16  # characters; tokens take a hundred times their bytes while they are made
BLOCK_LENGTH = 2**16  # characters read at once, at most 4 bytes each
_CURE = "Repair it, or name another one with --data.text_field (--data.answer_field of answers)."

# What follows a piece: a space, or a line that begins with a letter, or the end.
_PIECE = r"(?s:.{1,%d}(?:(?<=\S)(?=[ \t])|(?<=\S\n)(?=[^\W\d_])|\Z)|.{1,%d})"
_DECODER = json.JSONDecoder()
_LONGEST_WORD = 16  # characters; a pair of escapes has 12


class CorpusError(RecipeError):
    """A corpus that cannot be read; the message names the file and, if any, the line."""


class Piece(NamedTuple):
    """A stretch of one document; the pieces of a document follow one another.

    Attributes:
        text: As it stands in the file, line ends included; empty only if the document is.
        is_last: The document ends here.
    """

    text: str
    is_last: bool


# What a reader gives: the pieces of all documents in a file, in order, and what cannot be read.
Found = Iterator[Piece | CorpusError]


def read(path: Path, field: str, most: int) -> Found:
    """What is in a file.

    Args:
        path: The file; one whose suffix is not in :data:`READERS` is plain text.
        field: The field of a JSON object, or the column of a table, that holds the text.
        most: Characters of a JSON object, or of a cell of a ``.csv``, at most.
    """
    read_kind = READERS.get(path.suffix.lower(), _read_text)
    try:
        # Bytes that are no UTF-8 become halves of surrogate pairs, and so keep their place.
        with TextIOWrapper(opened(path), "utf-8-sig", "surrogateescape", newline="\n") as file:
            yield from read_kind(path, file, field, most)
    except Exception as error:  # noqa: BLE001 (a damaged file is an error of many kinds)
        yield error if isinstance(error, CorpusError) else unreadable(path, error)


def opened(path: Path) -> BufferedReader:
    """The file, open for reading.

    Raises:
        OSError: It cannot be opened; or it is something else, which might never end.
    """
    if path.exists() and not path.is_file():
        raise OSError("a pipe, a socket or a device")
    return path.open("rb")


def unreadable(path: Path | str, error: Exception) -> CorpusError:
    """The error for what the system, or a library, will not read."""
    got = f"'{getattr(error, 'strerror', None) or error}'"
    cure = "Make it readable, or take it away."
    return CorpusError.at(path, "a file or folder that can be read", got, cure)


def cut(texts: Iterable[str]) -> Iterator[Piece]:
    """A document in pieces of :data:`PIECE_LENGTH` at most; its text comes in blocks."""
    pattern = re.compile(_PIECE % (PIECE_LENGTH - 1, PIECE_LENGTH))
    rest = ""
    for text in texts:
        *whole, rest = pattern.findall(rest + text) or [""]
        yield from (Piece(each, is_last=False) for each in whole)
    yield Piece(rest, is_last=True)


def _read_text(path: Path, file: TextIOWrapper, *_options: object) -> Found:
    def blocks() -> Iterator[str]:
        line = 1
        while text := file.read(BLOCK_LENGTH):
            _require_utf8(text, path, line)
            line += text.count("\n")
            yield text

    for _ in blocks():
        pass  # before a piece is given out, so that a document comes as a whole or not at all
    file.seek(0)
    yield from cut(blocks())


def _read_lines(path: Path, file: TextIOWrapper, field: str, most: int) -> Found:
    for number, line in enumerate(iter(lambda: file.readline(most + 1), ""), 1):
        source, rest = f"{path}:{number}", line
        try:
            if len(line) > most:
                while rest and not rest.endswith("\n"):
                    rest = file.readline(BLOCK_LENGTH)
                raise _too_large(source, most)
            if not line.isspace():
                _require_utf8(line, path, number)
                yield from _document(source, json.loads(line), field)
        except (ValueError, RecursionError) as error:
            yield error if isinstance(error, CorpusError) else _broken(source, error)


def _read_json(path: Path, file: TextIOWrapper, field: str, most: int) -> Found:
    window = _Window(path, file, most)
    while True:  # one after another, as lines of objects are, which such files often hold
        is_list = window.skip("[")
        if not (is_list and window.skip("]")):
            yield from _document(*window.value(), field)
            while is_list and not window.skip("]"):
                if not window.skip(","):
                    raise _broken(window.source(), "no ',' or ']' after a list's object")
                yield from _document(*window.value(), field)
        if window.skip(""):
            return


class _Window:
    """The part of a JSON file that is in memory: from what comes next, as far as needed."""

    def __init__(self, path: Path, file: TextIOWrapper, most: int) -> None:
        self._path = path
        self._file = file
        self._most = most
        self._text = ""
        self._line = self._column = 1  # of the file, where the text begins

    def source(self) -> str:
        """Where what comes next stands, as ``path:line``."""
        return f"{self._path}:{self._line}"

    def skip(self, character: str) -> bool:
        """Pass over spaces, and over a character if it comes next; the empty one ends the file."""
        while not (rest := self._text.lstrip(" \t\r\n")) and self._grow():
            pass
        is_next = rest[:1] == character
        self._drop(len(self._text) - len(rest) + len(character) * is_next)
        return is_next

    def value(self) -> tuple[str, object]:
        """Where the value that comes next stands, and itself.

        Raises:
            CorpusError: There is none, or it is too large. What follows cannot be read.
        """
        self.skip("")
        source = self.source()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text)
            except (ValueError, RecursionError) as error:
                value, end = error, getattr(error, "pos", 0) + 1
                if "Unterminated" in str(error):  # a string that begins there
                    end = len(self._text)
            # What stands at the end of the window may go on behind it.
            if len(self._text) - end > _LONGEST_WORD or not self._grow():
                break
        if end > self._most:
            raise _too_large(source, self._most)
        _require_utf8(self._text[:end], self._path, self._line)
        if isinstance(value, Exception):
            self._drop(getattr(value, "pos", 0))
            raise _broken(self.source(), value, column=self._column)
        self._drop(end)
        return source, value

    def _grow(self) -> bool:
        """Take in as much again.

        As much: a value is decoded anew each time, which is then as much work as decoding it twice.

        Returns:
            Whether there was more, and room for it.
        """
        room = self._most + _LONGEST_WORD - len(self._text)
        more = self._file.read(min(max(len(self._text), BLOCK_LENGTH), room))
        self._text += more
        return bool(more)

    def _drop(self, num_characters: int) -> None:
        newline = self._text.rfind("\n", 0, num_characters)
        self._column = num_characters - newline if newline >= 0 else self._column + num_characters
        self._line += self._text.count("\n", 0, num_characters)
        self._text = self._text[num_characters:]


def _read_csv(path: Path, file: TextIOWrapper, field: str, most: int) -> Found:
    csv.field_size_limit(most)
    rows = csv.reader(file, strict=True)
    columns = next(rows, [])
    _require_column(path, columns, field)
    while True:
        line = rows.line_num + 1
        source = f"{path}:{line}"
        try:
            if (row := next(rows, None)) is None:
                return
            _require_utf8("".join(row), path, line)
            if len(row) == len(columns):
                yield from _document(source, dict(zip(columns, row, strict=True)), field)
            elif row:  # not a blank line
                yield _broken(source, f"{len(row)} cells for {len(columns)} columns", "CSV")
        except (csv.Error, CorpusError) as error:
            kind = "CSV with cells up to --data.max_object_size"
            yield error if isinstance(error, CorpusError) else _broken(source, error, kind)


def _read_parquet(path: Path, file: TextIOWrapper, field: str, _most: int) -> Found:
    from pyarrow.parquet import ParquetFile  # 37 MB of memory

    # By default all of a row group is read at once.
    table = ParquetFile(file.buffer, buffer_size=BLOCK_LENGTH, pre_buffer=False)
    _require_column(path, table.schema_arrow.names, field)
    kind = str(table.schema_arrow.field(field).type)
    if not re.match(r"(dictionary<values=)?(large_)?string", kind):
        raise CorpusError.at(path, f"strings in the column '{field}'", kind, _CURE)
    batches = table.iter_batches(64, columns=[field])
    texts = (text for batch in batches for text in batch.column(field))
    for number, text in enumerate(texts, 1):
        source = f"{path}, row {number}"
        try:
            yield from _document(source, {field: text.as_py()}, field)
        except UnicodeDecodeError as error:
            yield CorpusError.at(source, "UTF-8", error, "Repair or remove it.")


def _require_column(path: Path, columns: list[str], field: str) -> None:
    if columns.count(field) != 1:
        raise CorpusError.at(path, f"a table with one column '{field}'", _names(columns), _CURE)


READERS: dict[str, Callable[[Path, TextIOWrapper, str, int], Found]] = {
    ".txt": _read_text,
    ".json": _read_json,
    ".jsonl": _read_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
TABLES = (".csv", ".parquet")


def _document(source: str, value: object, field: str) -> Found:
    """The pieces of an object's text, or what is wrong with it."""
    if not isinstance(value, dict) or field not in value:
        found = _names(value) if isinstance(value, dict) else json.dumps(value)[:40]
        yield CorpusError.at(source, f"an object with the field '{field}'", found, _CURE)
    elif not isinstance(text := value[field], str):
        found = json.dumps(text)[:40]
        yield CorpusError.at(source, f"a string in the field '{field}'", found, _CURE)
    elif half := _half_of_a_pair(text):
        code = f"half of a surrogate pair (\\u{ord(text[half.start]):04x})"
        yield CorpusError.at(source, f"text in the field '{field}'", code, _CURE)
    else:
        yield from cut([text])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"'{each}'" for each in list(names)[:10]) or "no field"


def _half_of_a_pair(text: str) -> UnicodeEncodeError | None:
    """Where the text has half of a surrogate pair, which no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error
    return None


def _require_utf8(text: str, path: Path, line: int) -> None:
    if half := _half_of_a_pair(text):
        line += text.count("\n", 0, half.start)
        byte = f"byte 0x{ord(text[half.start]) & 0xFF:02x}"
        cure = "Convert the file, for example with iconv."
        raise CorpusError.at(f"{path}:{line}", "UTF-8", byte, cure)


def _broken(source: str, why: Exception | str, kind: str = "JSON", column: int = 0) -> CorpusError:
    if isinstance(why, json.JSONDecodeError):
        why = f"{why.msg}, column {column or why.colno}"
    why = str(why).partition(": ")[0]  # what follows is advice for another program
    return CorpusError.at(source, kind, f"a broken line ({why})", "Repair or remove it.")


def _too_large(source: str, most: int) -> CorpusError:
    cure = "Split it, put its text into a .txt file, or raise --data.max_object_size."
    return CorpusError.at(source, f"an object of at most {most:,} characters", "a longer one", cure)
