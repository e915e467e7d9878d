"""Text that is left out, that changes under a run, or that differs between ranks."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from recipes import packing
from recipes.data import TextData
from recipes.documents import CorpusError
from recipes.errors import RecipeError
from recipes.packing import TokenFile
from recipes.tokenizer import END_OF_TEXT, train_tokenizer
from tests.support.prepared import all_tokens, on_rank
from tests.support.ranks import errors_on_ranks, run_on_ranks
from tests.support.texts import text, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three kinds of files, six documents, one of them in a subfolder."""
    return write_folder(tmp_path / "corpus")


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
    decoded = found.tokenizer().decode(all_tokens(found).tolist(), skip_special_tokens=False)
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
    data = on_rank((1, 0), folder, tmp_path / "cache")
    next(iter(data.train_dataloader()))
    state = data.state_dict()
    expected = change(folder)
    if not is_cache_there:
        shutil.rmtree(tmp_path / "cache")
        expected = "other files or options; what they were is gone with"
    resumed = on_rank((1, 0), folder, tmp_path / "cache")
    with pytest.raises(RecipeError, match=rf"got another one: {expected}.*Restore it, or start"):
        resumed.load_state_dict(state)


def test_another_tokenizer_is_not_taken_for_another_file(folder: Path, tmp_path: Path) -> None:
    data = on_rank((1, 0), folder, tmp_path / "cache")
    next(iter(data.train_dataloader()))
    resumed = on_rank((1, 0), folder, tmp_path / "cache", vocab_size=310)
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
        is_global_zero=rank == 0,
    )
    if rank == 1 and what == "locked":
        data._corpus = _refuse  # type: ignore[method-assign]
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=strategy,
        distributed_sampler_kwargs={"num_replicas": world_size, "rank": rank},
    )
    data.setup("fit")


def _refuse() -> NoReturn:
    raise OSError("cache 1 is locked")


def _broadcast(value: object) -> object:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _all_agree(decision: bool, **among: bool) -> bool:
    decided = torch.tensor(int(decision))
    dist.all_reduce(decided, op=dist.ReduceOp.MIN if among.get("all", True) else dist.ReduceOp.MAX)
    return bool(decided)


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("other", ["corpus: expected the same text on every rank"] * 2),
        ("broken", ["expected no mistake on any rank", r"a\.txt:1: expected UTF-8"]),
        ("locked", ["expected no mistake on any rank", "cache 1 is locked"]),
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
