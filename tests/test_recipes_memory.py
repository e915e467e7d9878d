"""A corpus larger than the memory: a fresh process grows by a bounded amount."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
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
    command = [sys.executable, "-m", "tests.support.corpus_memory"]
    ran = subprocess.run(
        [*command, str(tmp_path), what, str(megabytes)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    print(found)
    assert found["tokens"] > 100_000
    assert found["bytes"] < most_megabytes * 1e6
