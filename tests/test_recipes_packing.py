"""Tokens on disk: what a prepared corpus holds, how it is cut into sequences, who prepares it."""

import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lightning_fsdp.data import ResumableLoader
from recipes import documents, packing
from recipes.corpus import open_corpus
from recipes.data import TextData
from recipes.documents import CorpusError, Piece
from recipes.errors import RecipeError
from recipes.packing import PackedSequences, TokenFile, prepare, split_at_document
from recipes.tokenizer import END_OF_TEXT, encode, end_of_text_id, load_tokenizer, train_tokenizer
from tests.support.prepared import all_tokens
from tests.support.ranks import run_on_ranks
from tests.support.texts import text, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three kinds of files, six documents, one of them in a subfolder."""
    return write_folder(tmp_path / "corpus")


def _prepare(folder: Path, cache: Path, *, vocab_size: int = 300) -> TokenFile:
    return prepare(
        open_corpus(folder),
        None,
        vocab_size=vocab_size,
        end_of_text=END_OF_TEXT,
        cache_dir=cache,
    )


def test_a_full_disk_says_where_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(OSError, match=rf"could not write '{tmp_path}/cache/\w+': File too"):
            _prepare(folder, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def _packed(tokens: np.ndarray, seq_len: int) -> PackedSequences:
    places = range(0, len(tokens) - seq_len, seq_len)
    return PackedSequences(lambda begin, end: tokens[begin:end], places)


@settings(max_examples=30)
@given(st.text(max_size=200))
def test_every_text_comes_back_from_its_tokens(any_text: str) -> None:
    tokenizer = train_tokenizer([Piece(text(0), is_last=True)], vocab_size=300)
    marked = f"{any_text}{END_OF_TEXT}{any_text}"
    ((_, ids),) = encode(tokenizer, [Piece(marked, is_last=True)])
    assert tokenizer.decode(ids, skip_special_tokens=False) == marked
    assert end_of_text_id(tokenizer) not in ids, "its spelling in a text separates nothing"


def test_packed_tokens_decode_to_the_documents_in_order(folder: Path, tmp_path: Path) -> None:
    prepared = _prepare(folder, tmp_path / "cache")
    tokens, tokenizer = all_tokens(prepared), prepared.tokenizer()
    ends = np.flatnonzero(tokens == prepared.end_of_text)
    assert ends[-1] == len(tokens) - 1
    each = np.split(tokens, ends + 1)[:-1]
    texts = [tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in each]
    assert texts == [text(n) for n in range(6)]
    assert (prepared.num_documents, prepared.num_tokens) == (6, len(tokens))
    assert tokens.dtype == np.uint16
    assert prepared.vocab_size == 300 > tokens.max()


def test_a_document_in_many_pieces_ends_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _prepare(folder, tmp_path / "whole")
    monkeypatch.setattr(documents, "PIECE_LENGTH", 100)
    found = _prepare(folder, tmp_path / "pieces")
    assert found.num_documents == 6
    assert np.array_equal(all_tokens(found), all_tokens(whole))


def test_sequences_hold_every_token_once_and_their_labels_follow() -> None:
    tokens = np.arange(4 * 8 + 1, dtype=np.uint16)
    packed = _packed(tokens, 8)
    items = [packed[index] for index in range(len(packed))]
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(32))
    assert torch.cat([item["labels"] for item in items]).tolist() == list(range(1, 33))
    assert items[0]["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError, match="out of range"):
        packed[4]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (8, 0), (9, 1), (17, 2)])
def test_only_full_sequences_with_all_labels_count(num_tokens: int, expected: int) -> None:
    assert len(_packed(np.zeros(num_tokens, dtype=np.uint16), 8)) == expected


def test_files_without_any_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(CorpusError, match=r"expected text, got 1 files without any"):
        _prepare(tmp_path, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/corpus.json")), "nothing may look prepared"


class _Tokens(TokenFile):
    """In memory."""

    tokens = np.ones(100, dtype=np.uint16)

    def read(self, begin: int, end: int) -> np.ndarray:
        return self.tokens[begin:end]


def _split(ends: list[int], val_fraction: float) -> tuple[PackedSequences, PackedSequences]:
    tokens = _Tokens(
        folder=Path(),
        num_documents=len(ends),
        num_empty=0,
        num_skipped=0,
        num_tokens=100,
        vocab_size=2,
        end_of_text=0,
        dtype="uint16",
    )
    tokens.tokens[:] = 1
    tokens.tokens[ends] = 0
    return split_at_document(tokens, 4, val_fraction)


def test_the_split_lies_after_a_document() -> None:
    train, val = _split([40, 84, 99], 0.1)
    assert (train.begins, val.begins) == (range(0, 85 - 4, 4), range(85, 100 - 4, 4))
    assert _split([40, 84, 99], 0.0)[0].begins == range(0, 100 - 4, 4)


def test_a_single_long_document_is_split_inside() -> None:
    # The end of document 0 is too far from the wanted place.
    assert _split([5, 99], 0.1)[1].begins.start == 90


@pytest.mark.parametrize("place", [85, 84, 83])
def test_the_split_does_not_depend_on_how_much_is_searched_at_once(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_SEARCHED_AT_ONCE", 3)
    assert _split([place - 1, 99], 0.1)[1].begins.start == place


def test_a_corpus_is_tokenised_once_for_each_content_and_tokenizer(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = _prepare(folder, cache)
    written = (first.folder / "tokens.bin").stat().st_mtime_ns
    assert _prepare(folder, cache) == first
    assert (first.folder / "tokens.bin").stat().st_mtime_ns == written
    assert _prepare(folder, cache, vocab_size=310).folder != first.folder
    before = (folder / "a.txt").read_text(encoding="utf-8")
    (folder / "a.txt").write_text(
        before.replace("shard", "chard", 1), encoding="utf-8"
    )  # same size
    assert _prepare(folder, cache).folder != first.folder


def test_what_a_killed_run_left_behind_is_not_taken_for_a_corpus(
    folder: Path, tmp_path: Path
) -> None:
    prepared = _prepare(folder, tmp_path / "cache")
    tokens = all_tokens(prepared)
    partial = prepared.folder.with_name(f".{prepared.folder.name}.partial")
    prepared.folder.rename(partial)
    (partial / "tokens.bin").write_bytes(b"half")
    (partial / "more").touch()
    found = _prepare(folder, tmp_path / "cache")
    assert np.array_equal(all_tokens(found), tokens)
    assert not partial.exists()
    assert not (found.folder / "more").exists(), "taken into what is new"


def test_a_damaged_token_file_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    prepared = _prepare(folder, tmp_path / "cache")
    with (prepared.folder / "tokens.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CorpusError, match=r"tokens\.bin: expected [\d,]+ bytes, got .* Delete"):
        _prepare(folder, tmp_path / "cache")


def _prepare_at_once(rank: int, world_size: int, folder: Path, cache: Path) -> tuple[int, bool]:
    has_worked = False

    def train(*args: Any) -> Tokenizer:
        nonlocal has_worked
        has_worked = True
        time.sleep(0.3)  # long enough for the others to arrive
        return train_tokenizer(*args)

    packing.train_tokenizer = train
    try:
        dist.barrier()
        return _prepare(folder, cache).num_tokens, has_worked
    finally:
        packing.train_tokenizer = train_tokenizer


def test_of_several_processes_one_tokenises_and_all_get_the_result(
    folder: Path, tmp_path: Path
) -> None:
    results = run_on_ranks(_prepare_at_once, 3, folder, tmp_path / "cache")
    num_tokens = _prepare(folder, tmp_path / "other").num_tokens
    assert [count for count, _ in results] == [num_tokens] * 3
    assert sum(has_worked for _, has_worked in results) == 1


def test_a_given_tokenizer_is_used_as_it_is(folder: Path, tmp_path: Path) -> None:
    made = train_tokenizer(open_corpus(folder).pieces(), vocab_size=290)
    made.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        data = TextData(path=folder, tokenizer=str(name), cache_dir=tmp_path / "cache")
        assert data.open().vocab_size == 290
    with pytest.raises(
        RecipeError, match=r"expected a tokenizer\.json, .*corpus/tokenizer\.json' \(No such file"
    ):
        load_tokenizer(str(folder))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RecipeError, match=r"tokenizer: .*Correct --data\.tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_saved_with_truncation_and_padding_keeps_every_token(
    folder: Path, tmp_path: Path
) -> None:
    made = train_tokenizer(open_corpus(folder).pieces(), vocab_size=290)
    found = []
    for name in ("plain", "truncation", "padding"):
        if name == "truncation":
            made.enable_truncation(4)
        if name == "padding":
            made.no_truncation()
            made.enable_padding(length=1000)
        made.save(str(tmp_path / f"{name}.json"))
        given = str(tmp_path / f"{name}.json")
        data = TextData(path=folder, tokenizer=given, cache_dir=tmp_path / "cache")
        found.append(data.open())
    assert len({tokens.num_tokens for tokens in found}) == 1
    assert len({tokens.folder for tokens in found}) == 1, "what was saved with it changes nothing"


def test_an_unknown_end_of_text_is_refused(folder: Path) -> None:
    tokenizer = train_tokenizer(open_corpus(folder).pieces(), vocab_size=290)
    with pytest.raises(RecipeError, match=r"got '</s>'\. Name the token .* --data\.end_of_text"):
        end_of_text_id(tokenizer, "</s>")


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (2, 2), (3, 4), (4, 1)])
def test_every_token_of_the_corpus_is_read_exactly_once_over_all_ranks(
    ranks: int, batch_size: int
) -> None:
    packed = _packed(np.arange(24 * 4 + 1, dtype=np.uint16), 4)
    for epoch in (0, 1):
        seen = []
        for rank in range(ranks):
            loader = ResumableLoader(packed, batch_size, num_replicas=ranks, rank=rank)
            loader.sampler.set_epoch(epoch)
            seen += [batch["input_ids"].flatten() for batch in loader]
        assert sorted(torch.cat(seen).tolist()) == list(range(24 * 4))
