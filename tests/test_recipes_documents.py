"""Files read in pieces: the same documents for every size of a block, and every mistake named."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from recipes import documents as reader
from recipes.corpus import open_corpus, standard_library
from recipes.documents import CorpusError, Piece
from recipes.tokenizer import encode, train_tokenizer
from tests.support.documents import SIZES, SUFFIXES, outcome_of_corpus, sizes
from tests.support.texts import documents

# Much of it is nearly JSON; some of it is no UTF-8.
SCRAPS = [
    *(b'{"text": "', b'"}', b'"text"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\r\n"),
    *(b'{"text": "a b"}', b'{"text": {"text": [1]}}', b'{"other": 1}', b'{"text": ""}', b"[[[["),
    *(b"\\ud83d", b"\\ude00", b"\\u00", b"\\", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\x00"),
    *(b"12", b"-", b"1e", b"tru", b"null", b"NaN", b"9" * 5000, "é模😀".encode(), b"word word\nw"),
]


@settings(max_examples=60)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=5),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_what_was_written_is_read(texts: list[str], indent: int | None, is_ascii: bool) -> None:
    objects = [{"other": [{}, 1.5], "text": text} for text in texts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.json").write_text(
            json.dumps(objects, indent=indent, ensure_ascii=is_ascii), encoding="utf-8"
        )
        (folder / "b.jsonl").write_text(
            "\n\n".join(json.dumps(each, ensure_ascii=is_ascii) for each in objects),
            encoding="utf-8",
        )
        for number, text in enumerate(texts):
            (folder / f"c{number}.txt").write_bytes(("\ufeff" + text).encode())
        for block, piece in SIZES:
            with sizes(block, piece):
                found = documents(open_corpus(folder))
            assert found == [text for text in texts * 3 if text]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(SCRAPS), max_size=12).map(b"".join), st.sampled_from(SUFFIXES))
@example(b'[{"text": "a"},\n {"text": "b"', ".json")
@example(b'[{"text": "a"}]\n\xc3', ".json")
@example(b'[{"text": "a"}, 12', ".json")
@example(b'\n\n{"text": "\xff"}\n{"text": "a"}', ".jsonl")
@example(b"\n\na\xe6\xa8", ".txt")
def test_any_bytes_are_read_or_named_whatever_the_size_of_a_block(
    content: bytes, suffix: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, f"x{suffix}")
        path.write_bytes(content)
        lenient = open_corpus(path, skip_unreadable=True)
        expected = outcome_of_corpus(lenient)
        for block, piece in SIZES[1:]:
            with sizes(block, piece):
                assert outcome_of_corpus(lenient) == expected
        found, left_out = expected
        for message in left_out:
            place = re.match(rf"{re.escape(str(path))}:(\d+): expected .*, got .*\. \w+", message)
            assert place is not None, message
            assert 1 <= int(place[1]) <= content.count(b"\n") + 1
        if left_out:
            with pytest.raises(CorpusError, match=re.escape(left_out[0])):
                documents(open_corpus(path))
        else:
            assert documents(open_corpus(path)) == [text for text in found if text]


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", [None, QWEN])
def test_pieces_have_the_tokens_of_the_whole(pattern: str | None) -> None:
    texts = documents(standard_library(300_000))
    texts.append("Wort für Wort\n\nAbsatz, 'tis 1 2\n  x y  z\n" * 50)
    tokenizer: Tokenizer = train_tokenizer(map(_whole, texts), vocab_size=1000)
    if pattern is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    expected = [ids for _, ids in encode(tokenizer, map(_whole, texts))]
    with sizes(2**20, 512):
        pieces = [list(reader.cut([text])) for text in texts]
    assert sum(map(len, pieces)) > 200
    found = [[i for _, ids in encode(tokenizer, each) for i in ids] for each in pieces]
    assert found == expected


def _whole(text: str) -> Piece:
    return Piece(text, is_last=True)


def test_text_without_words_is_cut_all_the_same() -> None:
    with sizes(2**20, 64):
        pieces = list(reader.cut(["模" * 100, "型" * 100]))
    assert [len(piece.text) for piece in pieces] == [64, 64, 64, 8]
    assert "".join(piece.text for piece in pieces) == "模" * 100 + "型" * 100
    assert [piece.is_last for piece in pieces] == [False, False, False, True]


def test_a_cause_without_a_number_is_told_in_one_line() -> None:
    told = str(reader.unreadable("a", OSError("Corrupt data.\n  Unexpected end")))
    assert told.startswith("a: expected a file or folder that can be read, got 'Corrupt data. Unex")


def test_tables_beside_text_are_an_error_with_both_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("text\na\n")
    (tmp_path / "LICENSE.txt").write_text("free")
    message = r"expected tables or .*, got '.*/data/train\.csv' beside '.*/LICENSE\.txt'\. .*--data"
    for is_skipping in (False, True):
        with pytest.raises(CorpusError, match=message):
            open_corpus(tmp_path, skip_unreadable=is_skipping)
    assert documents(open_corpus(tmp_path / "data")) == ["a"]
    assert documents(open_corpus(tmp_path / "LICENSE.txt")) == ["free"]


def test_half_a_document_never_runs_on_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"word " * 100_000 + b"end")
    (tmp_path / "b.txt").write_text("next")
    cut = reader.cut

    def damaging_cut(texts: Iterator[str]) -> Iterator[Piece]:
        (tmp_path / "a.txt").write_bytes(b"word " * 100_000 + b"\xff")
        return cut(texts)

    monkeypatch.setattr(reader, "cut", damaging_cut)
    pieces = open_corpus(tmp_path, skip_unreadable=True).pieces()
    assert not next(pieces).is_last
    with pytest.raises(CorpusError, match=r"a\.txt:1: expected UTF-8"):
        list(pieces)
