"""A corpus larger than the memory: a process of its own grows by a bounded amount."""

import json
from pathlib import Path

import pytest

from tests.support import corpus_memory
from tests.support.ranks import run_forked

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)


# Of a large corpus: what a process takes for any, and less than a fifth of what it reads.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("what", "megabytes", "most_megabytes"),
    [
        pytest.param(".txt", 250, 85, id="text, a token a line"),
        pytest.param(".txt", 10, 200, id="text, with a tokenizer trained on it"),
        pytest.param(".json", 250, 130, id="a list"),
        pytest.param(".jsonl", 250, 120, id="lines"),
        pytest.param(".csv", 250, 120, id="rows"),
        pytest.param(".parquet", 250, 150, id="one group of rows"),
        pytest.param("tokens", 1000, 130, id="a shuffled epoch of a gigabyte of tokens"),
    ],
)
def test_a_process_grows_by_at_most_200_megabytes(
    tmp_path: Path, what: str, megabytes: int, most_megabytes: int
) -> None:
    log, out = tmp_path / "printed", tmp_path / "found.json"
    num_bytes = round(megabytes * 1e6)
    code = run_forked(corpus_memory.main, tmp_path, what, num_bytes, out, log=log, timeout_s=390)
    assert code == 0, log.read_text()
    found = json.loads(out.read_text())
    print(found)
    assert found["tokens"] > 100_000
    assert found["bytes"] < most_megabytes * 1e6
