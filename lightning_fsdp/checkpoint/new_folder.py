"""A folder that is there when all of it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Self


class NewFolder:
    """Filled beside its place, and put there by :meth:`finish`; else it leaves nothing.

    Attributes:
        beside: Where to write, once begun.
    """

    beside: Path

    def __init__(self, path: Path) -> None:
        """Nothing is made or looked at before ``with``."""
        self._path = path

    def __enter__(self) -> Self:
        self._path = path = self._path.resolve()  # a link stays one, to what is put there
        self.beside = path.with_name(f".{path.name}.partial")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(
                "expected a directory that does not exist yet, got one with something in it. "
                "Choose another, or remove it."
            )
        if path.is_mount():
            raise FileExistsError(
                "expected a directory that can be replaced, got one where something is mounted. "
                "Choose one inside of it."
            )
        shutil.rmtree(self.beside, ignore_errors=True)  # of a save that was interrupted
        self.beside.mkdir(parents=True)
        return self

    def finish(self) -> None:
        """All of it is written."""
        self.beside.replace(self._path)

    def __exit__(self, *raised: object) -> None:
        shutil.rmtree(self.beside, ignore_errors=True)  # unless it took its place
