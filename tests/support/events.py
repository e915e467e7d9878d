"""What another process or thread does, waited for however long it takes on a busy machine."""

import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LIMIT_S = 60.0  # what has not come by then does not come


def wait_until(condition: Callable[[], object]) -> None:
    """Return when a condition holds."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it has not come about within {_LIMIT_S:g} s"
        time.sleep(0.01)


def wait_for(path: Path) -> None:
    """Return when a file is there, which another process makes."""
    wait_until(path.exists)


def wake(pid: int) -> None:
    """Let a process go on that is about to stop, or has: before, it would not hear of it."""
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    os.kill(pid, signal.SIGCONT)


def interrupt_where_it_waits_in(function: Callable[..., Any]) -> None:
    """A Ctrl-C comes once a ``Condition`` is waited for in a function, by the main thread."""
    main = threading.main_thread().ident or 0
    within = [threading.Condition.wait.__code__, threading.Condition.wait_for.__code__]

    def waits() -> bool:
        frames = traceback.walk_stack(sys._current_frames()[main])
        codes = [frame.f_code for frame, _ in itertools.islice(frames, 3)]
        return codes == [*within, function.__code__]

    def interrupt() -> None:
        wait_until(waits)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
