"""What the tests of this folder share: ``--device`` says where they run, and CPU runs few of them.

``pytest tests/gpu --device cuda`` is the whole. Where there is no GPU, the same code runs in small,
and what only a GPU can show is skipped.
"""

from collections.abc import Iterator

import pytest

from tests.support import ranks
from tests.support.on_device import OnDevice


@pytest.fixture(autouse=True)
def computes_on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on the ranks: references are computed on the device as well."""
    if ranks.active_device == "cpu":
        monkeypatch.setattr(ranks, "active_transport", "staged")
        yield
        return
    with OnDevice(ranks.active_device):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ranks.active_device == "cuda":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: pytest --device cuda"))
