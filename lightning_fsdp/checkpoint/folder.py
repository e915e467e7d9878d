"""A folder of training state: saved whole or not at all, loaded by slices, without running code.

    save    plan -> begin -> write -> commit     each step on all ranks or on none (``ranks``)
    load    verify -> compare and plan -> read   no tensor is written before all is known to be well

On the disk a checkpoint is as ``place`` draws it. ``state`` is what ranks hold slices of: names to
plain tensors (the same on every rank, written once), DTensors, or any tensor with torch's protocol.
``extra`` is everything else, of rank 0.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.planner import SavePlan

from lightning_fsdp.checkpoint.background import Saving, join_last, start, wait_before_saving
from lightning_fsdp.checkpoint.damage import DamagedCheckpoint
from lightning_fsdp.checkpoint.files import (
    Stamps,
    Sum,
    check_content,
    check_sizes,
    read_listed,
    read_marker,
    read_stamps,
    write_file,
    write_marker,
)
from lightning_fsdp.checkpoint.pieces import refuse_pieces
from lightning_fsdp.checkpoint.place import Place, find_version
from lightning_fsdp.checkpoint.ranks import (
    LostRankError,
    Ranks,
    refuse_different,
    words_for_ranks,
)
from lightning_fsdp.checkpoint.tensors import (
    METADATA,
    SlicePlanner,
    SliceReader,
    Where,
    plan_load,
    write_metadata,
    write_slices,
)

EXTRA = "extra.pt"

_Result = TypeVar("_Result")
AnyPath = str | os.PathLike[str]


def save(path: AnyPath, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Write a checkpoint; at any moment ``path`` leads to the old one or the new one. Collective.

    Args:
        path: A folder of its own, or nothing yet; on a file system that all ranks share.
        state: Tensors by name. A plain tensor is taken to be the same on every rank.
        extra: What ``torch.load(weights_only=True)`` gives back; that of rank 0 is written.

    Raises:
        Exception: The same on every rank; the checkpoint that was there is untouched. Also what
            the last :func:`async_save` failed with, if nobody has heard of it yet.
    """
    _Save(path, state, extra).finish()


def async_save(path: AnyPath, state: Mapping[str, Any], extra: Mapping[str, Any]) -> Saving:
    """As :func:`save`, with the writing in the background. Collective.

    Returns when this rank's part is copied to the host: training may go on. One save runs at a
    time: this one, and every other save and load, first waits for the last. A process does not exit
    before its save is done, and ``destroy_process_group`` does not disturb it.
    """
    begun = _Save(path, state, extra)
    begun.copy_to_host()
    return start(begun.finish)


def load(path: AnyPath, state: Mapping[str, Any], *, partial: bool = False) -> None:
    """Fill the tensors of ``state`` in place; each rank reads its slices only. Collective.

    Args:
        path: What :func:`save` was given.
        state: Tensors by name, with values on every rank; how they are sharded, and over how many
            ranks, may differ from the save.
        partial: Leave alone what the checkpoint holds beyond ``state``.

    Raises:
        DamagedCheckpoint: It is not whole, or could run code; names the file. No tensor changed.
        ValueError: Another name, shape or dtype was saved; names the parameter. No tensor changed.
        OSError: There is no checkpoint.
    """
    opened = Ranks().here(f"load {os.fspath(path)!r}", lambda: OpenCheckpoint(path))
    opened.read(state, partial=partial)


def read_extra(path: AnyPath) -> dict[str, Any]:
    """What was given to :func:`save` as ``extra``; see :meth:`OpenCheckpoint.extra`."""
    return OpenCheckpoint(path).extra()


def read_shapes(path: AnyPath) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor; see :meth:`OpenCheckpoint.shapes`."""
    return OpenCheckpoint(path).shapes()


def is_checkpoint(path: AnyPath) -> bool:
    """Whether there is a finished checkpoint at ``path``."""
    try:
        _open(path)
    except (DamagedCheckpoint, OSError):
        return False
    return True


class OpenCheckpoint:
    """A finished checkpoint: verified once, however often it is read.

    It stays with the version that was there when it was opened. Where a save to the same path has
    removed that one, or a file was written to since it was verified, reading raises: what is read
    in several steps is never of several checkpoints.
    """

    def __init__(self, path: AnyPath) -> None:
        """Needs no other rank.

        Args:
            path: What :func:`save` was given.

        Raises:
            DamagedCheckpoint: It is not finished.
            OSError: There is no checkpoint.
        """
        join_last()  # which may be the one that is asked for
        self._doing = f"load {os.fspath(path)!r}"
        self._folder, self._sums = _open(path)
        self._verified: Stamps | None = None

    def extra(self) -> dict[str, Any]:
        """What was given to :func:`save`; tensors come on the host. Needs no other rank.

        Raises:
            DamagedCheckpoint: It is not what was saved, or could run code.
        """
        data = read_listed(self._folder, EXTRA, self._sums)
        try:
            extra: dict[str, Any] = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
        except Exception as error:
            raise DamagedCheckpoint(
                f"{self._folder / EXTRA}: expected plain data, got what torch does not load "
                f"without running code from it ({cause_of(error)}). Do not load it anywhere else."
            ) from error
        return extra

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of every tensor. Needs no other rank; raises as ``read``."""
        return self._reader.shapes()

    def read(self, state: Mapping[str, Any], *, partial: bool = False, cast: bool = False) -> None:
        """Fill the tensors of ``state`` in place; see :func:`load`. Collective.

        Args:
            state: Tensors by name.
            partial: Leave alone what the checkpoint holds beyond ``state``.
            cast: Convert where the dtypes differ, as ``copy_`` does.
        """
        ranks = Ranks()
        seen = ranks.on_each(self._doing, lambda: self._verify(ranks))
        if any((name, sums) != (self._folder.name, self._sums) for name, sums, _ in seen):
            raise RuntimeError(
                f"{self._doing}: expected the same files on every rank, got others on some. Load "
                "from a folder that all ranks share, while nobody saves to it."
            )
        _, _, self._verified = seen[ranks.rank]
        plan = functools.partial(plan_load, self._reader, state, partial=partial, cast=cast)
        ranks.on_each(self._doing, ranks.here(self._doing, plan))

    def _verify(self, ranks: Ranks) -> tuple[str, dict[str, Sum], Stamps]:
        check_sizes(self._folder, self._sums)
        stamps = read_stamps(self._folder, self._sums)  # first: to notice who writes meanwhile
        if self._verified is None:
            largest_first = sorted(self._sums, key=lambda n: (-self._sums[n].num_bytes, n))
            for name in largest_first[ranks.rank :: ranks.world_size]:  # one rank reads each
                check_content(self._folder / name, self._sums[name])
        elif changed := [name for name in stamps if stamps[name] != self._verified[name]]:
            raise DamagedCheckpoint(
                f"{self._folder / changed[0]}: expected this file as it was when it was verified, "
                "got one that was written to since. Load again, while nobody writes to it."
            )
        return self._folder.name, self._sums, stamps

    @cached_property
    def _reader(self) -> SliceReader:
        return SliceReader(self._folder, self._sums)


