"""The data of the recipes: how it is packed, who gets what, where a run goes on."""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from recipes.tokenizer import (
    END_OF_TEXT,
    encode,
    end_of_text_id,
    load_tokenizer,
    train_tokenizer,
)
from tests.support.ranks import errors_on_ranks, run_on_ranks
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


def _all_tokens(prepared: TokenFile) -> np.ndarray:
    return prepared.read(0, prepared.num_tokens)


def _packed(tokens: np.ndarray, seq_len: int) -> PackedSequences:
    return PackedSequences(lambda begin, end: tokens[begin:end], 0, len(tokens), seq_len)


# ------------------------------------------------------------------- tokenizer and packing


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
    tokens, tokenizer = _all_tokens(prepared), prepared.tokenizer()
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
    assert np.array_equal(_all_tokens(found), _all_tokens(whole))


def test_sequences_hold_every_token_once_and_their_labels_follow() -> None:
    tokens = np.arange(4 * 8 + 1, dtype=np.uint16)
    packed = _packed(tokens, 8)
    items = [packed[index] for index in range(len(packed))]
    assert torch.cat([item["input_ids"] for item in items]).tolist() == list(range(32))
    assert torch.cat([item["labels"] for item in items]).tolist() == list(range(1, 33))
    assert items[0]["input_ids"].dtype == torch.int64
    with pytest.raises(IndexError, match="sequence 4: expected 0 to 3"):
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
    assert (train.begin, train.end) == (0, 85)
    assert (val.begin, val.end) == (85, 100)
    assert _split([40, 84, 99], 0.0)[0].end == 100


def test_a_single_long_document_is_split_inside() -> None:
    # The end of document 0 is too far from the wanted place.
    assert _split([5, 99], 0.1)[0].end == 90


@pytest.mark.parametrize("place", [85, 84, 83])
def test_the_split_does_not_depend_on_how_much_is_searched_at_once(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_SEARCHED_AT_ONCE", 3)
    assert _split([place - 1, 99], 0.1)[0].end == place


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
    tokens = _all_tokens(prepared)
    partial = prepared.folder.with_suffix(".partial")
    prepared.folder.rename(partial)
    (partial / "tokens.bin").write_bytes(b"half")
    assert np.array_equal(_all_tokens(_prepare(folder, tmp_path / "cache")), tokens)


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


# ------------------------------------------------------------------------ ranks and position


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


# -------------------------------------------------------------------------------- TextData


def test_training_and_validation_share_no_token(folder: Path, tmp_path: Path) -> None:
    data = TextData(
        path=folder, vocab_size=300, seq_len=8, val_fraction=0.2, cache_dir=tmp_path / "cache"
    )
    opened = data.open()
    tokens = _all_tokens(opened)
    assert data.train.begin == 0
    assert data.train.end == data.val.begin
    assert data.val.end == len(tokens)
    assert tokens[data.train.end - 1] == opened.end_of_text
    for sequences in (data.train, data.val):
        found = torch.cat([sequences[index]["input_ids"] for index in range(len(sequences))])
        assert np.array_equal(found, tokens[sequences.begin :][: len(found)])


def test_without_a_trainer_the_data_is_that_of_one_rank(folder: Path, tmp_path: Path) -> None:
    data = TextData(path=folder, seq_len=8, batch_size=2, cache_dir=tmp_path / "cache")
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (2, 8),
        "labels": (2, 8),
    }
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])


def test_the_position_can_be_restored_before_or_after_the_loader_exists(
    folder: Path, tmp_path: Path
) -> None:
    def opened() -> TextData:
        data = TextData(path=folder, seq_len=8, batch_size=2, cache_dir=tmp_path / "cache")
        data.setup("fit")
        return data

    assert TextData(path=folder).state_dict() == {}, "before setup"
    data = opened()
    whole = [batch["input_ids"] for batch in data.train_dataloader()]
    data = opened()
    iterator = iter(data.train_dataloader())
    for _ in range(3):
        next(iterator)
    state = data.state_dict()

    before = opened()
    before.load_state_dict(state)
    rest = [batch["input_ids"] for batch in before.train_dataloader()]
    assert torch.equal(torch.stack(rest), torch.stack(whole[3:]))

    after = opened()
    loader = after.train_dataloader()
    iterator = iter(loader)  # made before the position is known, as the Trainer does
    after.load_state_dict(state)
    rest = [batch["input_ids"] for batch in iterator]
    assert torch.equal(torch.stack(rest), torch.stack(whole[3:]))


def test_a_position_in_other_data_is_refused_with_the_options_to_change(
    folder: Path, tmp_path: Path
) -> None:
    def opened(**options: int) -> TextData:
        data = TextData(
            path=folder, seq_len=8, batch_size=2, cache_dir=tmp_path / "cache", **options
        )
        data.setup("fit")
        return data

    data = opened()
    next(iter(data.train_dataloader()))
    other = opened(seed=1)
    with pytest.raises(RecipeError, match=r"\(seed 0\), got seed 1.*--data\.seed"):
        other.load_state_dict(data.state_dict())


