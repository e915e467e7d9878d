"""TextData: which sequences a rank gets, where a run goes on, and options that cannot work."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.data import TextData
from recipes.errors import RecipeError
from tests.support.prepared import all_tokens, on_rank
from tests.support.texts import write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three kinds of files, six documents, one of them in a subfolder."""
    return write_folder(tmp_path / "corpus")


def test_training_and_validation_share_no_token(folder: Path, tmp_path: Path) -> None:
    data = TextData(
        path=folder, vocab_size=300, seq_len=8, val_fraction=0.2, cache_dir=tmp_path / "cache"
    )
    opened = data.open()
    tokens = all_tokens(opened)
    train, val = data.train.begins, data.val.begins
    assert train.start == 0
    assert train.stop + train.step == val.start
    assert val.stop + val.step == len(tokens)
    assert tokens[val.start - 1] == opened.end_of_text
    for sequences in (data.train, data.val):
        found = torch.cat([sequences[index]["input_ids"] for index in range(len(sequences))])
        assert np.array_equal(found, tokens[sequences.begins.start :][: len(found)])


def test_the_corpus_is_prepared_where_lightning_lets_other_ranks_wait(
    folder: Path, tmp_path: Path
) -> None:
    data = TextData(path=folder, seq_len=8, batch_size=2, cache_dir=tmp_path / "cache")
    data.prepare_data()
    (made,) = (tmp_path / "cache").rglob("tokens.bin")
    written = made.stat().st_mtime_ns
    data.setup("fit")
    assert made.stat().st_mtime_ns == written


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
    with pytest.raises(RecipeError, match=r"--data\.seed .*\(seed 0\), got seed 1"):
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
    [
        {"vocab_size": 256},
        {"seq_len": 0},
        {"batch_size": 0},
        {"num_workers": -1},
        {"standard_library_mb": -1},
    ],
)
def test_an_option_out_of_range_is_refused(option: dict[str, int]) -> None:
    (name,) = option
    with pytest.raises(RecipeError, match=rf"{name}: expected .* or more, got .* --data\.{name}"):
        TextData(**option)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=re.escape("val_fraction: expected 0 or more and less")):
        TextData(val_fraction=1.0)


def _rows(batches: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


def test_a_run_goes_on_with_the_very_next_sequences_on_more_ranks(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"

    def started(ranks: int, batch_size: int) -> list[TextData]:
        return [
            on_rank((ranks, rank), folder, cache, batch_size=batch_size) for rank in range(ranks)
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
