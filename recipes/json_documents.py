"""The documents in JSON files, one object in memory at a time, so objects have a largest size.

A line of a ``.jsonl`` that cannot be read is one line less. In a ``.json``, where the next object
begins is known only to one who has read the one before: it ends there.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.pieces import (
    BLOCK_BYTES,
    CorpusError,
    Piece,
    Reading,
    cut,
    decoded,
    not_utf8,
    open_regular,
)

_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's own


def read_json_lines(path: Path, reading: Reading) -> Iterator[Piece]:
    """One object a line; lines of spaces are passed over."""
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
                        line = file.readline(BLOCK_BYTES)
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
            yield from cut([text], source)


def read_json(path: Path, reading: Reading) -> Iterator[Piece]:
    """One object, or a list of them, decoded one by one."""

    def documents(source: str, value: object) -> Iterator[Piece]:
        try:
            text = _text_of(value, reading.text_field, source)
        except CorpusError as error:
            reading.report(error)
        else:
            yield from cut([text], source)

    with open_regular(path) as file:
        window = _Window(path, decoded(path, file), reading.max_object_size)
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


def _decoded_line(line: bytes, source: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(source, error) from None


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
