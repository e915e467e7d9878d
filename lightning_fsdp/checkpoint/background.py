"""The save in the background: a process has one at a time.

start(work) -> Saving     in a thread of its own
after_saving(work)        what has to wait until the checkpoint is in place
wait_for_saving()         in place, or the error that it failed with
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)
_Work = Callable[[], None]


class Saving:
    """A save in the background."""

    def __init__(self, work: _Work) -> None:
        self._error: Exception | None = None
        self._steps = [work]
        self._lock = threading.Lock()  # of the steps, and of whether it has ended
        self._has_ended = False
        # Not a daemon: the interpreter waits for it.
        self._thread = threading.Thread(target=self.run, name="lightning_fsdp save")

    def begin(self) -> None:
        """Begin; an interrupt that comes meanwhile stops nothing."""
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Return when it has ended, well or not; at once if an interrupt kept it from beginning."""
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self) -> None:
        """Return when the checkpoint is in place.

        Raises:
            Exception: What the save failed with; the checkpoint that was there is untouched.
        """
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def and_then(self, work: _Work) -> None:
        """Do ``work`` once the checkpoint is in place, at once if it is; never, if it failed."""
        with self._lock:
            if not self._has_ended:
                self._steps.append(work)
                return
        if self._error is None:
            work()

    def run(self) -> None:
        """Do the work and what :meth:`and_then` has added, in the thread that is calling."""
        try:
            while (step := self._next_step()) is not None:
                step()
        except Exception as error:  # noqa: BLE001 (raised where somebody waits)
            self._error = error
            self._has_ended = True
            _log.error("in the background: %s", error)

    def _next_step(self) -> _Work | None:
        with self._lock:
            self._has_ended = not self._steps
            return None if self._has_ended else self._steps.pop(0)


_last = Saving(lambda: None)
_last.run()  # it has ended well: nobody has to ask whether there was one


def start(work: _Work) -> Saving:
    """Begin a save; the last one has ended."""
    global _last  # noqa: PLW0603 (a process has one save at a time)
    _last = Saving(work)
    _last.begin()  # it is known: whatever is saved next waits for it, also after an interrupt here
    return _last


def wait_for_saving() -> None:
    """Wait for the last ``async_save``, if any, and raise what it failed with."""
    _last.wait()


def wait_before_saving() -> None:
    """Wait for the last save, and fail as it did if a rank has not heard of it yet."""
    try:
        wait_for_saving()
    except Exception as error:
        again = type(error)(f"nothing is saved, for the save before this one failed: {error}")
        if isinstance(error, OSError) and isinstance(again, OSError):
            again.errno = error.errno
        raise again from error


def join_last() -> None:
    """Return when the last save has ended, well or not."""
    _last.join()


def after_saving(work: _Work) -> None:
    """Do ``work`` once the last save is in place; never, if it failed and nobody has heard of it.

    For what must not happen before: removing the checkpoint that it replaces.
    """
    _last.and_then(work)
