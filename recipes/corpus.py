"""A corpus: files in a fixed order, and what they held when they were looked at.

The default corpus needs no download: the source files of the Python that runs. Whatever cannot be
read is an error that names file and line, since a document that is silently left out changes the
model and nothing shows it. Where the user asks for it, it is left out, and counted.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from recipes.documents import READERS, read_documents
from recipes.pieces import CorpusError, Piece, Reading, changed, open_regular, unreadable

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}
)
_Stamp: TypeAlias = tuple[int, int, int]  # what the system changes with a file


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the files of a corpus held at one moment.

    Attributes:
        sums: SHA-256 of each file, in order, under its name in the corpus; empty if unreadable.
        fingerprint: Of all of it and of how it is read, 64 hexadecimal digits.
        stamps: Size, time of the last write and inode of each file; ``None`` if it is not there.
    """

    sums: dict[str, str]
    fingerprint: str
    stamps: tuple[_Stamp | None, ...]

    def require_unchanged(self, corpus: Corpus) -> None:
        """Check that no file was written to since then.

        Raises:
            CorpusError: One was.
        """
        for path, stamp in zip(corpus.files, self.stamps, strict=True):
            if stamp != _stamp(path):
                raise changed(path)

    def num_bytes(self) -> int:
        """Size of all files that can be read."""
        return sum(stamp[0] for stamp in self.stamps if stamp is not None)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files of one folder, in the order in which their documents are trained on.

    Attributes:
        root: The folder; names in a snapshot are relative to it.
        files: The files, in order. Every suffix other than ``.json`` and ``.jsonl`` is plain text.
        text_field: The field of a JSON object that holds its text.
        max_object_size: Characters of a JSON object, at most.
        skip_unreadable: Leave out what cannot be read.
    """

    root: Path
    files: tuple[Path, ...]
    text_field: str = "text"
    max_object_size: int = 8_000_000
    skip_unreadable: bool = False

    def pieces(self, skipped: Callable[[CorpusError], None] | None = None) -> Iterator[Piece]:
        """All documents, file by file.

        Args:
            skipped: Called with what is left out, in order.

        Raises:
            CorpusError: A file is not UTF-8 or not JSON, an object has no text, ...
        """
        reading = Reading(
            text_field=self.text_field,
            max_object_size=self.max_object_size,
            report=(skipped or _ignore) if self.skip_unreadable else _refuse,
        )
        for path in self.files:
            yield from read_documents(path, reading)

    def snapshot(self) -> Snapshot:
        """Read every file once.

        Raises:
            CorpusError: One cannot be read.
        """
        options = [self.text_field, self.max_object_size, self.skip_unreadable]
        total = hashlib.sha256(json.dumps(options).encode())
        sums: dict[str, str] = {}
        stamps = []
        for path in self.files:
            name = path.relative_to(self.root).as_posix()
            stamps.append(_stamp(path))  # before it is read, to notice a write meanwhile
            sums[name] = self._sum(path)
            total.update(json.dumps([name, sums[name]]).encode())
        return Snapshot(sums=sums, fingerprint=total.hexdigest(), stamps=tuple(stamps))

    def _sum(self, path: Path) -> str:
        try:
            with open_regular(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, CorpusError) as error:
            if self.skip_unreadable:
                return ""
            raise error if isinstance(error, CorpusError) else unreadable(path, error) from error


def open_corpus(
    path: Path,
    *,
    text_field: str = "text",
    max_object_size: int = 8_000_000,
    skip_unreadable: bool = False,
) -> Corpus:
    """The corpus in a folder (its subfolders included) or in a single file.

    Args:
        path: A folder with ``.txt``, ``.json`` or ``.jsonl`` files, taken in the order of their
            names; other files are left alone. Or one such file.
        text_field: The field of a JSON object that holds its text.
        max_object_size: Characters of a JSON object, at most.
        skip_unreadable: Leave out what cannot be read, once it is come to.

    Raises:
        CorpusError: Nothing is there, or nothing that can be read.
    """
    root = path.parent
    files: tuple[Path, ...] = (path,)
    suffixes = ", ".join(sorted(READERS))
    if path.is_dir():
        found = sorted(_entries(path))
        root, files = path, tuple(entry for entry in found if entry.suffix.lower() in READERS)
        if not files:
            raise CorpusError(
                f"{path}: expected at least one file of {suffixes}, got {len(found)} other files. "
                f"Put text there, or leave --data.path out to use Python's own sources."
            )
    elif not path.exists():
        raise CorpusError(f"{path}: expected a folder with text, found nothing. Check --data.path.")
    elif path.suffix.lower() not in READERS:
        raise CorpusError(f"{path}: expected one of {suffixes}, got '{path.suffix}'. Rename it.")
    return Corpus(
        root=root,
        files=files,
        text_field=text_field,
        max_object_size=max_object_size,
        skip_unreadable=skip_unreadable,
    )


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
        content = _utf8(path)
        if not content:
            continue
        if size + len(content) > max_bytes:
            break
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


def _utf8(path: Path) -> bytes | None:
    """A file's content; ``None`` if it is not UTF-8, or not there."""
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return content


def _entries(root: Path) -> Iterator[Path]:
    """All that is not a folder, below ``root``. Links to folders are not followed.

    Raises:
        CorpusError: A folder cannot be read, or there is such a link.
    """

    def refuse(error: OSError) -> NoReturn:
        raise CorpusError(
            f"{error.filename}: expected a folder that can be read, got '{error.strerror}'. Make "
            f"it readable, or take it away."
        )

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        for name in subfolders:
            if Path(folder, name).is_symlink():
                raise CorpusError(
                    f"{Path(folder, name)}: expected a folder, got a link to one, which is not "
                    f"followed. Name that one with --data.path, or take the link away."
                )
        yield from (Path(folder, name) for name in names)


def _refuse(error: CorpusError) -> NoReturn:
    raise error


def _ignore(error: CorpusError) -> None:
    del error


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
