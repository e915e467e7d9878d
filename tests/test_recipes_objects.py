"""Large, nested and cut-off objects are read in little memory, or named with their place."""

import json
import re
from pathlib import Path

import pytest

from recipes.corpus import open_corpus
from recipes.documents import CorpusError
from tests.support.documents import SIZES, SUFFIXES, outcome_of_corpus, sizes
from tests.support.texts import documents


def test_a_line_of_20_megabytes_is_text_in_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"0123456789" * 2_000_000)
    pieces = list(open_corpus(tmp_path).pieces())
    assert sum(len(piece.text) for piece in pieces) == 20_000_000
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_an_object_of_20_megabytes_is_named_with_the_options_to_change(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"x{suffix}"
    small, large = '{"text": "small"}', json.dumps({"text": "0123456789" * 2_000_000})
    lines = [small, large, small]
    path.write_text("\n".join(lines) if suffix == ".jsonl" else "[" + ",\n".join(lines) + "]")
    message = rf"x\{suffix}:2: expected an object of at most 8,000,000 characters, got a longer"
    with pytest.raises(CorpusError, match=message):
        documents(open_corpus(tmp_path))
    found, left_out = outcome_of_corpus(open_corpus(tmp_path, skip_unreadable=True))
    # Where the next object of a list begins is known only to one who has read this one.
    assert found == ["small"] * (2 if suffix == ".jsonl" else 1)
    assert len(left_out) == 1
    whole = documents(open_corpus(tmp_path, max_object_size=200_000_000))
    assert [len(text) for text in whole] == [5, 20_000_000, 5]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("block", [3, 2**20])
def test_the_largest_object_is_counted_in_characters(
    tmp_path: Path, suffix: str, block: int
) -> None:
    line = '{"text": "é模😀"}'
    (tmp_path / f"x{suffix}").write_text(line, encoding="utf-8")
    with sizes(block, 2**16):
        assert documents(open_corpus(tmp_path, max_object_size=len(line)))
        with pytest.raises(CorpusError, match=rf"x\{suffix}:1: expected an object of at most 14 "):
            documents(open_corpus(tmp_path, max_object_size=len(line) - 1))


@pytest.mark.parametrize("depth", [100, 100_000])
def test_nested_objects_beside_the_text_are_read_or_named(tmp_path: Path, depth: int) -> None:
    nested = '{"text": "a", "more": ' + '[{"a":' * depth + "1" + "}]" * depth + "}"
    for suffix in (".json", ".jsonl"):
        (tmp_path / f"x{suffix}").write_text(nested)
    if depth == 100:
        assert documents(open_corpus(tmp_path)) == ["a", "a"]
    else:
        found, left_out = outcome_of_corpus(open_corpus(tmp_path, skip_unreadable=True))
        assert found == []
        assert [re.search(r"x\.\w+:1: .* line \((\w+ \w+)", each)[1] for each in left_out] == [
            "maximum recursion",
            "maximum recursion",
        ]


def test_the_column_of_a_mistake_far_inside_is_right(tmp_path: Path) -> None:
    before = '[{"text": "a"},\n{"text": "b"},  '
    (tmp_path / "x.json").write_text(before + '{"text" "c"}]')
    for block, piece in SIZES:
        with sizes(block, piece), pytest.raises(CorpusError, match=r"x\.json:2: .*, column 25\)"):
            documents(open_corpus(tmp_path))


def test_empty_files_are_empty_documents_or_broken_json(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        (tmp_path / f"x{suffix}").touch()
    found, left_out = outcome_of_corpus(open_corpus(tmp_path, skip_unreadable=True))
    assert found == [""], "an empty text"
    assert len(left_out) == 1
    assert "x.json:1: expected JSON" in left_out[0]
