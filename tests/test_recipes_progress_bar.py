"""The progress bar of a recipe: as many batches as are read, in a resumed run as well."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from recipes.monitor import BatchProgressBar, is_step_complete
from tests.support.recipe_commands import command_line_in, short_run, tiny_run
from tests.support.texts import write_folder

# LightningCLI calls names that jsonargparse has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"
)


class _Look(pl.Callback):
    """Notes what the bar shows after each batch: of an epoch, n of the total. Saves each step."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.shown: list[tuple[int, int, int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        bar = trainer.progress_bar_callback.train_progress_bar
        self.shown.append((trainer.current_epoch, bar.completed, bar.total))
        of = f"/{trainer.max_epochs - 1}" if trainer.max_epochs > 0 else ""
        assert bar.description == f"Epoch {trainer.current_epoch}{of}".ljust(10)
        if self.folder and is_step_complete(trainer, args[-1]):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def _shown(tmp_path: Path, folder: Path | None, ckpt_path: Path | None = None, **options: Any):
    tiny_run(
        tmp_path,
        ckpt_path,
        callbacks=[BatchProgressBar(), look := _Look(folder)],
        limit_train_batches=5,
        limit_val_batches=0,
        logger=False,
        **options,
    )
    return look.shown


@pytest.mark.parametrize(
    ("accumulate", "limit"),
    [(1, {"max_steps": 4}), (2, {"max_steps": 4}), (3, {"max_steps": 4}), (2, {"max_epochs": 2})],
)
def test_the_total_is_what_is_read_of_the_epoch_in_a_resumed_run_too(
    tmp_path: Path, accumulate: int, limit: dict[str, int]
) -> None:
    write_folder(tmp_path / "corpus")
    options = {"accumulate_grad_batches": accumulate, **limit}
    shown = _shown(tmp_path, tmp_path / "kept", **options)
    read = {epoch: number for epoch, number, _ in shown}  # the last of each epoch
    assert shown == [(e, n, read[e]) for e, total in read.items() for n in range(1, total + 1)]
    paths = sorted((tmp_path / "kept").iterdir(), key=lambda path: int(path.stem))
    for path in paths[:-1]:
        resumed = _shown(tmp_path, None, path, **options)
        assert resumed == shown[-len(resumed) :], path.name
    assert len(paths) > 3


def test_the_command_has_this_bar_and_leaves_another_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = []
    monkeypatch.setattr(
        pl.Trainer, "fit", lambda trainer, *_, **__: bars.append(trainer.progress_bar_callback)
    )
    run, fit = command_line_in(tmp_path, monkeypatch), short_run(write_folder(tmp_path / "corpus"))
    shows, callbacks = "--trainer.enable_progress_bar=true", "lightning.pytorch.callbacks"
    run([*fit, shows])
    run(
        [
            *fit,
            shows,
            f"--trainer.callbacks+={callbacks}.RichProgressBar",
            "--trainer.callbacks.refresh_rate=7",
        ]
    )
    run([*fit, shows, f"--trainer.callbacks+={callbacks}.TQDMProgressBar"])
    run(fit)
    assert [type(bar) for bar in bars] == [BatchProgressBar] * 2 + [TQDMProgressBar, type(None)]
    assert bars[1].refresh_rate == 7
