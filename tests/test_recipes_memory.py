"""A corpus larger than the memory: a process of its own grows by a bounded amount."""

import json
from pathlib import Path

import pytest

from tests.support import corpus_memory
from tests.support.processes import run_forked

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)


# Less than two thirds of what it reads, where that is large.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("what", "has_own_tokenizer", "megabytes", "most_megabytes"),
    [
        pytest.param(".txt", True, 100, 60, id="text, a token a line"),
        pytest.param(".txt", False, 5, 100, id="text, with a tokenizer trained on it"),
        pytest.param(".json", True, 100, 60, id="a list"),
        pytest.param(".jsonl", True, 100, 60, id="lines"),
        pytest.param(".csv", False, 100, 60, id="rows"),
        pytest.param(".parquet", True, 100, 60, id="one group of rows"),
        pytest.param("tokens", False, 300, 45, id="a shuffled epoch of 300 megabytes of tokens"),
    ],
)
def test_a_process_grows_by_little_however_large_the_corpus(
    tmp_path: Path, what: str, has_own_tokenizer: bool, megabytes: int, most_megabytes: int
) -> None:
    log, out = tmp_path / "printed", tmp_path / "found.json"
    num_bytes = round(megabytes * 1e6)
    arguments = (tmp_path, what, has_own_tokenizer, num_bytes, out)
    code = run_forked(corpus_memory.main, *arguments, log=log, timeout_s=390)
    assert code == 0, log.read_text()
    found = json.loads(out.read_text())
    print(found)
    assert found["tokens"] > 10_000
    assert found["bytes"] < most_megabytes * 1e6
