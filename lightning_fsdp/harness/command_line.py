"""What command lines share: their help, kinds of options, extras, and the exit code.

A help ends with examples, and says of each option what it takes: its choices, its unit, and its
default or that it is required. Options are called the same in all commands (``--ranks``,
``--device``, ``--out``); earlier spellings are read as the new ones and shown nowhere.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import math
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

INTERRUPTED = 130  # as shells say it: 128 and the signal's number
_MOST = 2**31 - 1  # of ranks and sizes in torch
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in what has a result already.

    Args:
        part: The result so far.
    """

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part


class CommandParser(argparse.ArgumentParser):
    """The options of one command.

    Args:
        command: As after ``python -m``, with the sub-command.
        description: What it does; where it has several lines, they are shown as they are.
        examples: What follows the command in each example.
        old: Earlier spelling of an option -> the option.
    """

    def __init__(
        self,
        command: str,
        description: str,
        *,
        examples: Sequence[str],
        old: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            prog=f"python -m {command}",
            description=description,
            epilog=shown_examples(command, examples),
            formatter_class=_Help,
            allow_abbrev=False,  # or --rank 3 would undo --ranks 8
        )
        self.examples = tuple(examples)
        self.old = dict(old or {})

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Read the options, or the process's own; ends the process where one is wrong."""
        given = sys.argv[1:] if arguments is None else arguments
        return self.parse_args([self._current(word) for word in given])

    def add_some(self, option: str, choices: Iterable[Any], says: str, **takes: Any) -> None:
        """An option that takes one or more of some choices, and by default all of them."""
        every = list(choices)
        self.add_argument(option, nargs="+", choices=every, default=every, help=says, **takes)

    @override
    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2: the mistake in one line, without all the options."""
        self.exit(2, f"error: {message}\n")

    def _current(self, word: str) -> str:
        option, sign, value = word.partition("=")
        return self.old.get(option, option) + sign + value


class _Help(argparse.HelpFormatter):
    @override
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    @override
    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str
    ) -> Callable[[int], tuple[str, ...]]:
        name = action.metavar or default_metavar  # never the choices, which the help lists once
        return lambda size: name if isinstance(name, tuple) else (name,) * size

    @override
    def _get_help_string(self, action: argparse.Action) -> str:
        says, notes = action.help or "", []
        if action.choices is not None:
            some = "some" if action.nargs == "+" else "one"
            notes.append(f"{some} of {', '.join(map(str, action.choices))}")
        if action.required:
            notes.append("required")
        elif "default: " not in says and action.default is not argparse.SUPPRESS:
            notes.append(f"default: {_shown(action.default)}")
        return f"{says} ({'; '.join(notes)})" if notes else says


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)


def shown_examples(command: str, examples: Sequence[str]) -> str:
    """The end of a help.

    Args:
        command: As after ``python -m``.
        examples: What follows it in each.
    """
    return "\n".join(["examples:", *(f"  python -m {command} {options}" for options in examples)])


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a command and end the process.

    Args:
        main: Returns the exit code. It ends what it started also when it is interrupted.
    """
    # The end that schedulers and `timeout` ask for is a Ctrl-C: what was started ends with it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = main()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing is left running\n")
        code = INTERRUPTED
    except OSError as error:
        if error.errno not in _OF_A_DISK:
            raise
        where, why = error.filename or "the output", error.strerror
        sys.stderr.write(
            f"error: {where}: cannot be written ({why}). Make room, or name another.\n"
        )
        code = 1
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(code)


def end(not_made: str | None, errors: Sequence[str]) -> int:
    """Say why not all of a command ran, or what of it does not hold; returns the exit code.

    Args:
        not_made: What was interrupted, in words; ``None``: nothing was.
        errors: A line each.
    """
    if not_made is not None:
        errors = []
        sys.stderr.write(f"interrupted: {not_made}\n")
    sys.stderr.writelines(f"error: {error}\n" for error in errors)
    return INTERRUPTED if not_made is not None else 1 if errors else 0


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


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, in a folder of any depth: all of it or none, and until then what was there.

    Ctrl-C may come meanwhile, and a rank that failed is ended by others while it writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device, a pipe: not to be replaced
        path.write_bytes(content)
        return
    path = path.resolve()
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not less, as the type of a command's option."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text!r}")
        if number > _MOST:
            raise argparse.ArgumentTypeError(f"expected at most {_MOST}, got {text!r}")
        return number

    return convert


def positive(text: str) -> float:
    """A finite number of more than 0, as the type of a command's option."""
    if not 0 < (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text!r}")
    return number


def not_negative(text: str) -> float:
    """A finite number of 0 or more, as the type of a command's option."""
    if not 0 <= (number := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def folder_argument(text: str) -> Path:
    """A folder to write to, there already or to be made, as the type of a command's option."""
    folder = Path(text)
    try:
        found = [path for path in (folder, *folder.absolute().parents) if path.exists()]
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise argparse.ArgumentTypeError(
            f"expected a folder, got {text!r} ({error.strerror}). Name another."
        ) from error
    if not found[0].is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a folder, got the file {str(found[0])!r}. Name another."
        )
    try:  # modes and root's leave do not tell: /proc, a disk that is mounted to be read alone
        tempfile.TemporaryDirectory(dir=found[0]).cleanup()
    except OSError as error:
        why = f"nothing can be made in {str(found[0])!r}: {error.strerror}"
        raise argparse.ArgumentTypeError(
            f"expected a folder, got {text!r} ({why}). Name another."
        ) from error
    return folder
