"""Where torch can compile to machine code, and where it keeps that."""

import contextlib
import fcntl
import getpass
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY


def _why_not() -> str | None:
    if shutil.which("g++") is None:
        return "inductor needs a C++ compiler"
    if "ATEN_CPU_CAPABILITY" in os.environ:
        # default: its C++ does not compile; avx2: NaN, under plain DDP as well.
        return "inductor is wrong where ATEN_CPU_CAPABILITY says less than the processor can"
    return None


needs_inductor = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))


@contextlib.contextmanager
def kept_code(parent: Path | None = None) -> Iterator[Path]:
    """The folder in which pytest's processes keep compiled code, for later runs of this checkout.

    Who is killed while it compiles leaves a file that is cut off, which torch would load for ever
    after. So each process leaves its mark until it ends well, and where one finds that of another
    that did not, and is alone, all that was compiled goes.
    """
    name = f"lightning_fsdp_{getpass.getuser()}_{zlib.crc32(os.fsencode(REPOSITORY))}"
    folder = (parent or Path(tempfile.gettempdir())) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("a") as lock:
        with contextlib.suppress(BlockingIOError):  # others compile meanwhile
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            killed = list(folder.glob("running-*"))
            if killed:
                shutil.rmtree(folder / "code", ignore_errors=True)
            for mark in killed:
                mark.unlink()
        fcntl.flock(lock, fcntl.LOCK_SH)
        mark = folder / f"running-{secrets.token_hex(4)}"
        mark.touch()
        yield folder / "code"
        mark.unlink(missing_ok=True)
