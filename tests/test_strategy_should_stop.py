"""What one rank decides by itself, all do: to stop and to validate, where each would under DDP."""

from lightning.pytorch.callbacks import Callback

from tests.support.trainer import (
    Regressor,
    assert_like_ddp,
    make_loader,
    make_trainer,
    outcome_of,
    seeded,
)

PLACES = (
    ("on_train_batch_start", 1),
    ("on_train_batch_end", 2),  # inside of an optimizer step
    ("on_validation_end", 1),
    ("on_train_epoch_end", 3),
)


class _Stops(Callback):
    """At a place, in a batch of an epoch."""

    def __init__(self, is_told, place, batch):
        self.is_told, self.batch, self.num_validations = is_told, batch, 0
        setattr(self, place, self._arrive)

    def _arrive(self, trainer, *_args):
        is_there = trainer.fit_loop.epoch_loop.batch_idx == self.batch
        if is_there and self.is_told and not trainer.sanity_checking:
            trainer.should_stop = True

    def on_validation_start(self, trainer, pl_module):
        self.num_validations += 1


def _stopped(strategy, folder, rank):
    found = {}
    for place, batch in PLACES:
        stops = _Stops(strategy == "ddp" or rank == 1, place, batch)
        options = {"max_epochs": 2, "val_check_interval": 2, "accumulate_grad_batches": 2}
        trainer, model = make_trainer(strategy, folder, callbacks=[stops], **options), Regressor
        model = seeded(model)
        trainer.fit(model, make_loader(), make_loader(16))
        assert trainer.global_step <= 2, place
        found[place] = {**outcome_of(trainer, model), "validations": stops.num_validations}
    return found


def test_a_fit_stops_on_all_ranks_as_soon_as_on_one(tmp_path):
    assert_like_ddp(_stopped, tmp_path, timeout_s=60.0)


class _Due(Callback):
    """By its clock, the time for a validation has come after the second batch."""

    def __init__(self, is_due):
        self.is_due, self.validated_at = is_due, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.is_due and batch_idx == 1:
            trainer._last_val_time -= 3600

    def on_validation_end(self, trainer, pl_module):
        self.validated_at.append(trainer.global_step)


def _validated(strategy, folder, rank):
    due, model = _Due(strategy == "ddp" or rank == 1), seeded(Regressor)
    options = {"max_epochs": 2, "val_check_interval": {"hours": 1}, "num_sanity_val_steps": 0}
    trainer = make_trainer(strategy, folder, callbacks=[due], **options)
    trainer.fit(model, make_loader(), make_loader(16))
    assert due.validated_at == [2, 6]
    return outcome_of(trainer, model)


def test_a_validation_by_the_clock_begins_on_all_ranks_as_soon_as_on_one(tmp_path):
    assert_like_ddp(_validated, tmp_path, timeout_s=60.0)
