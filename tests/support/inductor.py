"""Where torch can compile to machine code."""

import os
import shutil

import pytest


def _why_not() -> str | None:
    if shutil.which("g++") is None:
        return "inductor needs a C++ compiler"
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        return "with ATEN_CPU_CAPABILITY=default inductor writes C++ that does not compile"
    return None


needs_inductor = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
