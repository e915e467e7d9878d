"""Every Trainer feature that users expect, each against DDP on the same run."""

import copy
import io
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_fsdp import FSDP1Strategy, ScratchFSDPStrategy
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from tests.support.counting import CollectiveCounter
from tests.support.trainer import (
    SHARDED,
    Block,
    Regressor,
    assert_like_ddp,
    make_loader,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)


def _fit(strategy, folder, model=None, loader=None, ckpt_path=None, **options):
    model = model or seeded(Regressor)
    trainer = make_trainer(strategy, folder, **options)
    trainer.fit(model, loader or make_loader(), ckpt_path=ckpt_path)
    return trainer, model


def _outcome(trainer, model):
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    return {"weights": weights_of(model), "losses": list(model.losses), "metrics": metrics}


# -- plain training --------------------------------------------------------------------------------
# (without more, and with accumulation, clipping by norm and bf16: test_strategy_parity.py)


class _Adamw(Regressor):
    fused = False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=self.fused)


def _adamw(strategy, folder, rank):
    return _outcome(*_fit(strategy, folder, seeded(_Adamw), max_epochs=2))


def test_adamw_is_that_of_ddp(tmp_path):
    assert_like_ddp(_adamw, tmp_path, atol=2e-6)


def _different_seeds(strategy, folder, rank):
    model = seeded(_WithNorm, seed=rank)
    before = model.blocks[0].up.weight.detach().clone()
    trainer, model = _fit(strategy, folder, model)
    assert not torch.equal(before, model.blocks[0].up.weight)
    return _without_local_statistics(strategy, _outcome(trainer, model), rank)


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


def test_ranks_that_were_not_seeded_alike_train_the_model_of_rank_0(tmp_path):
    assert_like_ddp(_different_seeds, tmp_path)


def _batch_norm(strategy, folder, rank):
    trainer = make_trainer(strategy, folder, max_epochs=2)
    model = seeded(_WithNorm)
    trainer.fit(model, make_loader(), make_loader(24, seed=1))
    return _without_local_statistics(strategy, _outcome(trainer, model), rank)


def test_validation_uses_the_running_statistics_of_rank_0(tmp_path):
    assert_like_ddp(_batch_norm, tmp_path)


# -- accumulation ----------------------------------------------------------------------------------


def _accumulate(strategy, folder, rank):
    trainer, model = _fit(
        strategy, folder, loader=make_loader(40), accumulate_grad_batches=2, max_epochs=2
    )
    assert trainer.global_step == 6  # five batches per rank: two, two, and the last alone
    return _outcome(trainer, model)


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
            _fit(with_options(name, accumulation="sum"), folder, accumulate_grad_batches=2)
        for accumulation, expected in (("local", 1), ("sum", 4)):
            counts = []
            for batches_per_step in (1, 4):
                strategy = with_options(name, accumulation=accumulation)
                counts.append(_reductions(strategy, folder, batches_per_step))
            assert counts[0] > 0, "the profiler no longer shows reductions under these names"
            assert counts[1] == expected * counts[0], (name, accumulation, counts)


@pytest.mark.parametrize("engine", ["scratch", "fsdp1", "fsdp2"])
def test_accumulation_skips_communication_unless_told_to_sum(tmp_path, engine):
    names = [name for name in SHARDED if name.startswith(engine)]
    on_trainer_ranks(_count_reductions, 2, tmp_path, names)


def _accumulate_by_sum(strategy, folder, rank):
    return _accumulate(with_options(strategy, accumulation="sum"), folder, rank)


def test_accumulation_by_sum_is_that_of_ddp(tmp_path):
    assert_like_ddp(_accumulate_by_sum, tmp_path)


# -- offloading ------------------------------------------------------------------------------------


def _offloaded(strategy, folder, rank, **options):
    """Two fits, the second from the first one's checkpoint."""
    for max_epochs in (1, 2):
        trainer, model = _fit(
            with_options(strategy, cpu_offload=True, **options),
            folder,
            seeded(_Adamw),
            ckpt_path=folder / "first.ckpt" if max_epochs == 2 else None,
            max_epochs=max_epochs,
            gradient_clip_val=0.05,
            accumulate_grad_batches=2,
        )
        trainer.save_checkpoint(folder / "first.ckpt")
    return _outcome(trainer, model)


