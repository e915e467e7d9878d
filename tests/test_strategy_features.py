"""The Trainer's features that users expect, each against DDP on the same run."""

import logging
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_fsdp import call_with
from tests.support.counting import CollectiveCounter
from tests.support.trainer import (
    SHARDED,
    AdamwRegressor,
    Regressor,
    assert_each_like_ddp,
    assert_like_ddp,
    at_both_stages,
    fit,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    outcome_of,
    seeded,
    weights_of,
    with_options,
)

# -- plain training --------------------------------------------------------------------------------
# (without more, and with accumulation, clipping by norm and bf16: test_strategy_parity.py)


def _adamw(strategy, folder, rank):
    return outcome_of(*fit(strategy, folder, seeded(AdamwRegressor), max_epochs=2))


def test_adamw_is_that_of_ddp(tmp_path):
    assert_like_ddp(_adamw, tmp_path, atol=2e-6)


def _different_seeds(strategy, folder, rank):
    model = seeded(_WithNorm, seed=rank)
    before = model.blocks[0].up.weight.detach().clone()
    if strategy != "ddp":  # which cannot broadcast it over gloo
        model.register_buffer("table", torch.full((3,), 2.0 - rank).to(torch.float8_e4m3fn))
    trainer, model = fit(strategy, folder, model)
    assert not torch.equal(before, model.blocks[0].up.weight)
    outcome = outcome_of(trainer, model)
    assert strategy == "ddp" or outcome["weights"].pop("table").float().tolist() == [2, 2, 2]
    return _without_local_statistics(strategy, outcome, rank)


def _without_local_statistics(strategy, outcome, rank):
    if strategy != "ddp":
        mine = outcome["weights"]["batch_norm.running_mean"]
        of_rank_0 = mine.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(mine, of_rank_0)
    if rank != 0:  # where DDP leaves this rank's own last update
        for name in ("running_mean", "running_var"):
            del outcome["weights"][f"batch_norm.{name}"]
    return outcome


