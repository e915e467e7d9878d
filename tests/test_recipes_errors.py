"""A mistake that ranks find ends all of them, and is told once."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import TCPStore

from recipes.errors import RecipeError
from recipes.gpt2 import GPT2
from recipes.optimizer import OptimizerConfig
from tests.support.ranks import errors_on_ranks
from tests.support.recipe_commands import command_line_in, finish_warm, short_run
from tests.support.recipe_models import SEQ_LEN, VOCAB_SIZE, text_data
from tests.support.texts import write_folder
from tests.support.trainer import (
    as_torchrun,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    with_options,
)

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


def test_what_a_strategy_refuses_when_it_shards_is_one_line_on_each_rank(tmp_path: Path) -> None:
    units = [
        "--trainer.strategy=lightning_fsdp.ScratchFSDPStrategy",
        "--trainer.strategy.units=[A]",
    ]
    with pytest.raises(AssertionError) as failed:
        finish_warm(tmp_path / "run", short_run(write_folder(tmp_path / "corpus"), *units))
    said = [line for line in str(failed.value).splitlines() if "error" in line]
    mistake = "--trainer: units: expected classes that occur in GPT2 and have a forward, got ['A']"
    assert len(said) == 2
    assert any(line.startswith(f"error: {mistake}") for line in said), said
    assert any(line.startswith(f"error (rank 1): {mistake}") for line in said), said
    assert "Traceback" not in str(failed.value)


def _resumes(rank: int, world_size: int, folder: Path) -> None:
    """With each optimizer from a checkpoint of the other, and of its own."""
    kinds = {
        "full": lambda: "scratch_fsdp",
        "sharded": lambda: with_options("scratch_fsdp", checkpoint="sharded"),
        "fsdp1": lambda: "fsdp1_zero3",
        "ddp": lambda: "ddp",
    }

    def run(kind: str, name: str, lr: float, command: str, ckpt_path: Path | None = None) -> Any:
        data = text_data(folder / "corpus", folder / "cache")
        optimizer = OptimizerConfig(name=name, lr=lr)  # type: ignore[arg-type]
        model = GPT2(size="nano", vocab_size=VOCAB_SIZE, optimizer=optimizer)
        options = {"max_steps": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
        trainer = make_trainer(kinds[kind](), folder, **options)
        getattr(trainer, command)(model, data, ckpt_path=ckpt_path)
        return trainer

    for kind in kinds:
        path = folder / f"{kind}.ckpt"
        run(kind, "adamw", 0.01, "fit").save_checkpoint(path)
        expected = r"--ckpt_path: expected a checkpoint of this optimizer \(muon 16, adamw 2, "
        cure = r".*\(adamw 18, adamw 34 parameters\)\. Set --model\.optimizer\.name to what"
        with pytest.raises(RecipeError, match=expected + cure) as caught:
            run(kind, "muon", 0.01, "fit", path)
        assert caught.value.is_shown_elsewhere == (rank > 0), kind
        validated = run(kind, "muon", 0.01, "validate", path).lightning_module
        make_trainer(kinds[kind](), folder, max_steps=1, limit_val_batches=0).fit(
            validated, text_data(folder / "corpus", folder / "cache")
        )
        assert run(kind, "adamw", 0.02, "fit", path).global_step == 1


def test_the_checkpoint_of_another_optimizer_is_told_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "corpus")
    on_trainer_ranks(_resumes, 2, tmp_path)


# LightningCLI calls names that jsonargparse has renamed.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_what_each_rank_of_torchrun_finds_in_the_options_is_told_by_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    told = {"ADDR": "localhost", "PORT": str(store.port)}
    for name, value in told.items():
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    run, fit = command_line_in(tmp_path, monkeypatch), short_run(write_folder(tmp_path / "corpus"))

    def said(mistake: str, attempt: int = 0) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with pytest.raises(SystemExit) as stopped:
            run([*fit, mistake])
        assert stopped.value.code not in (None, 0)
        return str(stopped.value.code) + capsys.readouterr().err

    for mistake, message in (
        ("--data.batchsize=3", "--data.batchsize: expected one of batch_size"),  # the parser
        ("--data.batch_size=0", "batch_size: expected 1 or more, got 0"),  # what it builds
        ("--data.val_fraction=0.9999", "training data: expected at least"),  # what reads the corpus
    ):
        assert message in said(mistake)
        assert message not in said(mistake), "by another rank"
        assert message in said(mistake, attempt=1), "after a restart"
    assert "batch_size: expected 1 or more, got -1" in said("--data.batch_size=-1")
    del store
    assert "batch_size: expected 1 or more, got -1" in said("--data.batch_size=-1")
