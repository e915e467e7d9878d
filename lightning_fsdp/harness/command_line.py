"""What command lines share: folders as options, extras, and the exit code, also after Ctrl-C."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
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


def require_extra(extra: str, *modules: str) -> None:
    """End the process where modules of an extra are not installed, and say how to have them.

    Args:
        extra: As in ``pip install 'lightning-fsdp[EXTRA]'``.
        modules: What the command imports of it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"error: expected the extra {extra!r}, got no {', '.join(missing)}. "
            f"Install it: pip install 'lightning-fsdp[{extra}]'"
        )


def folder_argument(text: str) -> Path:
    """A folder, there already or to be made, as the type of a command's option."""
    folder = Path(text)
    try:
        files = [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise argparse.ArgumentTypeError(
            f"expected a folder, got {text!r} ({error.strerror}). Name another."
        ) from error
    if files:
        raise argparse.ArgumentTypeError(
            f"expected a folder, got the file {str(files[0])!r}. Name another."
        )
    return folder