def _offloaded_with_sums(strategy, folder, rank):
    return _offloaded(strategy, folder, rank, accumulation="sum")


def _offloads(rank, world_size, folder):
    seen = []

    class Looks(Regressor):
        def on_before_optimizer_step(self, optimizer):
            homes = {p.spec.home for p in self.parameters() if hasattr(p, "spec")}
            seen.append([home.traffic["to_host"].calls for home in homes if home.is_offloaded])

    _fit(ScratchFSDPStrategy(cpu_offload=True), folder, seeded(Looks))
    return seen


@pytest.mark.parametrize("scenario", [_offloaded, _offloaded_with_sums])
def test_an_offloaded_run_and_its_checkpoint_are_those_of_ddp(tmp_path, scenario):
    assert_like_ddp(scenario, tmp_path)


def _offloaded_sums_on_an_accelerator(rank, world_size, folder):
    class AsOnCuda(FSDP1Engine):
        def before_backward(self):
            self._is_offloaded = True
            super().before_backward()

    for accumulation in ("local", "sum"):
        strategy = FSDP1Strategy(cpu_offload=True, accumulation=accumulation)
        strategy.engine.__class__ = AsOnCuda
        expected = (
            pytest.raises(NotImplementedError, match=r"'.*weight' has a reduced gradient.*'local'")
            if accumulation == "sum"
            else nullcontext()
        )
        with expected:
            _fit(strategy, folder, accumulate_grad_batches=2)


def test_sums_that_fsdp1_would_lose_when_it_offloads_are_refused(tmp_path):
    """torch copies each reduced gradient over the one on the host; seen in its source."""
    on_trainer_ranks(_offloaded_sums_on_an_accelerator, 2, tmp_path)


def test_cpu_offload_brings_each_reduced_gradient_to_the_host(tmp_path):
    for seen in on_trainer_ranks(_offloads, 2, tmp_path):
        calls = [calls for (calls,) in seen]
        assert calls[0] > 0
        assert calls == [calls[0] * (step + 1) for step in range(len(calls))]


# -- clipping --------------------------------------------------------------------------------------


def _clip_by_value(strategy, folder, rank):
    trainer, model = _fit(strategy, folder, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return _outcome(trainer, model)


def _clip_by_hand(strategy, folder, rank):
    class ClipsItself(Regressor):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **kwargs):
            self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="norm")

    return _outcome(*_fit(strategy, folder, seeded(ClipsItself)))


@pytest.mark.parametrize("scenario", [_clip_by_value, _clip_by_hand])
def test_clipping_by_value_and_by_hand_is_that_of_ddp(tmp_path, scenario):
    assert_like_ddp(scenario, tmp_path, atol=2e-6)


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

    _fit(strategy, folder, callbacks=[Watch()])
    return {f"{index} {name}": value for index, (name, value) in enumerate(seen)}


def test_gradients_are_final_in_the_hooks_before_the_step(tmp_path):
    assert_like_ddp(_gradients_in_hook, tmp_path)


def _grad_norm(strategy, folder, rank):
    """What Lightning's ``grad_norm`` says under DDP, by the way that is right under sharding."""
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
                if not strategy.startswith("fsdp1"):  # where it gives the norm of this rank's own
                    with pytest.raises(Exception, match=r"whole tensor|not allocated"):
                        grad_norm(module, 2)
            seen.append({"total": total, **each})

    _fit(strategy, folder, callbacks=[Watch()], accumulate_grad_batches=2)
    return {"seen": seen}


def test_grad_norm_is_that_of_ddp_by_access_and_refused_where_it_can_be(tmp_path):
    assert_like_ddp(_grad_norm, tmp_path)


# -- precision -------------------------------------------------------------------------------------


def _fused_clipped_mixed(strategy, folder, rank):
    # Lightning refuses the three together, so DDP runs the same without the fused kernel.
    model = seeded(_Adamw)
    model.fused = strategy != "ddp"
    _trainer, model = _fit(
        strategy, folder, model, precision="bf16-mixed", gradient_clip_val=0.1, max_epochs=2
    )
    return {"weights": weights_of(model), "losses": list(model.losses)}


def test_fused_adamw_with_clipping_and_bf16_mixed_is_near_ddp(tmp_path):
    assert_like_ddp(_fused_clipped_mixed, tmp_path, atol=2e-2, rtol=2e-2)


