"""A file's documents, a piece at a time: memory does not grow with the file.

========  =====================================  ===================  ==============================
suffix    one file holds                         one document is      in memory at a time
========  =====================================  ===================  ==============================
.txt      text                                   the file             a block of it
.json     an object, or a list of objects        one object's field   one object
.jsonl    one object per line                    one line's field     one object
========  =====================================  ===================  ==============================

So an object has a largest size, and a text none. A document longer than a piece is cut in front of
a word, where no tokenizer that splits text at words joins what lies on both sides: its tokens are
those of the whole. Only a piece without any such place is cut elsewhere.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from recipes.errors import RecipeError

PIECE_LENGTH = 2**16  # characters; tokens take a hundred times their bytes while they are made
_BLOCK_BYTES = 2**20  # read at once

_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's own
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


def _read_text(path: Path, reading: Reading) -> Iterator[Piece]:
    del reading  # plain text has no fields
    with open_regular(path) as file:
        for _ in _decoded(path, file):
            pass  # before a piece is given out, so that a document comes as a whole or not at all
        file.seek(0)
        yield from _cut(_decoded(path, file), f"{path}:1")


def _read_json_lines(path: Path, reading: Reading) -> Iterator[Piece]:
    most = reading.max_object_size
    with open_regular(path) as file:
        for number in itertools.count(1):
            line = file.readline(4 * most + 1)  # no character has more than 4 bytes
            if not line:
                if number == 1:
                    yield Piece(source=f"{path}:1", text="")
                return
            source = f"{path}:{number}"
            try:
                if len(line) > 4 * most:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(_BLOCK_BYTES)
                    raise _too_large(source, most)
                content = _decoded_line(line, source)
                if number == 1:
                    content = content.removeprefix("\ufeff")
                if not content.strip():
                    continue
                if len(content) > most:
                    raise _too_large(source, most)
                text = _text_of(_loads(content, source), reading.text_field, source)
            except CorpusError as error:
                reading.report(error)
                continue
            yield from _cut([text], source)


def _read_json(path: Path, reading: Reading) -> Iterator[Piece]:
    """One object, or a list of them, decoded one by one."""

    def documents(source: str, value: object) -> Iterator[Piece]:
        try:
            text = _text_of(value, reading.text_field, source)
        except CorpusError as error:
            reading.report(error)
        else:
            yield from _cut([text], source)

    with open_regular(path) as file:
        window = _Window(path, _decoded(path, file), reading.max_object_size)
        if window.peek() != "[":
            yield from documents(*window.value())
        else:
            is_open = window.skip() != "]"
            while is_open:
                yield from documents(*window.value())
                following = window.peek()
                if following not in {",", "]"}:
                    raise _broken(window.source(), "no ',' or ']' after a list's object")
                is_open = following == ","
                if is_open:
                    window.skip()
            window.skip()
        if window.peek():
            raise _broken(window.source(), "text after the end")


class _Window:
    """The part of a JSON file that is in memory: from the value that comes next, as far as needed.

    Attributes:
        text: What is in memory.
        position: In it, of what comes next.
    """

    def __init__(self, path: Path, texts: Iterator[str], max_object_size: int) -> None:
        self.path = path
        self.text = ""
        self.position = 0
        self._line = 1  # of the file, where `text[_counted]` is
        self._counted = 0
        self._column = 0  # characters of its line in front of `text`
        self._texts = texts
        self._failure: CorpusError | None = None
        self._most = max_object_size
        self._decoder = json.JSONDecoder()

    def source(self) -> str:
        """Where what comes next stands, as ``path:line``."""
        self._line += self.text.count("\n", self._counted, self.position)
        self._counted = self.position
        return f"{self.path}:{self._line}"

    def peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            found = _SPACE.match(self.text, self.position)
            assert found is not None, "no space is a match as well"
            self.position = found.end()
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._grow():
                return ""

    def skip(self) -> str:
        """Pass over a character, and look at the one after it."""
        self.position += 1
        return self.peek()

    def value(self) -> tuple[str, object]:
        """The value that comes next, and where it stands.

        Raises:
            CorpusError: There is none, or it is too large. What follows cannot be read.
        """
        self.peek()
        source = self.source()
        while True:
            try:
                value, end = self._decoder.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                inside = error.pos - self.position
                if self._grow():  # it may be cut off by the window
                    continue
                if self._is_full and _ran_off(error):
                    raise _too_large(source, self._most) from None
                self.position += inside
                why = f"{error.msg}, column {self._column_of(self.position)}"
                raise _broken(self.source(), why) from None
            except (ValueError, RecursionError) as error:
                raise _broken(source, error) from None
            may_go_on = end == len(self.text) and isinstance(value, (int, float))
            if may_go_on and self._grow():
                continue
            if end - self.position > self._most:
                raise _too_large(source, self._most)
            self.position = end
            return source, value

    @property
    def _is_full(self) -> bool:
        return len(self.text) - self.position > self._most

    def _grow(self) -> bool:
        """Take in twice as much as is left, without what was passed over.

        Twice: a value is decoded anew each time, which is then as much work as decoding it twice.

        Returns:
            Whether there was more, and room for it.
        """
        if self._is_full:
            return False
        self.source()  # counts the lines that leave
        self._column = self._column_of(self.position) - 1
        self._counted = 0
        parts = [self.text[self.position :]]
        self.position = 0
        wanted = min(2 * len(parts[0]), self._most) + 1
        size = len(parts[0])
        while size < wanted and (text := self._next_text(is_needed=len(parts) == 1)):
            parts.append(text)
            size += len(text)
        self.text = "".join(parts)
        return len(parts) > 1

    def _next_text(self, *, is_needed: bool) -> str:
        """More of the file; what is wrong with it is said once what comes before it is read."""
        if self._failure is None:
            try:
                return next(self._texts, "")
            except CorpusError as error:
                self._failure = error
        if is_needed:
            raise self._failure
        return ""

    def _column_of(self, position: int) -> int:
        """Of a place in ``text``, from 1."""
        line_begin = self.text.rfind("\n", 0, position) + 1
        return position - line_begin + 1 + (0 if line_begin else self._column)


def _ran_off(error: json.JSONDecodeError) -> bool:
    """Whether more text might have helped: the error is at the end, but for a cut-off literal."""
    return error.msg.startswith("Unterminated string") or len(error.doc) - error.pos < 16


def _decoded(path: Path, file: BufferedReader) -> Iterator[str]:
    """The file's text in blocks, none empty, line ends as they are, without a byte order mark."""
    rest, line, is_first = b"", 1, True
    while True:
        block = file.read(_BLOCK_BYTES)
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
            raise _not_utf8(f"{path}:{line}", failure)
        if not block:
            return
        rest = content[used:]


