"""A run that is stopped and resumed, with shuffle, dropout and a schedule, is the same run."""

import random
from contextlib import nullcontext
from itertools import chain

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_fsdp import ResumableLoader
from lightning_fsdp.strategies import random_states
from tests.support.ranks import run_on_ranks
from tests.support.trainer import (
    SHARDED,
    Regressor,
    make_data,
    make_loader,
    make_trainer,
    on_trainer_ranks,
    seeded,
    weights_of,
)

CPU = torch.device("cpu")


class _Samples(Dataset):
    """Samples with their number; noise from all three generators, if wanted."""

    def __init__(self, length, *, is_noisy=True):
        self.data = make_data(length)
        self.is_noisy = is_noisy

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        if self.is_noisy:
            x = x + torch.rand(()) + np.random.random() + random.random()
        return x.float(), y, index


class _Dropping(Regressor):
    def __init__(self, probability=0.3):
        super().__init__(lr=0.003)
        self.drop = nn.Dropout(probability)
        self.numbers = []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        self.numbers.append(index.tolist())
        loss = nn.functional.mse_loss(self(self.drop(x)), y)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _run(strategy, folder, *, seed=0, length=32, loader=None, is_noisy=True, model=None, **options):
    """Train; return the module. ``ckpt_path`` among the options resumes."""
    ckpt_path = options.pop("ckpt_path", None)
    loaders = options.pop("loaders", {})
    random.seed(seed)
    np.random.seed(seed)
    model = seeded(model or _Dropping, seed)
    trainer = make_trainer(strategy, folder, **{"accumulate_grad_batches": 2, **options})
    loader = loader or ResumableLoader(_Samples(length, is_noisy=is_noisy), 2, seed=7)
    trainer.fit(model, loader, ckpt_path=ckpt_path, **loaders)
    return model


def _keep(folder, every=1):
    return ModelCheckpoint(
        folder / "kept", every_n_train_steps=every, save_top_k=-1, filename="{step}"
    )


def _assert_same_run(resumed, whole, num_micro_batches):
    """Bit for bit: what was read, the losses, and the weights at the end."""
    assert resumed.numbers == whole.numbers[num_micro_batches:]
    assert [x.item() for x in resumed.losses] == [
        x.item() for x in whole.losses[num_micro_batches:]
    ]
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), atol=0, rtol=0)


# -- the same number of ranks ----------------------------------------------------------------------


def _resumes(rank, world_size, strategy, folder):
    """16 samples on 2 ranks, 2 at a time, 2 at a step: 2 steps an epoch."""
    options = {"length": 16, "max_epochs": 3}
    whole = _run(strategy, folder, callbacks=[_keep(folder)], enable_checkpointing=True, **options)
    assert len(whole.losses) == 3 * 4
    assert len({x.item() for x in whole.losses}) == len(whole.losses)
    for step in (1, 2, 3):  # in the first epoch, at its end, in the second
        path = folder / "kept" / f"step={step}.ckpt"
        resumed = _run(strategy, folder, seed=1 + rank, ckpt_path=path, **options)
        _assert_same_run(resumed, whole, 2 * step)


@pytest.mark.parametrize("strategy", SHARDED)
def test_resuming_inside_an_epoch_gives_the_run_that_was_never_stopped(tmp_path, strategy):
    on_trainer_ranks(_resumes, 2, strategy, tmp_path)


class _Epochs(pl.Callback):
    def __init__(self):
        self.started = []

    def on_train_epoch_start(self, trainer, module):
        self.started.append(trainer.current_epoch)


