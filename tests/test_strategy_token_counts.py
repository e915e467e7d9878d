"""Where the number of tokens comes from, what is logged with it, and what cannot be one."""

from dataclasses import replace
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fsdp.core.host_memory import OffloadedHome
from lightning_fsdp.strategies.token_mean import TokenMean
from tests.support.fake_device import DEVICE, entered
from tests.support.ranks import run_on_ranks
from tests.support.token_mean import LENGTHS, Sequences, Tokens, loader, reference
from tests.support.trainer import fit, on_trainer_ranks, seeded, weights_of, with_options


def _logged(rank, world_size, folder):
    _, losses = reference(world_size, 1, lr=0.0)
    trainer, _ = fit(
        "scratch_fsdp_zero3",
        folder,
        seeded(lambda: Tokens(lr=0.0)),
        loader(),
        use_distributed_sampler=False,
    )
    counts = torch.tensor(LENGTHS).view(-1, 2 * world_size).sum(1)
    expected = (torch.stack(losses) * counts).sum() / counts.sum()
    torch.testing.assert_close(trainer.callback_metrics["epoch_loss"], expected)


def test_what_is_logged_with_the_number_as_batch_size_is_the_mean_over_the_epochs_tokens(tmp_path):
    on_trainer_ranks(_logged, 2, tmp_path)


class _Counts(Tokens):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "num_tokens": self.kind(int(output["num_tokens"]))}


def _counted(rank, world_size, folder):
    weights = []
    for kind in (torch.tensor, int, np.int64, np.float32):
        model = seeded(lambda kind=kind: _Counts(kind))
        fit("scratch_fsdp_zero3", folder, model, loader(), use_distributed_sampler=False)
        weights.append(weights_of(model))
        assert all(torch.equal(value, weights[0][name]) for name, value in weights[-1].items())


def test_any_kind_of_number_is_one(tmp_path):
    on_trainer_ranks(_counted, 2, tmp_path)


# What a loss is the mean of, as a step may say it.
_KINDS = {
    "int": lambda: 7,
    "numpy": lambda: np.float32(7),
    "on the host": lambda: torch.tensor([3, 4]),
    "on the device": lambda: torch.full((2,), 7, device=DEVICE),
}


def _queued(rank, world_size):
    """By kind, what two micro-batches of a steady step wait for."""

    def step(token_mean, kind):
        token_mean.begin()
        for _ in range(2):
            token_mean.note({"loss": None, "num_tokens": kind()}, None, num_micro_batches=2)
            token_mean.weigh(torch.ones((), device=DEVICE), 2)
        token_mean.finish()

    def to_host(home, source):
        pending = start_copy(home, source)
        return replace(pending, finish=lambda: pending.finish().numel() - 1)

    # Any fake number of the host is 1; here it is to be that of problems.
    start_copy, seen = OffloadedHome.to_host, {}
    with entered() as (waits, _), mock.patch.object(OffloadedHome, "to_host", to_host):
        for name, kind in _KINDS.items():
            engine = mock.Mock(**{"gradients.shards.return_value": {}})
            token_mean = TokenMean(engine, DEVICE, None)
            token_mean._is_weighed = True  # as ranks have agreed at the first micro-batch
            for _ in range(2):
                seen[name], _ = waits.during(lambda m=token_mean, k=kind: step(m, k))
    return seen


def test_on_a_device_the_host_waits_only_for_a_number_of_the_step_before():
    (seen,) = run_on_ranks(_queued, 1, backend=None, timeout_s=600)
    assert seen == {kind: ["synchronize in host_memory.landed"] for kind in _KINDS}


class _Saves(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.current_epoch}.ckpt")


def _resumed(rank, world_size, folder):
    options = {
        "use_distributed_sampler": False,
        "accumulate_grad_batches": 2,
        "max_epochs": 2,
        "callbacks": [_Saves()],
    }
    _, straight = fit("scratch_fsdp_zero3", folder, seeded(Tokens), loader(), **options)
    _, resumed = fit(
        "scratch_fsdp_zero3",
        folder,
        seeded(Tokens, seed=1),
        loader(),
        ckpt_path=folder / "0.ckpt",
        **options,
    )
    assert len(resumed.step_losses) == len(straight.step_losses) / 2
    for name, value in weights_of(resumed).items():
        assert torch.equal(value, weights_of(straight)[name]), name


def test_a_resumed_run_comes_to_the_same_bits(tmp_path):
    on_trainer_ranks(_resumed, 2, tmp_path)