# -- evaluation ------------------------------------------------------------------------------------


def _evaluate_around_fit(strategy, folder, rank):
    trainer = make_trainer(strategy, folder, num_sanity_val_steps=2)
    model = seeded(Regressor)
    loader, other = make_loader(24, seed=1), make_loader(16, seed=2)
    outcome = {"before": trainer.validate(model, loader, verbose=False)}
    outcome["test before"] = trainer.test(model, other, verbose=False)
    outcome["predict before"] = trainer.predict(model, other)
    trainer.fit(model, make_loader(), loader)
    outcome["fit"] = _outcome(trainer, model)
    outcome["after"] = trainer.validate(model, loader, verbose=False)
    outcome["test after"] = trainer.test(model, other, verbose=False)
    outcome["predict after"] = trainer.predict(model, other)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_loader(), loader)
    assert trainer.global_step == 8
    outcome["second fit"] = _outcome(trainer, model)
    outcome["plain forward"] = model(torch.ones(2, 5)).detach()
    return outcome


def test_validate_test_and_predict_before_and_after_fit_and_a_second_fit(tmp_path):
    assert_like_ddp(_evaluate_around_fit, tmp_path)


def _given_back(rank, world_size, folder):
    for strategy in SHARDED:
        model = seeded(Regressor)
        model.head.weight.mark = "mine"
        parameters = dict(model.named_parameters())
        structure = repr(model)
        trainer, _ = _fit(strategy, folder, model)
        assert type(model) is Regressor
        assert repr(model) == structure
        for module in model.modules():
            assert not module._forward_pre_hooks
            assert not module._forward_hooks
            assert not any("fsdp" in name for name in vars(module))
        for name, parameter in model.named_parameters():
            assert parameter is parameters[name]
            assert type(parameter) is nn.Parameter
            assert parameter.is_leaf
        assert vars(model.head.weight) == {"mark": "mine"}
        assert model.device == torch.device("cpu")
        state = trainer.optimizers[0].state[model.head.weight]
        if strategy.startswith("scratch"):
            assert type(state["momentum_buffer"]).__name__ == "ShardedTensor"
        copy.deepcopy(model).head.weight.sum().backward()
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)


def test_the_module_is_given_back_as_it_was(tmp_path):
    on_trainer_ranks(_given_back, 2, tmp_path)


