"""The last word of a command line: its exit code, also after Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130  # as shells say it: 128 and the signal's number


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a command and end the process.

    Args:
        main: Returns the exit code. It ends what it started also when it is interrupted.
    """
    try:
        code = main()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing is left running\n")
        code = INTERRUPTED
    sys.exit(code)
