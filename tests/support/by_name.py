"""Tensors by name, compared."""

from tests.support import parity


def assert_same_tensors(actual, expected, **limits):
    """In whatever order they came."""
    parity.assert_same_tensors(
        dict(sorted(actual.items())), dict(sorted(expected.items())), **limits
    )