class _WithNorm(Regressor):
    """BatchNorm, whose buffers differ by rank, and a buffer drawn at random."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(5)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x):
        return super().forward(self.batch_norm(x + self.shift))


class _ShowsTrained(Regressor):
    """Leaves out what is frozen, so that optimizers need not."""

    def parameters(self, recurse=True):
        return (p for p in super().parameters(recurse) if p.requires_grad)


def _shows_trained(strategy, folder, rank):
    model = seeded(_ShowsTrained, seed=rank)
    model.blocks[0].requires_grad_(False)
    return outcome_of(*fit(strategy, folder, model))


def test_ranks_that_were_not_seeded_alike_train_the_model_of_rank_0(tmp_path):
    assert_each_like_ddp([_different_seeds, _shows_trained], tmp_path)


def _batch_norm(strategy, folder, rank):
    trainer = make_trainer(strategy, folder, max_epochs=2)
    model = seeded(_WithNorm)
    trainer.fit(model, make_loader(), make_loader(24, seed=1))
    return _without_local_statistics(strategy, outcome_of(trainer, model), rank)


def test_validation_uses_the_running_statistics_of_rank_0(tmp_path):
    assert_like_ddp(_batch_norm, tmp_path)


def _synced_batch_norm(rank, world_size, folder):
    for strategy in ("ddp", *SHARDED):
        with pytest.raises(ValueError, match="SyncBatchNorm"):
            fit(strategy, folder, seeded(_WithNorm), sync_batchnorm=True)


def test_sync_batchnorm_is_not_ignored(tmp_path):
    """torch has its layers for GPUs only, and says so on CPU; to train on means that none came."""
    on_trainer_ranks(_synced_batch_norm, 2, tmp_path)


# -- accumulation ----------------------------------------------------------------------------------


def _accumulate(strategy, folder, rank):
    trainer, model = fit(
        strategy, folder, loader=make_loader(40), accumulate_grad_batches=2, max_epochs=2
    )
    assert trainer.global_step == 6  # five batches per rank: two, two, and the last alone
    return outcome_of(trainer, model)


def _reductions(strategy, folder, batches_per_step):
    """Gradient reductions in one optimizer step, counted as they leave for the network."""
    counters = []

    class Counts(pl.Callback):
        def on_before_backward(self, trainer, module, loss):
            counters.append(CollectiveCounter())
            counters[-1].__enter__()

        def on_after_backward(self, trainer, module):
            counters[-1].__exit__(None, None, None)

    trainer = make_trainer(
        strategy, folder, accumulate_grad_batches=batches_per_step, callbacks=[Counts()]
    )
    trainer.fit(seeded(Regressor), make_loader(8 * batches_per_step))
    assert trainer.global_step == 1
    return sum(counter.num_reductions(2) for counter in counters)


def _count_reductions(rank, world_size, folder, names):
    for name in names:
        if name.startswith("fsdp2"):  # DTensor plans a sum on fake tensors, which take no counter
            fit(with_options(name, accumulation="sum"), folder, accumulate_grad_batches=2)
        for accumulation, expected in (("local", 1), ("sum", 4)):
            counts = []
            for batches_per_step in (1, 4):
                strategy = with_options(name, accumulation=accumulation)
                counts.append(_reductions(strategy, folder, batches_per_step))
            assert counts[0] > 0, "the profiler no longer shows reductions under these names"
            assert counts[1] == expected * counts[0], (name, accumulation, counts)


@pytest.mark.flat("counts what a group of all ranks reduces")
@pytest.mark.parametrize("engine", ["scratch", "fsdp1", "fsdp2"])
def test_accumulation_skips_communication_unless_told_to_sum(tmp_path, engine):
    names = [name for name in SHARDED if name.startswith(engine)]
    on_trainer_ranks(_count_reductions, 2, tmp_path, names)


def _choose_comm(rank, world_size, folder):
    outcomes, said = [], []
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.info = lambda message, *_, **__: said.append(message)
    for comm in ("direct", "pairs"):
        strategy = with_options("scratch_fsdp", comm=comm)
        outcomes.append(outcome_of(*fit(strategy, folder, seeded(AdamwRegressor))))
    torch.testing.assert_close(outcomes[0], outcomes[1], atol=0, rtol=0)
    return [message for message in said if "Ranks exchange" in message]


@pytest.mark.flat("one rank alone exchanges nothing")
def test_comm_says_how_data_moves_and_one_line_tells_it(tmp_path):
    said, nothing = on_trainer_ranks(_choose_comm, 2, tmp_path)
    assert not nothing
    assert said == [
        "Ranks exchange shards by reading each other's memory.",
        "Ranks exchange shards by sending to each other in pairs.",
    ]


@at_both_stages
def _accumulate_by_sum(strategy, folder, rank):
    return _accumulate(with_options(strategy, accumulation="sum"), folder, rank)


def test_accumulation_by_sum_is_that_of_ddp(tmp_path):
    assert_like_ddp(_accumulate_by_sum, tmp_path)


# -- clipping --------------------------------------------------------------------------------------


class _LeavesOut(Regressor):
    """The last micro-batch of every second step."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 4 == 3 else super().training_step(batch, batch_idx)


def _left_out(rank, world_size, folder):
    def weights(strategy):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*`training_step` returned `None`")
            model = seeded(_LeavesOut)
            return weights_of(fit(strategy, folder, model, accumulate_grad_batches=2)[1])

    expected = weights("ddp")
    for strategy in SHARDED[::2]:
        by_sum = weights(with_options(strategy, accumulation="sum"))
        torch.testing.assert_close(by_sum, expected, atol=1e-6, rtol=1e-5)
        with pytest.raises(RuntimeError, match=r"expected (a )?reduced gradient"):
            weights(strategy)


def test_a_step_whose_last_micro_batch_is_left_out_is_refused_or_that_of_ddp(tmp_path):
    """On one rank: on more, Lightning refuses it."""
    on_trainer_ranks(_left_out, 1, tmp_path)