def test_validation_can_be_left_out(folder: Path, tmp_path: Path) -> None:
    data = TextData(path=folder, seq_len=8, val_fraction=0, cache_dir=tmp_path / "cache")
    data.setup("fit")
    assert data.val_dataloader() == []
    with pytest.raises(RecipeError, match=r"val_fraction: expected more than 0 .* --data\.val_f"):
        data.setup("validate")


def test_too_little_text_is_refused_with_the_numbers(folder: Path, tmp_path: Path) -> None:
    data = TextData(path=folder, seq_len=8, batch_size=4, cache_dir=tmp_path / "cache")
    data.open()
    with pytest.raises(RecipeError, match=r"training data: expected at least 40000 sequences of 8"):
        data.require_enough(10_000, for_training=True)
    with pytest.raises(RecipeError, match=r"validation data: expected at least 1000 sequences"):
        data.require_enough(1_000, for_training=False)


@pytest.mark.parametrize(
    "option",
    [{"vocab_size": 256}, {"seq_len": 0}, {"batch_size": 0}, {"num_workers": -1}],
)
def test_an_option_out_of_range_is_refused(option: dict[str, int]) -> None:
    (name,) = option
    with pytest.raises(RecipeError, match=rf"{name}: expected .* or more, got .* --data\.{name}"):
        TextData(**option)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=re.escape("val_fraction: expected 0 or more and less")):
        TextData(val_fraction=1.0)


# ------------------------------------------------------------- left out, changed, and not the same


def _write_bad_lines(folder: Path) -> None:
    with (folder / "c.jsonl").open("ab") as file:
        file.write(b'{"text": "cut o\n{"text": "\xff"}\n\n{"text": "last"}\n')
    (folder / "e.txt").write_bytes(b"\xff")
    (folder / "f.txt").touch()


def test_what_is_left_out_is_counted_and_said_each_time(folder: Path, tmp_path: Path) -> None:
    whole = TextData(path=folder, cache_dir=tmp_path / "cache", vocab_size=300).open()
    assert (whole.num_documents, whole.num_empty, whole.num_skipped) == (6, 0, 0)
    _write_bad_lines(folder)

    def opened(**options: bool) -> TokenFile:
        data = TextData(path=folder, cache_dir=tmp_path / "cache", vocab_size=300, **options)
        return data.open()

    with pytest.raises(CorpusError, match=r"c\.jsonl:3: expected JSON"):
        opened()
    message = (
        r"3 files, lines, objects or rows .* left out.*skipped\.txt; the first: .*c\.jsonl:3: exp"
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match=message):
            found = opened(skip_unreadable=True)
    assert (found.num_documents, found.num_empty, found.num_skipped) == (7, 1, 3)
    lines = (found.folder / "skipped.txt").read_text().splitlines()
    places = [line.removeprefix(f"{folder}/").partition(": ")[0] for line in lines]
    assert places == ["c.jsonl:3", "c.jsonl:4", "e.txt:1"]
    decoded = found.tokenizer().decode(_all_tokens(found).tolist(), skip_special_tokens=False)
    assert decoded.split(END_OF_TEXT) == [*map(text, range(5)), "last", text(5), ""]


def test_a_folder_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff")
    data = TextData(path=tmp_path, skip_unreadable=True, cache_dir=tmp_path / "cache")
    with pytest.raises(CorpusError, match=r"1 files without any \(1 times something was left out"):
        data.open()


def test_what_is_left_out_has_a_line_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b\nc.jsonl").write_text('{"text": 1}\n{"a\\nb": 1}')
    data = TextData(
        path=tmp_path, skip_unreadable=True, cache_dir=tmp_path / "cache", val_fraction=0
    )
    with pytest.warns(UserWarning, match=r"2 files, lines, objects or rows"):
        found = data.open()
    lines = (found.folder / "skipped.txt").read_text().splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        f"{tmp_path}/b c.jsonl:{number}" for number in (1, 2)
    ]


def _more(path: Path) -> None:
    with path.open("a") as file:
        file.write("more")


def _unreadable(path: Path) -> None:
    path.write_bytes(b"\xff")


@pytest.mark.parametrize(
    ("change", "is_skipping"), [(_more, False), (_more, True), (_unreadable, True)]
)
def test_a_file_that_is_written_to_while_it_is_tokenised_is_named(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    is_skipping: bool,
) -> None:
    def train(*args: Any) -> Tokenizer:
        made = train_tokenizer(*args)
        change(folder / "a.txt")
        return made

    monkeypatch.setattr(packing, "train_tokenizer", train)
    data = TextData(path=folder, cache_dir=tmp_path / "c", skip_unreadable=is_skipping)
    message = r"corpus: expected files that stay as they are .* got 'a\.txt' changed\. Start again"
    with pytest.raises(CorpusError, match=message):
        data.open()
    left = [path.suffix for path in (tmp_path / "c").iterdir()]
    assert left == [".lock"], "nothing may look prepared, or take room"


class _OnRank(TextData):
    """One rank's data, without a Trainer."""

    place = (1, 0)

    def _shard(self) -> dict[str, int]:
        return dict(zip(("num_replicas", "rank"), self.place, strict=True))