def _resumes_twice(rank, world_size, folder):
    """At the last batch of an epoch, which is where Lightning by itself loses count."""
    options = {"enable_checkpointing": True, "max_epochs": 4}
    whole = _run(SHARDED[0], folder / "whole", callbacks=[_keep(folder / "whole")], **options)
    _run(SHARDED[0], folder, callbacks=[_keep(folder, 4)], max_steps=4, **options)
    for step, seed in ((4, 1), (8, 2)):
        path = folder / "kept" / f"step={step}.ckpt"
        callbacks = [_keep(folder, 4), epochs := _Epochs()]
        resumed = _run(
            SHARDED[0], folder, seed=seed, callbacks=callbacks, ckpt_path=path, **options
        )
        _assert_same_run(resumed, whole, 2 * step)
        assert epochs.started == list(range(step // 4, 4))


def test_a_resumed_run_can_be_stopped_and_resumed_again(tmp_path):
    on_trainer_ranks(_resumes_twice, 2, tmp_path)


def _resumes_by_steps(rank, world_size, folder):
    """``max_steps``, workers that read ahead, and validation inside of the epoch."""

    def loaders():
        train = ResumableLoader(
            _Samples(32, is_noisy=False), 2, seed=7, num_workers=2, persistent_workers=True
        )
        return {
            "loader": train,
            "loaders": {"val_dataloaders": make_loader(8, generator=torch.Generator())},
            "val_check_interval": 4,
            "max_epochs": -1,
            "max_steps": 9,
        }

    whole = _run(
        SHARDED[0], folder, callbacks=[_keep(folder)], enable_checkpointing=True, **loaders()
    )
    for step in (2, 3, 4, 7):  # 2 and 4: just before a validation
        path = folder / "kept" / f"step={step}.ckpt"
        resumed = _run(SHARDED[0], folder, seed=1 + rank, ckpt_path=path, **loaders())
        _assert_same_run(resumed, whole, 2 * step)


def test_so_do_limits_in_steps_workers_and_validation_inside_of_an_epoch(tmp_path):
    on_trainer_ranks(_resumes_by_steps, 2, tmp_path)


def _resumes_plain(rank, world_size, folder):
    """A loader that cannot be resumed, at the end of an epoch."""

    def loader():
        return DataLoader(_Samples(32), batch_size=2)

    at_end = ModelCheckpoint(folder / "kept", filename="{epoch}", save_top_k=-1)
    options = {"enable_checkpointing": True, "max_epochs": 3}
    whole = _run(SHARDED[0], folder, callbacks=[at_end], loader=loader(), **options)
    resumed = _run(
        SHARDED[0],
        folder,
        seed=1 + rank,
        loader=loader(),
        ckpt_path=folder / "kept" / "epoch=0.ckpt",
        max_epochs=3,
    )
    _assert_same_run(resumed, whole, 8)


def test_random_numbers_go_on_with_any_loader_at_the_end_of_an_epoch(tmp_path):
    on_trainer_ranks(_resumes_plain, 2, tmp_path)


# -- another number of ranks -----------------------------------------------------------------------

LENGTH = 51  # 6 global micro-batches of 8; 3 samples are left out in each epoch


def _leg(rank, world_size, strategy, folder, batch_size, accumulation, until_step, from_step):
    """A part of the run: what it read by optimizer step, and its weights."""
    model = _run(
        strategy,
        folder,
        seed=5 + rank if from_step else 0,
        model=_steady,
        loader=ResumableLoader(_Samples(LENGTH, is_noisy=False), batch_size, seed=7),
        callbacks=[_keep(folder, 2)],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=until_step,
        accumulate_grad_batches=accumulation,
        ckpt_path=folder / "kept" / f"step={from_step}.ckpt" if from_step else None,
    )
    steps = [
        _joined(model.numbers[first : first + accumulation])
        for first in range(0, len(model.numbers), accumulation)
    ]
    return steps, {name: value.double() for name, value in weights_of(model).items()}


def _joined(lists):
    return list(chain.from_iterable(lists))


def _steady():
    return _Dropping(0.0)


def _steps_of_all(results):
    """The sorted numbers of each step, over all ranks."""
    return [
        sorted(_joined(shares)) for shares in zip(*(steps for steps, _ in results), strict=True)
    ]


@pytest.mark.parametrize(
    ("strategy", "batch_size", "accumulation"),
    [
        *((strategy, 4, 2) for strategy in (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3")),
        (SHARDED[0], 2, 4),
    ],
)
def test_fewer_ranks_and_more_again_read_the_same_samples_and_train_alike(
    tmp_path, strategy, batch_size, accumulation
):
    whole = on_trainer_ranks(_leg, 4, strategy, tmp_path / "whole", 2, 2, 5, 0)
    whole_at_4 = torch.load(tmp_path / "whole" / "kept" / "step=4.ckpt", weights_only=True)
    folder = tmp_path / "parts"
    parts = [
        on_trainer_ranks(_leg, 4, strategy, folder, 2, 2, 2, 0),
        on_trainer_ranks(_leg, 2, strategy, folder, batch_size, accumulation, 4, 2),
        on_trainer_ranks(_leg, 4, strategy, folder, 2, 2, 5, 4),
    ]
    expected = _steps_of_all(whole)
    assert len(expected) == 5
    epoch = _joined(expected[:3])
    assert len(epoch) == len(set(epoch)) == LENGTH - 3
    assert _joined(_steps_of_all(part) for part in parts) == expected
    at_4 = {name: value.double() for name, value in whole_at_4["state_dict"].items()}
    torch.testing.assert_close(parts[1][0][1], at_4, atol=5e-7, rtol=0)
    torch.testing.assert_close(parts[2][0][1], whole[0][1], atol=1e-6, rtol=0)


def _misaligned(rank, world_size, folder):
    path = folder / "kept" / "step=3.ckpt"
    _run(SHARDED[0], folder, callbacks=[_keep(folder)], enable_checkpointing=True, max_steps=3)
    message = r"24 samples of the epoch were read, and a step takes 4 x 2 on each of 2 ranks.*"
    with pytest.warns(UserWarning, match=message) if rank == 0 else nullcontext():
        model = _run(SHARDED[0], folder, ckpt_path=path, accumulate_grad_batches=4)
    assert len(model.losses) == 2
    with pytest.raises(ValueError, match=r"global batch that divides the 24 samples read, got 32"):
        _run(SHARDED[0], folder, ckpt_path=path, loader=ResumableLoader(_Samples(32), 16, seed=7))
    model = _run(SHARDED[0], folder, ckpt_path=path, accumulate_grad_batches=1)
    assert len(model.losses) == 2


def test_a_position_inside_of_a_step_or_a_batch_is_told_with_the_numbers(tmp_path):
    on_trainer_ranks(_misaligned, 2, tmp_path)


def _ends_epochs(rank, world_size, folder):
    """10 samples: 2 batches of 4 on all ranks, or 5 of 2; at 8 samples only the former end."""

    def run(batch_size, name, **options):
        loader = ResumableLoader(_Samples(10, is_noisy=False), batch_size, seed=7)
        options = {"accumulate_grad_batches": 1, "max_epochs": 2, **options}
        return _run(SHARDED[0], folder / name, loader=loader, **options).numbers

    def keep(name):
        return {"callbacks": [_keep(folder / name)], "enable_checkpointing": True}

    small, large = run(1, "small", **keep("small")), run(2, "large", **keep("large"))
    at_8 = {"small": folder / "small/kept/step=4.ckpt", "large": folder / "large/kept/step=2.ckpt"}
    for limits in ({"max_epochs": 2}, {"max_epochs": -1, "max_steps": 7}):
        assert run(1, "", ckpt_path=at_8["large"], **limits)[:5] == small[5:]
        assert run(2, "", ckpt_path=at_8["small"], **limits)[:2] == large[2:]


def test_an_epoch_that_was_over_stays_over_with_another_batch(tmp_path):
    on_trainer_ranks(_ends_epochs, 2, tmp_path)


# -- random states ---------------------------------------------------------------------------------


def _draw():
    return torch.rand(()).item(), np.random.random(), random.random(), random.gauss(0, 1)


def _gathered(rank, world_size, is_same):
    seed = 0 if is_same else rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    random.gauss(0, 1)  # one more is kept for the next call
    states = random_states.collect(CPU)
    assert (states is None) == (rank > 0)
    return states, _draw()


def _taken_up(rank, world_size, states):
    random_states.restore(states, CPU)
    return _draw()


@pytest.mark.parametrize("is_same", [True, False])
def test_a_rank_goes_on_as_the_rank_of_its_number_modulo_those_that_saved(tmp_path, is_same):
    saved = run_on_ranks(_gathered, 2, is_same)
    torch.save(saved[0][0], tmp_path / "states")
    states = torch.load(tmp_path / "states", weights_only=True)
    drawn = [numbers for _, numbers in saved]
    assert (drawn[0] == drawn[1]) == is_same
    assert run_on_ranks(_taken_up, 2, states) == drawn
    assert run_on_ranks(_taken_up, 1, states) == drawn[:1]
    assert run_on_ranks(_taken_up, 3, states) == [*drawn, drawn[0]]


def _who_saves(rank, world_size, folder):
    trainer = make_trainer(SHARDED[0], folder)
    trainer.fit(seeded(_Dropping), ResumableLoader(_Samples(16), 4))
    trainer.save_checkpoint(folder / "all.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    file = torch.load(folder / "all.ckpt", weights_only=True)
    assert len(file["rng_states"]) == 2
    assert "rng_states" not in torch.load(folder / "weights.ckpt", weights_only=True)
    # A file of another strategy has none.
    ddp = make_trainer("ddp", folder)
    ddp.fit(seeded(_Dropping), ResumableLoader(_Samples(16), 4))
    ddp.save_checkpoint(folder / "ddp.ckpt")
    _run(SHARDED[0], folder, ckpt_path=folder / "ddp.ckpt", max_epochs=2)
    _run("ddp", folder, ckpt_path=folder / "all.ckpt", max_epochs=2)


def test_random_states_are_saved_with_the_state_of_a_run_and_not_with_weights_alone(tmp_path):
    on_trainer_ranks(_who_saves, 2, tmp_path)


# -- what the Trainer may do with the loader -------------------------------------------------------


def _handed(rank, world_size, folder):
    loader = ResumableLoader(_Samples(16), 4)
    trainer = make_trainer(SHARDED[0], folder)
    trainer.fit(seeded(_Dropping), loader)
    assert trainer.train_dataloader is loader
    assert len(loader) == 2
    both = CombinedLoader([loader, make_loader(16)], "min_size")
    trainer = make_trainer(SHARDED[0], folder)
    trainer.fit(seeded(_First), both)
    with pytest.raises(TypeError, match=r"expected no batch_sampler.*use a plain DataLoader"):
        make_trainer(SHARDED[0], folder).predict(seeded(_Dropping), loader)
    with (
        pytest.warns(UserWarning, match="You requested to overfit") if rank == 0 else nullcontext(),
        pytest.raises(TypeError, match=r"expected no sampler.*overfit_batches"),
    ):
        make_trainer(SHARDED[0], folder, overfit_batches=2).fit(seeded(_Dropping), loader)


class _First(_Dropping):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


def test_the_trainer_keeps_the_loader_as_it_is_or_is_refused(tmp_path):
    on_trainer_ranks(_handed, 2, tmp_path)