class _FailsOnce(Regressor):
    fails_at = ("forward", 1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if (self.fails_at, batch_idx) == (("forward", 1), 1):
            self.fails_at = None
            raise ValueError("once")
        return loss

    def on_after_backward(self):
        if self.fails_at == ("backward", 1) and len(self.losses) == 2:
            self.fails_at = None
            raise ValueError("once")


def _goes_on(strategy, folder, rank):
    outcome = {}
    for place in ("forward", "backward"):
        model = seeded(_FailsOnce)
        model.fails_at = (place, 1)
        trainer = make_trainer(strategy, folder)
        with pytest.raises(ValueError, match="once"):
            trainer.fit(model, make_loader())
        trainer = make_trainer(strategy, folder)
        trainer.fit(model, make_loader())
        outcome[place] = _outcome(trainer, model)
    return outcome


def test_after_an_exception_the_same_module_trains_on(tmp_path):
    assert_like_ddp(_goes_on, tmp_path)


def _new_trainer_same_model(strategy, folder, rank):
    _, model = _fit(strategy, folder)
    model(torch.ones(2, 5)).sum().backward()  # gradients of the user's own are no obstacle
    return _outcome(*_fit(strategy, folder, model))


def test_a_trained_module_can_be_given_to_a_new_trainer(tmp_path):
    assert_like_ddp(_new_trainer_same_model, tmp_path)


def _inference_mode_is_off(rank, world_size, folder):
    seen = []

    class Watch(Regressor):
        def validation_step(self, batch, batch_idx):
            seen.append(torch.is_inference_mode_enabled())
            super().validation_step(batch, batch_idx)

    # Only gloo makes Lightning avoid inference mode by itself; without that it would be on.
    import lightning.pytorch.loops.utilities as loops

    loops._distributed_is_initialized = lambda: False
    model = seeded(Watch)
    for strategy, expected in (("ddp", True), *((name, False) for name in SHARDED)):
        seen.clear()
        trainer = make_trainer(strategy, folder)
        trainer.validate(model, make_loader(), verbose=False)
        assert set(seen) == {expected}, strategy
    trainer.fit(model, make_loader())


def test_evaluation_leaves_no_inference_tensors(tmp_path):
    on_trainer_ranks(_inference_mode_is_off, 2, tmp_path)


# -- several optimizers, by hand -------------------------------------------------------------------


class _Gan(pl.LightningModule):
    """Two networks, two optimizers, a parameter of its own; toggled, clipped, accumulated."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        self.critic = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.critic(self.generator(x)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        fake = self.generator(x).detach()
        critic_loss = F.softplus(self.critic(fake)).mean() + F.softplus(-self.critic(y)).mean()
        second.zero_grad()
        self.manual_backward(critic_loss)
        second.step()
        self.untoggle_optimizer(second)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.losses += [loss.detach(), critic_loss.detach()]

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=0.02)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        return [first, second], [
            torch.optim.lr_scheduler.ExponentialLR(first, 0.9),
            torch.optim.lr_scheduler.ExponentialLR(second, 0.8),
        ]


@not_under("fsdp1", reason="refuses two optimizers by hand")
def _gan(strategy, folder, rank):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    model = seeded(_Gan)
    trainer = make_trainer(strategy, folder, max_epochs=2)
    trainer.fit(model, make_loader())
    assert trainer.global_step == 16
    return {"weights": weights_of(model), "losses": model.losses}


def test_two_optimizers_by_hand_with_toggling_are_those_of_ddp(tmp_path):
    assert_like_ddp(_gan, tmp_path, atol=3e-6)


class _ByHand(Regressor):
    """Accumulates over two batches and steps inside ``training_step``."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            loss = self.loss(batch)
            self.manual_backward(loss / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # the new weights must be seen at once, the module's own as well
                self.losses.append(self.loss(batch))
        self.losses.append(loss.detach())


def _by_hand(strategy, folder, rank, kind=_ByHand):
    trainer, model = _fit(strategy, folder, seeded(kind))
    assert trainer.global_step == 2
    return {"weights": weights_of(model), "losses": model.losses}


class _OwnsByHand(_ByHand):
    """Has a parameter itself, and uses it right after the step, without a call in between."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x):
        return super().forward(x) * self.scale

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.losses.append(self.scale.detach().clone())


@not_under("fsdp1", "fsdp2", reason="refuse own parameters with manual optimization")
def _owns_by_hand(strategy, folder, rank):
    return _by_hand(strategy, folder, rank, _OwnsByHand)


@pytest.mark.parametrize("scenario", [_by_hand, _owns_by_hand])
def test_accumulation_by_hand_is_that_of_ddp(tmp_path, scenario):
    assert_like_ddp(scenario, tmp_path)


def _synced_batch_norm(rank, world_size, folder):
    for strategy in ("ddp", *SHARDED):
        with pytest.raises(ValueError, match="SyncBatchNorm"):
            _fit(strategy, folder, seeded(_WithNorm), sync_batchnorm=True)


def test_sync_batchnorm_is_not_ignored(tmp_path):
    """torch has its layers for GPUs only, and says so on CPU; to train on means that none came."""
    on_trainer_ranks(_synced_batch_norm, 2, tmp_path)


# -- schedulers and callbacks ----------------------------------------------------------------------


class _Scheduled(Regressor):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class _Plateau(Regressor):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


def _schedulers(strategy, folder, rank):
    outcome = {}
    for kind in (_Scheduled, _Plateau):
        trainer = make_trainer(strategy, folder, max_epochs=3)
        model = seeded(kind)
        trainer.fit(model, make_loader(), make_loader(16, seed=1))
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        assert rates[0] < 0.1
        outcome[kind.__name__] = {**_outcome(trainer, model), "rates": rates}
    return outcome


def test_learning_rate_schedules_are_those_of_ddp(tmp_path):
    assert_like_ddp(_schedulers, tmp_path)


def _early_stopping(strategy, folder, rank):
    stopping = EarlyStopping("val_loss", patience=1, min_delta=0.3)
    trainer = make_trainer(strategy, folder, max_epochs=20, callbacks=[stopping])
    model = seeded(Regressor)
    trainer.fit(model, make_loader(), make_loader(16, seed=1))
    assert 0 < trainer.current_epoch < 20
    return {**_outcome(trainer, model), "epochs": trainer.current_epoch}


def test_early_stopping_is_that_of_ddp(tmp_path):
    assert_like_ddp(_early_stopping, tmp_path)


# -- kinds of modules ------------------------------------------------------------------------------


class _DecayByShape(Regressor):
    """The usual two groups: matrices decay, vectors do not. Wrong shapes would move every one."""

    def configure_optimizers(self):
        parameters = list(self.parameters())
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        assert (len(matrices), len(vectors)) == (6, 10)
        assert self.head.weight.shape == (3, 7)
        self.num_elements = sum(p.numel() for p in parameters)
        groups = [
            {"params": matrices, "weight_decay": 0.5},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


def _decay_by_shape(strategy, folder, rank):
    trainer, model = _fit(strategy, folder, seeded(_DecayByShape))
    return {**_outcome(trainer, model), "num_elements": model.num_elements}


class _Configured(Regressor):
    """Layers made in ``configure_model``, under the strategy's own context."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.lr, self.losses, self.inlet = 0.05, [], None

    def configure_model(self):
        if self.inlet is None:
            torch.manual_seed(5)
            self.inlet = nn.Linear(5, 7)
            self.blocks = nn.ModuleList(Block(7) for _ in range(3))
            self.head = nn.Linear(7, 3)


def _configure_model(strategy, folder, rank):
    trainer, model = _fit(strategy, folder, seeded(_Configured))
    trainer.validate(model, make_loader(), verbose=False)
    return _outcome(trainer, model)


class _ConfiguredOnMeta(_Configured):
    """The same without values: sharding draws those that DDP's module was built with."""

    def configure_model(self):
        is_whole = isinstance(self.trainer.strategy, DDPStrategy)
        with torch.device("cpu" if is_whole else "meta"):
            super().configure_model()
        assert self.head.weight.is_meta is not is_whole


def _configure_on_meta(strategy, folder, rank):
    trainer, model = _fit(strategy, folder, seeded(_ConfiguredOnMeta))
    return _outcome(trainer, model)


class _Frozen(Regressor):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.bias.requires_grad_(False)
        self.head.weight.requires_grad_(False)


def _frozen(strategy, folder, rank):
    model = seeded(_Frozen)
    frozen = model.blocks[0].up.weight.detach().clone()
    trainer, model = _fit(strategy, folder, model)
    assert torch.equal(model.blocks[0].up.weight, frozen)
    assert not model.head.weight.requires_grad
    assert model.head.bias.requires_grad
    return _outcome(trainer, model)


class _Tied(pl.LightningModule):
    """An embedding whose weight is also that of the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.losses = []

    def training_step(self, batch, batch_idx):
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch.roll(-1, 1).flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _token_loader():
    tokens = torch.randint(0, 11, (32, 5), generator=torch.Generator().manual_seed(3))
    return DataLoader(tokens, batch_size=4)


def _tied(strategy, folder, rank):
    trainer, model = _fit(strategy, folder, seeded(_Tied), _token_loader())
    assert model.head.weight is model.embedding.weight
    trainer, model = _fit(strategy, folder, model, _token_loader())
    assert model.head.weight is model.embedding.weight
    return _outcome(trainer, model)


class _OwnsParameters(Regressor):
    """Uses a parameter of its own before, in and after its forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.shift = nn.Parameter(torch.linspace(0, 1, 5))

    def forward(self, x):
        return super().forward(x) * self.scale

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x + self.shift) + self.scale * self.shift.sum(), y)