def _on_rank(place: tuple[int, int], folder: Path, cache: Path, **options: int) -> TextData:
    chosen = {"seq_len": 8, "batch_size": 2, "vocab_size": 300, "num_workers": 0} | options
    data = _OnRank(path=folder, cache_dir=cache, **chosen)  # type: ignore[arg-type]
    data.place = place
    data.setup("fit")
    return data


def _rows(batches: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


def test_a_run_goes_on_with_the_very_next_sequences_on_more_ranks(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"

    def started(ranks: int, batch_size: int) -> list[TextData]:
        return [
            _on_rank((ranks, rank), folder, cache, batch_size=batch_size) for rank in range(ranks)
        ]

    whole = [list(data.train_dataloader()) for data in started(2, 4)]
    num_batches = len(whole[0])
    assert num_batches == len(whole[1]) > 6
    assert not set(_rows(whole[0])) & set(_rows(whole[1]))

    states = []
    for data in started(2, 4):
        iterator = iter(data.train_dataloader())
        for _ in range(3):
            next(iterator)
        states.append(data.state_dict())
    assert states[0] == states[1]

    resumed = started(4, 2)
    for data in resumed:
        data.load_state_dict(states[0])
    rest = [list(data.train_dataloader()) for data in resumed]
    assert [len(share) for share in rest] == [num_batches - 3] * 4
    for step in range(num_batches - 3):
        together = sorted(row for share in rest for row in _rows([share[step]]))
        assert together == sorted(row for share in whole for row in _rows([share[3 + step]]))


def _append(folder: Path) -> str:
    with (folder / "a.txt").open("a") as file:
        file.write(".")
    return "'a.txt' changed"


def _rename(folder: Path) -> str:
    (folder / "a.txt").rename(folder / "a2.txt")
    return "'a.txt' is gone, 'a2.txt' is new"


def _swap(folder: Path) -> str:
    """The same number of tokens: only the contents tell."""
    content = (folder / "a.txt").read_bytes()
    (folder / "a.txt").write_bytes(content[:200].replace(b"shard", b"rdsha") + content[200:])
    return "'a.txt' changed"


@pytest.mark.parametrize("change", [_append, _rename, _swap])
@pytest.mark.parametrize("is_cache_there", [True, False])
def test_a_file_that_changed_between_a_checkpoint_and_the_resumed_run_is_named(
    folder: Path, tmp_path: Path, change: Callable[[Path], str], is_cache_there: bool
) -> None:
    data = _on_rank((1, 0), folder, tmp_path / "cache")
    next(iter(data.train_dataloader()))
    state = data.state_dict()
    expected = change(folder)
    if not is_cache_there:
        shutil.rmtree(tmp_path / "cache")
        expected = "other files or options; what they were is gone with"
    resumed = _on_rank((1, 0), folder, tmp_path / "cache")
    with pytest.raises(RecipeError, match=rf"got another one: {expected}.*Restore it, or start"):
        resumed.load_state_dict(state)


def test_another_tokenizer_is_not_taken_for_another_file(folder: Path, tmp_path: Path) -> None:
    data = _on_rank((1, 0), folder, tmp_path / "cache")
    next(iter(data.train_dataloader()))
    resumed = _on_rank((1, 0), folder, tmp_path / "cache", vocab_size=310)
    with pytest.raises(RecipeError, match="the same files with another tokenizer"):
        resumed.load_state_dict(data.state_dict())


def _set_up_with_a_trainer(rank: int, world_size: int, folder: Path, what: str) -> None:
    mine = folder / f"of {rank}"
    write_folder(mine)
    if rank == 1 and what == "other":
        (mine / "a.txt").write_text("other text")
    if rank == 1 and what == "broken":
        (mine / "a.txt").write_bytes(b"\xff")
    data = TextData(path=mine, seq_len=8, vocab_size=300, cache_dir=folder / f"cache {rank}")
    strategy = SimpleNamespace(
        broadcast=_broadcast,
        reduce_boolean_decision=_all_agree,
        root_device=torch.device("cpu"),
    )
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=strategy,
        distributed_sampler_kwargs={"num_replicas": world_size, "rank": rank},
    )
    data.setup("fit")


def _broadcast(value: object) -> object:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _all_agree(decision: bool) -> bool:
    decided = torch.tensor(int(decision))
    dist.all_reduce(decided, op=dist.ReduceOp.MIN)
    return bool(decided)


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("other", ["corpus: expected the same text on every rank"] * 2),
        ("broken", ["corpus: expected the same text on", r"a\.txt:1: expected UTF-8"]),
    ],
)
def test_ranks_that_find_different_text_stop_together(
    tmp_path: Path, what: str, messages: list[str]
) -> None:
    errors = errors_on_ranks(_set_up_with_a_trainer, 2, tmp_path, what)
    for error, message in zip(errors, messages, strict=True):
        assert re.search(message, str(error)), errors


def test_ranks_that_find_the_same_text_go_on(tmp_path: Path) -> None:
    run_on_ranks(_set_up_with_a_trainer, 2, tmp_path, "same")
