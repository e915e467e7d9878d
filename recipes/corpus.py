"""A corpus: files in a fixed order, and the documents in them.

========  =====================================  ===================
suffix    one file holds                         one document is
========  =====================================  ===================
.txt      text                                   the file
.json     an object, or a list of objects        one object's field
.jsonl    one object per line                    one line's field
========  =====================================  ===================

The default corpus needs no download: the source files of the Python that runs. Whatever cannot be
read is an error that names file and line, since a document that is silently left out changes the
model and nothing shows it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import RecipeError

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)


class CorpusError(RecipeError):
    """A corpus that cannot be read; the message names the file and, if any, the line."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text of the corpus.

    Attributes:
        source: Where it was found, as ``path:line``.
        text: The text as it stands in the file, line ends included; never empty.
    """

    source: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files of one folder, in the order in which their documents are trained on.

    Attributes:
        root: The folder; file names in the fingerprint are relative to it.
        files: The files, in order. Every suffix other than ``.json`` and ``.jsonl`` is plain text.
        text_field: The field of a JSON object that holds its text.
    """

    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"

    def documents(self) -> Iterator[Document]:
        """All documents that hold text, file by file.

        Raises:
            CorpusError: A file is not UTF-8 or not JSON, or an object has no text.
        """
        for path in self.files:
            reader = _READERS.get(path.suffix.lower(), _read_text)
            for document in reader(path, self.text_field):
                if document.text:
                    yield document

    def fingerprint(self) -> str:
        """Hash of names and contents, as 64 hexadecimal digits. Reads every file once."""
        total = hashlib.sha256(self.text_field.encode())
        for path in self.files:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"\n{path.relative_to(self.root).as_posix()} {content}".encode())
        return total.hexdigest()

    def num_bytes(self) -> int:
        """Size of all files, in bytes."""
        return sum(path.stat().st_size for path in self.files)


def open_corpus(path: Path, *, text_field: str = "text") -> Corpus:
    """The corpus in a folder (its subfolders included) or in a single file.

    Args:
        path: A folder with ``.txt``, ``.json`` or ``.jsonl`` files, taken in the order of their
            names; other files are left alone. Or one such file.
        text_field: The field of a JSON object that holds its text.

    Raises:
        CorpusError: Nothing is there, or nothing that can be read.
    """
    suffixes = ", ".join(sorted(_READERS))
    if path.is_file():
        if path.suffix.lower() not in _READERS:
            raise CorpusError(
                f"{path}: expected one of {suffixes}, got '{path.suffix}'. Rename it."
            )
        return Corpus(root=path.parent, files=(path,), text_field=text_field)
    if not path.is_dir():
        raise CorpusError(f"{path}: expected a folder with text, found nothing. Check --data.path.")
    found = sorted(entry for entry in path.rglob("*") if entry.is_file())
    files = tuple(entry for entry in found if entry.suffix.lower() in _READERS)
    if not files:
        raise CorpusError(
            f"{path}: expected at least one file of {suffixes}, got {len(found)} other files. "
            f"Put text there, or leave --data.path out to use Python's own sources."
        )
    return Corpus(root=path, files=files, text_field=text_field)


def standard_library(max_bytes: int) -> Corpus:
    """The source files of this Python's standard library, without tests and installed packages.

    Files that are empty or not UTF-8 are left out. The order is that of hashed names, so that a
    part of the corpus is a mixture of all packages and not the first letters of the alphabet.

    Args:
        max_bytes: Files are taken until one would pass this size.

    Raises:
        CorpusError: This Python ships no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = list(_python_files(root))
    found.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    files: list[Path] = []
    size = 0
    for path in found:
        content = path.read_bytes()
        if size + len(content) > max_bytes:
            break
        if content and _is_utf8(content):
            files.append(path)
            size += len(content)
    if not files:
        raise CorpusError(
            f"{root}: expected this Python's source files within {max_bytes:,} bytes, found none. "
            f"Name a folder with --data.path, or raise --data.standard_library_mb."
        )
    return Corpus(root=root, files=tuple(files))


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith("config-")
        ]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decode(path: Path) -> str:
    """The file's text, line ends as they are, without a byte order mark."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CorpusError(
            f"{path}:{line}: expected UTF-8, got byte 0x{content[error.start]:02x}. "
            f"Convert the file, for example with iconv."
        ) from None


def _read_text(path: Path, text_field: str) -> Iterator[Document]:
    del text_field  # plain text has no fields
    yield Document(source=f"{path}:1", text=_decode(path))


def _read_json_lines(path: Path, text_field: str) -> Iterator[Document]:
    for number, line in enumerate(_decode(path).split("\n"), start=1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _broken(source, error) from None
        yield Document(source=source, text=_text_of(value, text_field, source))


def _read_json(path: Path, text_field: str) -> Iterator[Document]:
    """One object, or a list of them, decoded one by one so that an error knows its line."""
    content = _decode(path)
    decoder = json.JSONDecoder()
    line, seen = 1, 0

    def source_at(position: int) -> str:
        nonlocal line, seen
        line += content.count("\n", seen, position)
        seen = position
        return f"{path}:{line}"

    def value_at(position: int) -> tuple[object, int]:
        try:
            return decoder.raw_decode(content, position)
        except json.JSONDecodeError as error:
            raise _broken(f"{path}:{error.lineno}", error) from None
        except (ValueError, RecursionError) as error:
            raise _broken(source_at(position), error) from None

    position = _skip_space(content, 0)
    if not content.startswith("[", position):
        source = source_at(position)
        value, position = value_at(position)
        yield Document(source=source, text=_text_of(value, text_field, source))
    else:
        position = _skip_space(content, position + 1)
        is_open = not content.startswith("]", position)
        while is_open:
            source = source_at(position)
            value, position = value_at(position)
            yield Document(source=source, text=_text_of(value, text_field, source))
            position = _skip_space(content, position)
            is_open = content.startswith(",", position)
            if is_open:
                position = _skip_space(content, position + 1)
            elif not content.startswith("]", position):
                raise _broken(source_at(position), "no ',' or ']' after a list's object")
        position += 1
    position = _skip_space(content, position)
    if position != len(content):
        raise _broken(source_at(position), "text after the end")


def _skip_space(content: str, position: int) -> int:
    while position < len(content) and content[position] in " \t\r\n":
        position += 1
    return position


def _text_of(value: object, text_field: str, source: str) -> str:
    if not isinstance(value, dict):
        raise CorpusError(
            f"{source}: expected an object with the field '{text_field}', got "
            f'{_kind(value)}. Write {{"{text_field}": ...}}.'
        )
    if text_field not in value:
        fields = ", ".join(f"'{name}'" for name in value) or "no field"
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
    return CorpusError(f"{source}: expected JSON, got a broken line ({why}). Repair or remove it.")


_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".txt": _read_text,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
}