def _owns_parameters(strategy, folder, rank):
    trainer = make_trainer(strategy, folder)
    model = seeded(_OwnsParameters)
    trainer.fit(model, make_loader(), make_loader(16, seed=1))
    return _outcome(trainer, model)


class _Checkpointed(Regressor):
    """Recomputes its blocks in the backward: what the refusal of the option recommends."""

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def _checkpointed(strategy, folder, rank):
    return _outcome(*_fit(strategy, folder, seeded(_Checkpointed)))


class _Thawed(Regressor):
    """Freezes and thaws while it trains: what the refusal of the finetuning callback recommends."""

    def on_train_epoch_start(self):
        self.blocks.requires_grad_(self.current_epoch != 1)


def _thawed(strategy, folder, rank):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    trainer, model = _fit(strategy, folder, seeded(_Thawed), max_epochs=3)
    return _outcome(trainer, model)


@pytest.mark.parametrize(
    "scenario",
    [
        _decay_by_shape,
        _configure_model,
        _configure_on_meta,
        _frozen,
        _tied,
        _owns_parameters,
        _checkpointed,
        _thawed,
    ],
)
def test_kinds_of_modules_train_as_with_ddp(tmp_path, scenario):
    assert_like_ddp(scenario, tmp_path, atol=3e-6)