def _unweighed(rank, world_size, folder):
    class Equal(Tokens):
        def training_step(self, batch, batch_idx):
            return self.net(batch.flatten(0, 1)).square().mean()

        def on_before_optimizer_step(self, optimizer):
            assert self.trainer.strategy.mean_loss is None

    weights = []
    for name in ("ddp", "scratch_fsdp_zero3"):
        model = seeded(Equal)
        if name == "ddp":
            model.on_before_optimizer_step = model.on_after_backward = lambda *args: None
        fit(
            name,
            folder,
            model,
            DataLoader([row["x"] for row in Sequences()], batch_size=2),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
        )
        weights.append(weights_of(model))
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=1e-5)


def test_without_a_number_nothing_changes(tmp_path):
    on_trainer_ranks(_unweighed, 2, tmp_path)


class _Wrong(Tokens):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        rank = self.trainer.global_rank
        if self.how == "one rank" and rank == 1:
            return output["loss"]
        if self.how == "later" and batch_idx == 1 and rank == 1:
            return output["loss"]
        if self.how == "nan" and batch_idx == 1 and rank == 1:
            return {**output, "num_tokens": float("nan")}
        if self.how == "labels" and rank == 1:
            return {**output, "num_tokens": batch["labels"]}
        if self.how == "text":
            return {**output, "num_tokens": "12"}
        return output


def _wrong(rank, world_size, folder, how, message):
    with pytest.raises(ValueError, match=message):
        fit(
            "scratch_fsdp_zero3",
            folder,
            seeded(lambda: _Wrong(how)),
            loader(),
            use_distributed_sampler=False,
        )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("one rank", r"num_tokens: expected it on every rank or on none, got it on ranks \[0\]"),
        ("later", "rank 1: num_tokens: expected a number, as of the first micro-batch, got none"),
        ("nan", "rank 1: num_tokens: expected numbers of tokens, got nan"),
        ("labels", r"rank 1: num_tokens: expected numbers of tokens, got -100.*\(labels != -100\)"),
        ("text", "num_tokens: expected a number of tokens or a tensor"),
    ],
)
def test_what_cannot_be_a_number_of_tokens_is_refused_on_every_rank(tmp_path, how, message):
    on_trainer_ranks(_wrong, 2, tmp_path, how, message)


def _wrong_on_an_accelerator(rank, world_size, folder):
    """The host reads what was wrong in a step only at the end of the next one, or of the fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenMean, "__init__", _looking_later(TokenMean.__init__))
        for how, message, num_batches in (
            ("later", "rank 1: num_tokens: expected a number, as of the first micro-batch", 3),
            ("later", "rank 1: num_tokens: expected a number, as of the first micro-batch", 2),
            ("nan", "num_tokens: expected numbers of tokens, got a negative, NaN or infin", 3),
        ):
            model = seeded(lambda how=how: _Wrong(how))
            with pytest.raises(ValueError, match=message):
                fit(
                    "scratch_fsdp_zero3",
                    folder,
                    model,
                    loader(),
                    use_distributed_sampler=False,
                    limit_train_batches=num_batches,
                )
            assert all(weight.to_local().isfinite().all() for weight in model.parameters())
            assert len(model.step_losses) == 2, how  # the first step's, and the wrong one's


def _looking_later(init):
    def on_an_accelerator(self, *args):
        init(self, *args)
        self._looks_at_once = False

    return on_an_accelerator


def test_on_an_accelerator_every_rank_hears_of_a_wrong_number_after_the_next_step(tmp_path):
    on_trainer_ranks(_wrong_on_an_accelerator, 2, tmp_path)


def _missing(rank, world_size, folder):
    with pytest.raises(ValueError, match=r"weigh_by='tokens'.*the batch: \['counts', 'labels'"):
        fit(with_options("fsdp2_zero3", weigh_by="tokens"), folder, seeded(Tokens), loader())


def test_a_key_that_is_nowhere_is_named_with_those_that_are(tmp_path):
    on_trainer_ranks(_missing, 2, tmp_path)


class _ByHand(Tokens):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        return {"num_tokens": 3}


def _by_hand(rank, world_size, folder):
    with pytest.raises(NotImplementedError, match="'num_tokens' in training_step's dictionary"):
        fit("scratch_fsdp_zero3", folder, seeded(_ByHand), loader())
    with pytest.raises(NotImplementedError, match=r"weigh_by='counts'.*automatic_optimization"):
        fit(
            with_options("scratch_fsdp_zero3", weigh_by="counts"),
            folder,
            seeded(_ByHand),
            loader(),
        )


def test_manual_optimization_weighs_by_itself(tmp_path):
    on_trainer_ranks(_by_hand, 2, tmp_path)


def test_a_key_that_is_no_text_is_refused_at_once():
    with pytest.raises(TypeError, match="weigh_by: expected the key"):
        with_options("scratch_fsdp_zero3", weigh_by=3)
