"""Amounts of memory in commands: as options, and in what they print."""

from __future__ import annotations

import argparse

from lightning_fsdp.amounts import parse_bytes


def format_bytes(num_bytes: int) -> str:
    """In MB, or from 1 GB on in GB; powers of ten."""
    is_large = num_bytes >= 10**9
    return f"{num_bytes / 10**9:.2f} GB" if is_large else f"{num_bytes / 10**6:.1f} MB"


def bytes_argument(text: str) -> int:
    """The memory of a device, as the type of a command's option."""
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if num_bytes < 10**6:  # a unit was left out
        expected = "1MB or more, such as 80GB"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r} ({num_bytes} bytes)")
    return num_bytes
