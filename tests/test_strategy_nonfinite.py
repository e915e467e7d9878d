"""Gradients that are not finite raise on every rank, with where they began."""

import warnings

import pytest
import torch

from lightning_fsdp import GradientAccessProbe, NonfiniteGradient
from tests.support.cases import each_on_trainer_ranks
from tests.support.nonfinite import Broken, run_broken
from tests.support.trainer import (
    SHARDED,
    AdamwRegressor,
    fit,
    make_loader,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

_MESSAGES = {
    "loss": r"local gradient of 'head\.(weight|bias)' \(unit 'head'\), on rank 1 in micro-batch 1, "
    r"the first in the backward\. The loss was not finite on rank 1 in micro-batches 1\.",
    "backward": r"local gradient of 'blocks\.1\.down\.(weight|bias)' \(unit 'blocks\.1'\), on rank "
    r"1 in micro-batch 1, the first in the backward\. Not finite either",
    "activation": r"local gradient of 'head\.(weight|bias)' .* on rank 1 in micro-batch 1",
    "local": r"local gradient of 'blocks\.0\.up\.weight' \(unit 'blocks\.0'\), on rank 1 in "
    r"micro-batch 1, the first in the backward\. No weight",
    "reduced": r"reduction of 'blocks\.0\.down\.weight' \(unit 'blocks\.0'\), in the slices of "
    r"ranks \[1\]: the local gradients were finite on every rank\. No weight",
    "weight": r"weight of 'blocks\.0\.down\.weight' \(unit 'blocks\.0'\), in the slices of ranks "
    r"\[1\]\.",
}


def _names_for(where, clips):
    """That a norm is asked for is nothing to a place that is found once it is known that there is
    one: each is there under the core, and two under each of torch's engines.
    """
    if clips:
        return SHARDED[::2] if where in ("loss", "reduced") else SHARDED[:1]
    return SHARDED if where in ("local", "loss") else (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero3")


def raised_on_ranks(rank, world_size, where, folder, options):
    for name in _names_for(where, options):
        with pytest.raises(NonfiniteGradient, match=_MESSAGES[where]) as caught:
            run_broken(name, folder, where, "raise", **options)
        if where == "loss":  # the same text on every rank
            texts = [None] * world_size
            torch.distributed.all_gather_object(texts, str(caught.value))
            assert len(set(texts)) == 1


@pytest.mark.parametrize("clips", [{}, {"gradient_clip_val": 0.1}], ids=["", "clipped"])
def test_every_rank_raises_and_names_where_it_began(tmp_path, clips):
    each_on_trainer_ranks(raised_on_ranks, 2, _MESSAGES, tmp_path, clips, timeout_s=250)


def _in_one_replica(rank, world_size, folder):
    for name in ("scratch_fsdp_zero3", "scratch_fsdp_zero2", "fsdp2_zero3"):
        with pytest.raises(NonfiniteGradient, match=_MESSAGES["reduced"]) as caught:
            run_broken(name, folder, "reduced", "raise", shard_size=1)
        assert ("got others in another replica" in str(caught.value)) == (rank == 0)


def test_what_one_replica_alone_has_is_found_on_every_rank(tmp_path):
    """As the norm is one replica's, the other would go on, and wait for the first."""
    on_trainer_ranks(_in_one_replica, 2, tmp_path)


def _two_ranks(rank, world_size, folder):
    """Rank 0 breaks one gradient that comes late in the backward, rank 1 one that comes early."""

    class Both(AdamwRegressor):
        def on_train_start(self):
            self.trainer.strategy.gradients.on_local(self._break)

        def _break(self, name, gradient, micro_batch):
            if name == ("blocks.0.up.weight", "blocks.1.down.weight")[rank]:
                gradient.view(-1)[0] = float("nan")

    for name in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        with pytest.raises(
            NonfiniteGradient, match=r"gradient of 'blocks\.1\.down\.weight' .* rank 1"
        ):
            fit(with_options(name, on_nonfinite="raise"), folder, seeded(Both), make_loader(8))


def test_the_first_in_the_backward_is_named_whichever_rank_has_it(tmp_path):
    on_trainer_ranks(_two_ranks, 2, tmp_path)


def _activation(rank, world_size, folder):
    for name in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        with pytest.raises(
            NonfiniteGradient,
            match=r"first activation: the output of 'blocks\.1\.up' \(\w*Linear\), on rank 1 in "
            r"micro-batch 1\.",
        ):
            run_broken(
                name, folder, "activation", "raise", callbacks=[GradientAccessProbe(steps=[99])]
            )


def test_with_the_probe_the_activation_is_named_too(tmp_path):
    on_trainer_ranks(_activation, 2, tmp_path)


def _again(rank, world_size, folder):
    class Again(AdamwRegressor):
        """Clips a gradient that is not finite, and steps with another one."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch) * float("nan"))
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = with_options("scratch_fsdp_zero3", on_nonfinite="skip")
        _, model = fit(strategy, folder, seeded(Again), make_loader(8))
    before = seeded(Again).state_dict()
    assert all(not torch.equal(w, before[name]) for name, w in weights_of(model).items())


def test_what_was_found_of_gradients_is_forgotten_with_the_next_backward(tmp_path):
    on_trainer_ranks(_again, 2, tmp_path)


def _unlooked(rank, world_size, folder):
    _, model = fit(
        "scratch_fsdp_zero3",
        folder,
        seeded(lambda: Broken("local")),
        make_loader(48),
        accumulate_grad_batches=2,
    )
    assert not all(w.isfinite().all() for w in weights_of(model).values())
    return True


def test_without_the_option_nothing_looks(tmp_path):
    on_trainer_ranks(_unlooked, 2, tmp_path)


def _no_anomaly(rank, world_size, folder):
    with pytest.raises(NonfiniteGradient, match=_MESSAGES["reduced"]):
        run_broken("scratch_fsdp_zero3", folder, "reduced", "raise", detect_anomaly=True)


def test_detect_anomaly_goes_with_it(tmp_path):
    on_trainer_ranks(_no_anomaly, 2, tmp_path)


def test_another_value_is_refused_at_once():
    with pytest.raises(ValueError, match="on_nonfinite: expected 'raise'"):
        with_options("scratch_fsdp_zero3", on_nonfinite="ignore")