class _Sampled(Regressor):
    """Logs what it was given, summed over ranks only on request."""

    def training_step(self, batch, batch_idx):
        first = batch[0][0, 0]
        self.log("synced", first, sync_dist=True, on_step=True, on_epoch=True)
        self.log("summed", first, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("local", first, on_step=False, on_epoch=True)
        self.gathered = self.all_gather(first)
        return super().training_step(batch, batch_idx)


def _logging(strategy, folder, rank):
    trainer, model = _fit(strategy, folder, seeded(_Sampled))
    return {**_outcome(trainer, model), "gathered": model.gathered}


def test_ranks_get_different_data_and_logs_are_reduced(tmp_path):
    assert_like_ddp(_logging, tmp_path)


def _lr_find(strategy, folder, rank):
    model = seeded(Regressor)
    before = weights_of(model)
    trainer = make_trainer(strategy, folder)
    finder = Tuner(trainer).lr_find(model, make_loader(64), num_training=8, update_attr=True)
    torch.testing.assert_close(weights_of(model), before)
    trainer.fit(model, make_loader())
    return {**_outcome(trainer, model), "losses found": finder.results["loss"], "lr": model.lr}


def test_the_learning_rate_finder_finds_what_it_finds_with_ddp(tmp_path):
    assert_like_ddp(_lr_find, tmp_path)


class _Summarizes(pl.callbacks.ModelSummary):
    def _summary(self, trainer, module):
        self.seen = super()._summary(trainer, module)
        self.counts = {
            "total": self.seen.total_parameters,
            "trainable": self.seen.trainable_parameters,
            "layers": dict(zip(self.seen.layer_names, self.seen.param_nums, strict=True)),
        }
        return self.seen

    def summarize(self, *args, **kwargs):
        pass


def _summary(strategy, folder, rank):
    seen, outcome = {}, {}

    class Watch(pl.Callback):
        def on_fit_start(self, trainer, module):
            seen["total"] = ModelSummary(module).total_parameters

    for kind in (_Frozen, _Tied):
        summary = _Summarizes(max_depth=-1)
        loader = make_loader() if kind is _Frozen else _token_loader()
        options = {"callbacks": [summary, Watch()], "enable_model_summary": True}
        for _ in range(2):
            trainer, model = _fit(strategy, folder, seeded(kind), loader, **options)
            outcome[kind.__name__] = {**summary.counts, **_outcome(trainer, model)}
        if not strategy.startswith("fsdp1"):  # by hand it counts what FSDP1 shows
            assert seen["total"] == summary.counts["total"]
    return outcome


def test_the_model_summary_counts_whole_parameters(tmp_path):
    assert_like_ddp(_summary, tmp_path)


class _UsesInTurns(Regressor):
    """One block sits out every other step, on all ranks; one parameter is never used."""

    def __init__(self):
        super().__init__(num_blocks=3)
        self.never = nn.Linear(2, 2)
        self.turn = 0

    def training_step(self, batch, batch_idx):
        self.turn = batch_idx % 2
        return super().training_step(batch, batch_idx)

    def forward(self, x):
        x = self.inlet(x)
        for index, block in enumerate(self.blocks):
            if index != self.turn:
                x = block(x)
        return self.head(x)


def _in_turns(strategy, folder, rank):
    strategy = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    never = seeded(_UsesInTurns).never.weight.detach().clone()
    trainer, model = _fit(strategy, folder, seeded(_UsesInTurns), max_epochs=2)
    assert torch.equal(model.never.weight, never)
    return _outcome(trainer, model)


def test_modules_that_sit_out_a_step_keep_their_weights_as_with_ddp(tmp_path):
    assert_like_ddp(_in_turns, tmp_path)