def _decoded_line(line: bytes, source: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(source, error) from None


def _cut(texts: Iterable[str], source: str) -> Iterator[Piece]:
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


def _loads(content: str, source: str) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _broken(source, error) from None


def _text_of(value: object, text_field: str, source: str) -> str:
    if not isinstance(value, dict):
        raise CorpusError(
            f"{source}: expected an object with the field '{text_field}', got "
            f'{_kind(value)}. Write {{"{text_field}": ...}}.'
        )
    if text_field not in value:
        fields = ", ".join(f"'{name}'" for name in itertools.islice(value, 10)) or "no field"
        raise CorpusError(
            f"{source}: expected the field '{text_field}', got {fields}. "
            f"Name the field that holds the text with --data.text_field."
        )
    text = value[text_field]
    if not isinstance(text, str):
        raise CorpusError(
            f"{source}: expected a string in the field '{text_field}', got {_kind(text)}. "
            f"Repair the line, or name another field with --data.text_field."
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{source}: expected text in the field '{text_field}', got half of a surrogate pair "
            f"(\\u{ord(text[error.start]):04x}). Repair the line."
        ) from None
    return text


def _kind(value: object) -> str:
    """JSON's own name for a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _not_utf8(source: str, error: UnicodeDecodeError) -> CorpusError:
    return CorpusError(
        f"{source}: expected UTF-8, got byte 0x{error.object[error.start]:02x}. "
        f"Convert the file, for example with iconv."
    )


def _broken(source: str, why: Exception | str) -> CorpusError:
    if isinstance(why, json.JSONDecodeError):
        why = f"{why.msg}, column {why.colno}"
    why = str(why).partition(": ")[0]  # what follows is advice for another program
    return CorpusError(f"{source}: expected JSON, got a broken line ({why}). Repair or remove it.")


def _too_large(source: str, most: int) -> CorpusError:
    return CorpusError(
        f"{source}: expected an object of at most {most:,} characters, got a longer one. Split it, "
        f"put its text into a .txt file, or raise --data.max_object_size."
    )


READERS: dict[str, Callable[[Path, Reading], Iterator[Piece]]] = {
    ".txt": _read_text,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
}
