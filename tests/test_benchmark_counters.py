"""The exact counters against formulas worked out by hand, for a model small enough to write down.

Parameters: embedding and head ``V d`` each, a block ``12 d^2 + 13 d``, the last norm ``2 d``.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS, WIDTH, VOCABULARY = 2, 64, 512
WORLD_SIZES = (8,)
BYTES = {  # of the whole parameters and of the reduction's sum
    "bf16, fp32 reduce": (2, 4),
    "bf16, bf16 reduce": (2, 2),
    "fp32": (4, 4),
}
EMBEDDING = HEAD = VOCABULARY * WIDTH
BLOCK = 12 * WIDTH**2 + 13 * WIDTH
NORM = 2 * WIDTH


def in_shards(numel, world_size):
    """A region's elements once it is cut into equal shards of a multiple of 8."""
    return -(-numel // (8 * world_size)) * 8 * world_size


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    out = tmp_path_factory.mktemp("counters") / "counters.json"
    finished = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.exact_counters", "--peaks", "--out", str(out),
            "--layers", str(LAYERS), "--width", str(WIDTH), "--vocabulary", str(VOCABULARY),
            "--seq-len", "16", "--ranks", *map(str, WORLD_SIZES),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "padding %" in finished.stdout
    return json.loads(out.read_text())


def each_case(document):
    for counts in document["arms"]:
        yield counts, counts["arm"], counts["world_size"], *BYTES[counts["dtypes"]]


def test_every_arm_is_counted_at_every_size_and_dtype(document):
    found = {(n, dtypes, arm) for n, dtypes, arm in map(identity, document["arms"])}
    arms = ("scratch", "scratch_by_hand", "fsdp2", "fsdp2_split")
    assert found == {(n, d, a) for n in WORLD_SIZES for d in BYTES for a in arms}
    assert len(document["rows"]) == 3 * len(BYTES) * len(WORLD_SIZES)


def identity(counts):
    return counts["world_size"], counts["dtypes"], counts["arm"]


def test_payload_of_fsdp2_is_what_its_documentation_says(document):
    # Every width here divides: FSDP2 pads nothing. The root stays whole after the forward.
    for counts, arm, _, gathered, reduced in each_case(document):
        blocks, rest = LAYERS * BLOCK, EMBEDDING + HEAD + NORM
        if arm == "fsdp2":
            assert counts["payload_bytes"] == gathered * (2 * blocks + rest) + reduced * (
                blocks + rest
            )
        elif arm == "fsdp2_split":  # only the norm stays; the embedding is gathered again in vain
            twice = blocks + EMBEDDING + HEAD
            assert counts["payload_bytes"] == gathered * (2 * twice + NORM) + reduced * (
                twice + NORM
            )


def test_payload_of_the_core_gathers_all_but_the_first_and_the_last_unit_twice(document):
    for counts, arm, world_size, gathered, reduced in each_case(document):
        if arm == "scratch":
            embedding = in_shards(EMBEDDING, world_size)
            # No backward needs the embedding's weight; that of the head has it from the forward.
            once = embedding + in_shards(NORM + HEAD, world_size)
            blocks = LAYERS * in_shards(BLOCK, world_size)
            # Gradients have the dtype of the whole parameters, and travel in it.
            assert counts["payload_bytes"] == gathered * (2 * once + 3 * blocks)
            calls = {name: n for name, (n, _) in counts["collectives"].items()}
            reduction = "reduce_scatter_base" if gathered == reduced else "alltoall_base"
            assert calls == {"allgather_base": 2 * LAYERS + 2, reduction: LAYERS + 2}


def test_payload_of_the_core_by_the_calls_of_fsdp2_is_fsdp2s_but_for_the_last_block(
    document,
):
    # The root, embedding included, is one region that stays whole; both ranks' paddings differ.
    for counts, arm, world_size, gathered, _ in each_case(document):
        if arm == "scratch_by_hand":
            root = in_shards(EMBEDDING + NORM + HEAD, world_size)
            block = in_shards(BLOCK, world_size)
            assert counts["payload_bytes"] == gathered * ((3 * LAYERS - 1) * block + 2 * root)


def test_bytes_written_by_the_core_are_one_copy_of_the_gradients_and_work_on_shards(document):
    for counts, arm, world_size, gathered, reduced in each_case(document):
        if arm != "scratch":
            continue
        embedding = in_shards(EMBEDDING, world_size)
        block, last = in_shards(BLOCK, world_size), in_shards(NORM + HEAD, world_size)
        regions = embedding + LAYERS * block + last
        is_one_run = 1  # the embedding's region has one slot without padding: its gradient serves
        copied = regions - is_one_run * embedding
        shards = regions / world_size
        casts = gathered * (
            2 * shards - (embedding + last) / world_size
        )  # a shard into each gather
        sums = reduced * shards + (4 * shards if reduced != 4 else 0)  # mean, and back to fp32
        assert counts["written_bytes"] == gathered * copied + casts + sums


def test_bytes_written_by_fsdp2_are_copies_out_and_copies_in(document):
    for counts, arm, world_size, gathered, reduced in each_case(document):
        if arm != "fsdp2_split":
            continue
        total = EMBEDDING + LAYERS * BLOCK + NORM + HEAD
        twice = 2 * total - NORM
        shards = twice // world_size
        casts = gathered * shards * (2 if gathered == 2 else 1)  # bf16: cast, then copy in
        back = 4 * total // world_size if reduced != 4 else 0
        assert counts["written_bytes"] == gathered * twice + reduced * total + casts + back


def test_peak_agrees_with_torchs_tracker_and_holds_more_than_the_shards(document):
    for counts, arm, world_size, _, _ in each_case(document):
        shards = 4 * (EMBEDDING + LAYERS * BLOCK + NORM + HEAD) // world_size
        assert counts["peak_by_kind"]["shards"] >= shards
        assert sum(counts["peak_by_kind"].values()) == counts["peak_bytes"]
        if arm.startswith("scratch"):
            assert counts["mem_tracker_peak_bytes"] is None
        else:
            assert counts["mem_tracker_peak_bytes"] == counts["peak_bytes"]


def test_the_model_itself_does_the_same_in_every_arm(document):
    written = {}
    for counts in document["arms"]:
        key = counts["world_size"], counts["dtypes"]
        written.setdefault(key, set()).add(counts["model_written_bytes"])
    assert all(len(values) == 1 for values in written.values()), written


def test_padding_at_1024_ranks(document):
    regions = [EMBEDDING, *[BLOCK] * LAYERS, NORM + HEAD]
    whole = sum(in_shards(numel, 1024) for numel in regions)
    expected = 100 * (whole - sum(regions)) / whole
    assert document["padding_percent"]["scratch"] == pytest.approx(expected)


def test_the_way_of_a_step_through_the_core_gets_no_longer():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step_trace"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    files, changes = re.search(r"(\d+) files, .* (\d+) changes of file", done.stdout).groups()
    assert 10 <= int(files) <= 19
    assert 300 <= int(changes) <= 520
