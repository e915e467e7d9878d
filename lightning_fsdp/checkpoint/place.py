"""Where a checkpoint lies on the disk, and how it gets there in one step.

    last.ckpt/               what a user names, moves, copies and deletes
        current -> version-3     the link; replaced in one step
        version-3/               a whole checkpoint, in torch.distributed.checkpoint's format
            __0_0.distcp         what rank 0 wrote, and so on
            .metadata            which tensor lies where
            extra.pt             everything that is no tensor of the state
            complete.json        the marker: length and checksum of each file
    .last.ckpt.saving/       a save that is under way, or was interrupted
        lock                     held while the process that saves is alive
        whole/                   version-4 and a link to it

Where there was nothing, ``whole`` is renamed to ``last.ckpt``. Where there was a checkpoint, the
version is moved in beside it, the link is replaced, and the old version removed. So ``last.ckpt``
is there only when it is whole, and at any moment its link leads to a whole version, the old or the
new one. What an interrupted save left, the next save in the same folder removes, whatever its name.

Where ``last.ckpt`` was itself a link to another checkpoint of its folder, as ModelCheckpoint makes
with ``save_last="link"``, that link is removed just before the renaming; the other one stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import IO

from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.checkpoint.files import MARKER, alone_in, beside, sync_folder

LINK = "current"
_VERSION = re.compile(r"version-(\d+)")
_SAVING = ".saving"


class Place:
    """One save to a path. Rank 0 alone begins and commits; the others only write.

    Attributes:
        path: What the user named, absolute.
        version: The folder to write to, once begun.
    """

    version: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 (a link stays what it is)
        self._staging = beside(self.path, _SAVING)
        self._whole = self._staging / "whole"
        self._lock: IO[bytes] | None = None

    def begin(self) -> Path:
        """Remove what interrupted saves left, and make an empty folder to write to.

        Raises:
            OSError: The path cannot be, or may not become, a checkpoint.
            RuntimeError: Another process saves to the same path.
        """
        existing = self._versions()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(self.path.parent):
            for left in self.path.parent.glob(f".*{_SAVING}"):
                _remove_unless_in_use(left, if_unsure=left == self._staging)
            if existing and (current := _target(self.path)):
                self._remove_versions_but(current)
            with contextlib.suppress(FileExistsError):  # another process is saving to it
                self._staging.mkdir()
                self._lock = _lock(self._staging, if_unsure=True)
        if self._lock is None:
            raise RuntimeError(
                f"expected to be alone with {self.path}, but another process is saving to it "
                f"({self._staging}). Give each run a folder of its own."
            )
        self.version = self._whole / f"version-{max(existing, default=0) + 1}"
        self.version.mkdir(parents=True)
        return self.version

    def commit(self) -> None:
        """Put the version, which is complete and on the disk, where the path leads."""
        (self._whole / LINK).symlink_to(self.version.name)
        for folder in (self.version, self._whole):
            sync_folder(folder)
        if self.path.is_symlink():
            self.path.unlink()  # a folder cannot be renamed to a link
        if self.path.exists():
            self.version.rename(self.path / self.version.name)
            sync_folder(self.path)
            if (self.path / LINK).is_dir() and not (self.path / LINK).is_symlink():
                # A copy holds a folder in place of the link; it goes as a version does. Nothing
                # else has ten times the number: those that are there are below this save's.
                (self.path / LINK).rename(self.path / f"{self.version.name}0")
            (self._whole / LINK).replace(self.path / LINK)
            sync_folder(self.path)
        else:
            self._whole.rename(self.path)
            sync_folder(self.path.parent)
        self._remove_versions_but(self.version.name)
        self.abandon()

    def abandon(self) -> None:
        """Remove what was written and not committed."""
        if self._lock is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave what was written to the next save, which removes it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _versions(self) -> list[int]:
        """Numbers of the versions that are there.

        Raises:
            OSError: The path is something else than a checkpoint of ours.
        """
        if self.path.is_symlink():
            link = self.path.readlink()
            if link.is_absolute() or ".." in link.parts:
                raise FileExistsError(
                    f"expected a folder or nothing at {self.path}, got a link to {link}. Remove "
                    "the link, or save to another path."
                )
            return []  # it is replaced; what it leads to is not touched
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise NotADirectoryError(
                f"expected a folder or nothing at {self.path}, got a file. Remove it, or save to "
                "another path."
            )
        names = [entry.name for entry in self.path.iterdir() if entry.name != LINK]
        foreign = sorted(name for name in names if not _VERSION.fullmatch(name))
        if foreign:
            raise FileExistsError(
                f"expected a checkpoint or nothing at {self.path}, got a folder with other things "
                f"in it ({', '.join(foreign[:3])}). Save to a path of its own."
            )
        return [int(name.removeprefix("version-")) for name in names]

    def _remove_versions_but(self, current: str) -> None:
        for entry in self.path.iterdir():
            if entry.name not in (LINK, current):
                # A failure here fails no save: the next one tries again. What is left of a version
                # without its marker is taken for none.
                with contextlib.suppress(OSError):
                    (entry / MARKER).unlink()
                shutil.rmtree(entry, ignore_errors=True)


def find_version(path: str | os.PathLike[str]) -> Path:
    """The folder with the files of the checkpoint at ``path``, which may be that folder itself.

    Raises:
        FileNotFoundError: There is nothing.
        NotADirectoryError: There is a file.
        DamagedCheckpoint: There is a folder, or what an interrupted save left, but no whole one.
    """
    path = Path(path)
    if (path / LINK).is_dir():
        return path / (_target(path) or LINK)  # a copy may hold a folder in place of the link
    if path.is_dir() and (path / MARKER).is_file():
        return path
    left = beside(path, _SAVING)
    if path.is_dir():
        raise DamagedCheckpoint(
            f"{path}: expected a finished checkpoint, got a folder without a link {LINK!r} to one: "
            "its save was interrupted, or this is no checkpoint. Load another one."
        )
    if path.exists():
        raise NotADirectoryError(f"{path}: expected the folder of a checkpoint, got a file.")
    if left.is_dir():
        raise DamagedCheckpoint(
            f"{path}: expected a finished checkpoint, got only {left}: its save is not finished or "
            "was interrupted. Load another checkpoint; the next save removes this one."
        )
    raise FileNotFoundError(f"{path}: expected the folder of a checkpoint, got nothing there.")


def _target(path: Path) -> str | None:
    """Name of the version that the path leads to."""
    return str((path / LINK).readlink()) if (path / LINK).is_symlink() else None


def _lock(staging: Path, *, if_unsure: bool) -> IO[bytes] | None:
    """Take the lock of a save; None if a living process has it. The system frees it at any end.

    Args:
        staging: The folder of the save.
        if_unsure: Whether it counts as taken here where a file system has no locks, so that nobody
            can tell.
    """
    file = (staging / "lock").open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN) or not if_unsure:
            file.close()
            return None
    return file


def _remove_unless_in_use(staging: Path, *, if_unsure: bool) -> None:
    # Another process removes it meanwhile; or another user's is not to be opened or removed.
    with contextlib.suppress(FileNotFoundError if if_unsure else OSError):
        if not staging.is_dir() or any(
            each.name not in ("lock", "whole") for each in staging.iterdir()
        ):
            return  # not ours
        lock = _lock(staging, if_unsure=if_unsure)
        if lock is not None:
            with lock:
                shutil.rmtree(staging)