def _clip_by_value(strategy, folder, rank):
    trainer, model = fit(strategy, folder, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return outcome_of(trainer, model)


def _clip_by_hand(strategy, folder, rank):
    class ClipsItself(Regressor):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **kwargs):
            self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="norm")

    return outcome_of(*fit(strategy, folder, seeded(ClipsItself)))


@pytest.mark.quick
def test_clipping_by_value_and_by_hand_is_that_of_ddp(tmp_path):
    scenarios = [_clip_by_value, _clip_by_hand]
    assert_each_like_ddp(scenarios, tmp_path, atol=2e-6)


@at_both_stages
@not_under("fsdp1", reason="p.grad is None where this rank has no element")
def _gradients_in_hook(strategy, folder, rank):
    seen = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            for name, parameter in module.named_parameters():
                gradient = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                seen.append((name, whole.clone()))

        def on_after_backward(self, trainer, module):
            gradient = module.head.weight.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            seen.append(("after backward", whole.clone()))

    fit(strategy, folder, callbacks=[Watch()])
    return {f"{index} {name}": value for index, (name, value) in enumerate(seen)}


def test_gradients_are_final_in_the_hooks_before_the_step(tmp_path):
    assert_like_ddp(_gradients_in_hook, tmp_path)


def _grad_norm(strategy, folder, rank):
    """What Lightning's ``grad_norm`` says under DDP, by the way that is right everywhere."""
    seen = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if strategy == "ddp":
                norms = grad_norm(module, 2)
                total = norms.pop("grad_2.0_norm_total")
                each = {name.removeprefix("grad_2.0_norm/"): norm for name, norm in norms.items()}
            else:
                gradients = trainer.strategy.gradients
                total = gradients.norm()
                each = {name: whole.norm() for name, whole in gradients.full()}
                if strategy.startswith("scratch"):
                    said = grad_norm(module, 2)
                    assert said.pop("grad_2.0_norm_total") == pytest.approx(float(total), rel=1e-6)
                    for name, norm in said.items():
                        whole_norm = each[name.removeprefix("grad_2.0_norm/")]
                        assert float(norm) == pytest.approx(float(whole_norm), rel=1e-6), name
                elif strategy.startswith("fsdp2"):  # FSDP1 gives the norm of this rank's own
                    with pytest.raises(Exception, match="not allocated"):
                        grad_norm(module, 2)
            seen.append({"total": total, **each})

    fit(strategy, folder, callbacks=[Watch()], accumulate_grad_batches=2)
    return {"seen": seen}


def test_grad_norm_is_that_of_ddp(tmp_path):
    assert_like_ddp(_grad_norm, tmp_path)


class _Penalised(Regressor):
    """A term of the loss reads weights outside of their forward; its factor differs by rank."""

    def loss(self, batch):
        factor = 0.01 * (1 + dist.get_rank())
        terms = [
            call_with(layer, lambda m=layer: sum(p.abs().sum() for p in m.parameters()))
            for layer in (*self.blocks, self.head)
        ]
        return super().loss(batch) + factor * sum(terms)


def _penalised(strategy, folder, rank):
    model = seeded(_Penalised)
    _trainer, model = fit(strategy, folder, model, accumulate_grad_batches=2)
    return {"weights": weights_of(model)}


def test_a_term_of_the_loss_that_reads_weights_equals_ddp(tmp_path):
    assert_like_ddp(_penalised, tmp_path)


# -- precision -------------------------------------------------------------------------------------


def _fused_clipped_mixed(strategy, folder, rank):
    # Lightning refuses the three together, so DDP runs the same without the fused kernel.
    model = seeded(AdamwRegressor)
    model.fused = strategy != "ddp"
    _trainer, model = fit(
        strategy, folder, model, precision="bf16-mixed", gradient_clip_val=0.1, max_epochs=2
    )
    return {"weights": weights_of(model), "losses": list(model.losses)}


def test_fused_adamw_with_clipping_and_bf16_mixed_is_near_ddp(tmp_path):
    assert_like_ddp(_fused_clipped_mixed, tmp_path, atol=2e-2, rtol=2e-2)
