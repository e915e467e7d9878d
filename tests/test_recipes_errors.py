"""A mistake that one rank finds ends all of them, and is told once."""

import re
from pathlib import Path
from unittest import mock

import pytest

from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from tests.support.ranks import errors_on_ranks
from tests.support.recipe_models import SEQ_LEN, VOCAB_SIZE
from tests.support.trainer import as_torchrun, make_loader, make_trainer

_SHOWN = "size: expected one that fits"


def _fit(rank: int, world_size: int, folder: Path, kind: type[Exception], where: str) -> None:
    as_torchrun(rank, world_size)
    model = GPT2(size="nano", vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN)
    fails = where == "everywhere" or rank == 1
    error = kind(_SHOWN) if fails else None
    built = GPT2.build(model) if error is None else None
    trainer = make_trainer("scratch_fsdp", folder / str(rank))
    with mock.patch.object(GPT2, "build", side_effect=error, return_value=built):
        try:
            trainer.fit(model, make_loader())
        except RecipeError as mistake:
            raise RecipeError(f"{mistake} shown: {not mistake.is_shown_elsewhere}") from mistake


@pytest.mark.parametrize(
    ("kind", "where", "told"),
    [
        (RecipeError, "one rank", ["RecipeError: .*Another rank .*: False", f"{_SHOWN} .*: True"]),
        (OSError, "one rank", ["RecipeError: .*Another rank .*: False", f"OSError: {_SHOWN}"]),
        (RecipeError, "everywhere", [f"{_SHOWN} shown: True", f"{_SHOWN} shown: False"]),
    ],
)
def test_what_one_rank_cannot_build_ends_the_others_at_once(
    kind: type[Exception], where: str, told: list[str], tmp_path: Path
) -> None:
    errors = errors_on_ranks(_fit, 2, tmp_path, kind, where)
    for error, message in zip(errors, told, strict=True):
        assert error is not None
        assert re.search(message, f"{error.type_name}: {error.message}"), errors