class _Save:
    """One save; its public methods are collective."""

    def __init__(self, path: AnyPath, state: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._doing = f"save {os.fspath(path)!r}"
        self._place = Place(path)
        self._ranks = Ranks()
        saved = f"{self._doing}{words_for_ranks(state.values())}"
        planned = self._together(lambda: (saved, self._plan_here(state, extra)))
        refuse_different([doing for doing, _ in planned])
        plans = [plan for _, plan in planned]
        self._folder = Path(str(self._together(lambda: self._begin(plans))[0]))

    def copy_to_host(self) -> None:
        """Keep what this rank has to write; the state may change from now on."""
        self._together(lambda: self._planner.copy_to_host(self._plan))

    def finish(self) -> None:
        """Write, then put it in place."""
        written = self._together(self._write)
        self._together(lambda: self._commit(written) if self._ranks.rank == 0 else None)

    def _plan_here(self, state: Mapping[str, Any], extra: Mapping[str, Any]) -> SavePlan:
        wait_before_saving()
        self._extra = _dump(extra) if self._ranks.rank == 0 else b""
        self._planner = SlicePlanner(state)
        return self._planner.create_local_plan()

    def _begin(self, plans: list[SavePlan]) -> str | None:
        # Every rank plans for all, and comes to the same.
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plan = self._planner.finish_plan(plans[self._ranks.rank])
        return str(self._place.begin()) if self._ranks.rank == 0 else None

    def _write(self) -> tuple[str, Where, Sum]:
        name = f"__{self._ranks.rank}_0.distcp"  # as torch calls it
        where, written = write_slices(self._folder / name, self._plan, self._planner)
        return name, where, written

    def _commit(self, written: list[tuple[str, Where, Sum]]) -> None:
        where = {index: place for _, places, _ in written for index, place in places.items()}
        sums = {name: each for name, _, each in written}
        sums[METADATA] = write_metadata(self._folder, self._metadata, where)
        sums[EXTRA] = write_file(self._folder / EXTRA, self._extra)
        write_marker(self._folder, sums)
        self._place.commit()

    def _together(self, work: Callable[[], _Result]) -> list[_Result]:
        try:
            return self._ranks.on_each(self._doing, work)
        except LostRankError:
            self._place.release()  # the others may still be writing
            raise
        except Exception:
            self._place.abandon()
            raise


def _open(path: AnyPath) -> tuple[Path, dict[str, Sum]]:
    folder = find_version(path)
    return folder, read_marker(folder)


def _dump(extra: Mapping[str, Any]) -> bytes:
    refuse_pieces(extra, "extra")
    try:
        return _bytes_of(dict(extra))
    except Exception as error:
        name = _name_of_unsafe(extra)
        raise TypeError(
            f"expected plain data in `extra`, got in {name} what torch.load(weights_only=True) "
            f"does not read back ({cause_of(error)}). Turn it into tensors, numbers, strings, "
            "lists and dicts."
        ) from error


def cause_of(error: Exception) -> str:
    """What torch found; it goes on for lines about how to switch the protection off."""
    lines = str(error).splitlines() or [type(error).__name__]
    marks = ("GLOBAL", "WeightsUnpickler error")
    told = [line.strip() for line in lines if any(mark in line for mark in marks)]
    return (told or lines)[0].partition(". Please")[0]


def _bytes_of(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    torch.load(buffer, map_location="cpu", weights_only=True)
    return buffer.getvalue()


def _name_of_unsafe(extra: Mapping[str, Any], prefix: str = "extra") -> str:
    for key, value in extra.items():
        try:
            _bytes_of({key: value})
        except Exception:  # noqa: BLE001 (whatever it is, this is the one)
            name = f"{prefix}[{key!r}]"
            return _name_of_unsafe(value, name) if type(value) is dict else name
    return prefix
