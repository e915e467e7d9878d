"""A corpus: files in a fixed order, and what they held when they were looked at.

The default corpus needs no download: the source files of the Python that runs. Whatever cannot be
read is an error that names file and line, since a document that is silently left out changes the
model and nothing shows it. Where the user asks for it, it is left out, and counted.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from recipes.documents import READERS, TABLES, CorpusError, Piece, opened, read, unreadable

_SKIPPED = re.compile("__pycache__|config-.*|(dist|site)-packages|idlelib|lib2to3|tests?")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files of one folder, in the order in which their documents are trained on.

    Attributes:
        root: The folder; names of files are relative to it.
        files: The files, in order.
        text_field: The field of a JSON object, or the column of a table, that holds the text.
        max_object_size: Characters of a JSON object, or of a cell of a ``.csv``, at most.
        skip_unreadable: Leave out what cannot be read.
    """

    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"
    max_object_size: int = 8_000_000
    skip_unreadable: bool = False

    def pieces(self, leave_out: Callable[[CorpusError], Any] = lambda _: None) -> Iterator[Piece]:
        """All documents, file by file.

        Args:
            leave_out: Called with what is left out, in order.

        Raises:
            CorpusError: A file is not UTF-8 or not JSON, an object has no text, ...; or, whatever
                is left out, the rest of a document cannot be read.
        """
        is_whole = True
        for path in self.files:
            for found in read(path, self.text_field, self.max_object_size):
                if isinstance(found, Piece):
                    is_whole = found.is_last
                    yield found
                elif self.skip_unreadable and is_whole:  # what is given out cannot be left out
                    leave_out(found)
                else:
                    raise found

    def sums(self) -> dict[str, str]:
        """SHA-256 of each file, in order, under its name in the corpus; empty if left out.

        Raises:
            CorpusError: A file cannot be read.
        """
        sums = {}
        for path in self.files:
            try:
                with opened(path) as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                if not self.skip_unreadable:
                    raise unreadable(path, error) from error
                found = ""
            sums[path.relative_to(self.root).as_posix()] = found
        return sums


def open_corpus(path: Path, **options: Any) -> Corpus:
    """The corpus in a folder (its subfolders included) or in a single file.

    Args:
        path: A folder with ``.txt``, ``.json`` or ``.jsonl`` files, or else with tables (``.csv``,
            ``.parquet``), taken in the order of their names; other files are left alone. Or one
            such file.
        options: Of :class:`Corpus`.

    Raises:
        CorpusError: Nothing is there, or nothing that can be read; or tables beside text, of which
            one mostly describes the other.
    """
    is_folder = path.is_dir()
    found = sorted(_entries(path)) if is_folder else [path] if path.exists() else []
    files = [entry for entry in found if entry.suffix.lower() in READERS]
    if not files:
        kinds = f"at least one file of {', '.join(sorted(READERS))}"
        cure = "Put text there, or leave --data.path out to use Python's own sources."
        raise CorpusError.at(path, kinds, f"{len(found)} other files" if found else "nothing", cure)
    examples = {entry.suffix.lower() in TABLES: entry for entry in files}
    if len(examples) > 1:
        got = f"'{examples[True]}' beside '{examples[False]}'"
        cure = "Name the one or the other, or a folder that has one kind alone, with --data.path."
        raise CorpusError.at(path, "tables or files of text", got, cure)
    return Corpus(root=path if is_folder else path.parent, files=tuple(files), **options)


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
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _SKIPPED.fullmatch(name)]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    found.sort(key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
    texts = list(filter(_is_text, found))
    ends = accumulate(path.stat().st_size for path in texts)
    files = tuple(path for path, end in zip(texts, ends, strict=True) if end <= max_bytes)
    if not files:
        cure = "Name a folder with --data.path, or raise --data.standard_library_mb."
        expected = f"this Python's source files within {max_bytes:,} bytes"
        raise CorpusError.at(root, expected, "none", cure)
    return Corpus(root=root, files=files)


def _is_text(path: Path) -> bool:
    """Whether a file is there, UTF-8 and not empty."""
    found = next(read(path, "", 1))
    return isinstance(found, Piece) and found.text != ""


def _entries(root: Path) -> Iterator[Path]:
    """All that is not a folder, below ``root``. Links to folders are not followed.

    Raises:
        CorpusError: A folder cannot be read, or there is such a link.
    """

    def refuse(error: OSError) -> NoReturn:
        raise unreadable(error.filename, error)

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        for path in (Path(folder, name) for name in subfolders):
            if path.is_symlink():
                raise unreadable(path, OSError("a link to a folder, which is not followed"))
        yield from (Path(folder, name) for name in names)
