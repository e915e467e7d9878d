"""A corpus larger than the memory: a fresh process grows by a bounded amount."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_BYTES = 200e6

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("what", "megabytes"),
    [
        pytest.param(".txt", 1000, id="a gigabyte of text, a token a line"),
        pytest.param(".txt", 10, id="text, with a tokenizer trained on it"),
        pytest.param(".json", 1000, id="a list of a gigabyte"),
        pytest.param(".jsonl", 1000, id="a gigabyte of lines"),
        pytest.param("tokens", 1000, id="a shuffled epoch of a gigabyte of tokens"),
    ],
)
def test_a_process_grows_by_at_most_200_megabytes(
    tmp_path: Path, what: str, megabytes: int
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
    assert found["bytes"] < MOST_BYTES
