"""Amounts of memory, as people write them: ``80GB`` is 80e9 bytes, ``80GiB`` 80 * 2^30."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes of a positive amount such as ``80GB``, ``1.5 GiB`` or ``1048576``.

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    amount = 0.0
    if match is not None and match[2].lower() in units:
        amount = float(match[1]) * units[match[2].lower()]
    if not 1 <= amount < 2**63:
        raise ValueError(f"expected an amount of memory, such as 80GB or 512MiB, got {text!r}.")
    return int(amount)
