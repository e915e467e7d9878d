"""Where torch can compile to machine code."""

import os
import shutil

import pytest


def _why_not() -> str | None:
    if shutil.which("g++") is None:
        return "inductor needs a C++ compiler"
    if "ATEN_CPU_CAPABILITY" in os.environ:
        # default: its C++ does not compile; avx2: NaN, under plain DDP as well.
        return "inductor is wrong where ATEN_CPU_CAPABILITY says less than the processor can"
    return None


needs_inductor = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
