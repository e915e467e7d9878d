"""Blocks of Python of a page, given to the tests that run them."""

import pytest

from tests.support.pages import python_blocks

named: list[str] = []  # the blocks that tests run


def runs(page: str, part: str, name: str = "code") -> pytest.MarkDecorator:
    """Give a test the block of a page that has this part, as the argument ``name``."""
    (code,) = [code for code in python_blocks(page) if part in code]
    named.append(code)
    return pytest.mark.parametrize(name, [pytest.param(code, id=page)])
