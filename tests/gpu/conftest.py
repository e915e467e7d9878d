"""What the tests of this folder share.

``pytest tests/gpu --device cuda`` is the whole. Where there is no GPU, the same code runs in small,
and what only a GPU can show is skipped.
"""

import pytest

from tests.support import ranks


@pytest.fixture(autouse=True)
def moves_staged_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, by the same group."""
    if ranks.active_device == "cpu":
        monkeypatch.setattr(ranks, "active_transport", "staged")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ranks.active_device == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: pytest --device cuda"))
