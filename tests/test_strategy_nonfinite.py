"""Steps whose gradients are not finite: raised or left out on all ranks, and where it began."""

import functools
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_fsdp import GradientAccessProbe, NonfiniteGradient
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

RANK, BATCH = 1, 3  # where something is broken; two micro-batches make a step


class Broken(AdamwRegressor):
    """One thing is not finite, once: on one rank, in one micro-batch."""

    def __init__(self, where, value=float("nan")):
        super().__init__()
        self.where = where
        self.value = value
        self.batch = -1
        self.before = self.after = None
        self.numbers = set()  # of micro-batches

    def training_step(self, batch, batch_idx):
        self.batch = batch_idx
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self._breaks("loss") else loss

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        if self._breaks("backward"):
            x.register_hook(lambda g: g * self.value)
        return self.head(x)

    def _breaks(self, where):
        is_last_rank = self.trainer.global_rank == self.trainer.world_size - 1
        return self.where == where and self.batch == BATCH and is_last_rank

    def on_train_start(self):
        access = self.trainer.strategy
        access.gradients.on_local(lambda name, gradient, number: self.numbers.add(number))
        if self.where == "local":
            access.gradients.on_local(self._break_local)
        if self.where == "reduced":
            access.gradients.on_reduced(self._break_reduced)

    def on_fit_start(self):
        if self.where == "activation":
            self.blocks[1].up.register_forward_hook(self._break_output)

    def _break_output(self, module, args, output):
        return output * self.value if self._breaks("activation") else None

    def _break_local(self, name, gradient, micro_batch):
        if self._breaks("local") and name == "blocks.0.up.weight":
            gradient.view(-1)[3] = self.value

    def _break_reduced(self, name, shard, micro_batch):
        if self._breaks("reduced") and name == "blocks.0.down.weight" and shard.numel():
            shard[0] = self.value

    def on_train_batch_start(self, batch, batch_idx):
        if self.where == "weight" and batch_idx == BATCH - 1:
            shard = self.trainer.strategy.weights["blocks.1.down.weight"].shard
            if self.trainer.global_rank == RANK and shard.numel():
                with torch.no_grad():
                    shard[0] = self.value
                self.trainer.strategy.engine.read_shards_again()
            else:
                self.trainer.strategy.engine.read_shards_again()

    def on_before_optimizer_step(self, optimizer):
        if self.batch == BATCH:
            self.before = self._bits(optimizer)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == BATCH:
            self.after = self._bits(self.optimizers().optimizer)

    def _bits(self, optimizer):
        weights = self.trainer.strategy.weights
        bits = {name: weight.shard.clone() for name, weight in weights.items()}
        for name, gradient in self.trainer.strategy.gradients.shards().items():
            bits[f"gradient of {name}"] = gradient.clone()
        state = self.trainer.strategy.engine.full_optimizer_state_dict(optimizer)["state"]
        return bits, {name: dict(values) for name, values in state.items()}


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
    "weight": r"weight of 'blocks\.1\.down\.weight' \(unit 'blocks\.1'\), in the slices of ranks "
    r"\[1\]\.",
}


def _run(strategy, folder, where, mode, **options):
    model = seeded(lambda: Broken(where))
    strategy = with_options(strategy, on_nonfinite=mode)
    options.setdefault("accumulate_grad_batches", 2)
    loader = make_loader(96)
    return model, fit(strategy, folder, model, loader, **options)


def _raised(rank, world_size, folder, where, options):
    for name in (
        SHARDED if where in ("local", "loss") else (*SHARDED[:2], "fsdp1_zero3", "fsdp2_zero3")
    ):
        with pytest.raises(NonfiniteGradient, match=_MESSAGES[where]) as caught:
            _run(name, folder, where, "raise", **options)
        if where == "loss":  # the same text on every rank
            texts = [None] * world_size
            torch.distributed.all_gather_object(texts, str(caught.value))
            assert len(set(texts)) == 1


@pytest.mark.parametrize("clips", [{}, {"gradient_clip_val": 0.1}], ids=["", "clipped"])
@pytest.mark.parametrize("where", _MESSAGES)
def test_every_rank_raises_and_names_where_it_began(tmp_path, where, clips):
    on_trainer_ranks(_raised, 2, tmp_path, where, clips)


def _large(rank, world_size, folder):
    class Large(AdamwRegressor):
        def on_train_start(self):
            self.trainer.strategy.gradients.on_local(self._fill)

        def _fill(self, name, gradient, micro_batch):
            if name == "blocks.0.up.weight":
                gradient.fill_(1e38)

    message = "Each gradient is finite; their norm is too large for fp32"
    strategy = with_options("scratch_fsdp_zero3", on_nonfinite="raise")
    with pytest.raises(NonfiniteGradient, match=message):
        fit(strategy, folder, seeded(Large), make_loader(8))


def test_large_gradients_whose_sum_overflows_are_finite(tmp_path):
    on_trainer_ranks(_large, 2, tmp_path)


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
            _run(name, folder, "activation", "raise", callbacks=[GradientAccessProbe(steps=[99])])


def test_with_the_probe_the_activation_is_named_too(tmp_path):
    on_trainer_ranks(_activation, 2, tmp_path)


class _Mask(torch.nn.Module):
    def forward(self, x):
        return torch.where(torch.arange(7) < 6, 0.0, float("-inf"))


class Masked(Broken):
    """With what is infinite on purpose: a frozen parameter, and the output of a module."""

    def __init__(self, where):
        super().__init__(where)
        self.bias = torch.nn.Parameter(_Mask()(None), requires_grad=False)
        self.mask = _Mask()

    def forward(self, x):
        x = self.inlet(x)
        x = x * (x + self.bias + self.mask(x)).softmax(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _masked(rank, world_size, folder, accumulation, where, message):
    for name in ("scratch_fsdp_zero3", "fsdp1_zero3"):
        model = seeded(lambda: Masked(where))
        strategy = with_options(name, on_nonfinite="raise")
        with pytest.raises(NonfiniteGradient, match=message) as caught:
            fit(
                strategy,
                folder,
                model,
                make_loader(96),
                accumulate_grad_batches=accumulation,
                callbacks=[GradientAccessProbe(steps=[99])],
            )
        assert "'mask'" not in str(caught.value)


def _compiled(rank, world_size, folder):
    warnings.simplefilter("ignore")  # what the compiler does raises warnings
    compiler, operations = torch.compile, []

    def noting(graph, inputs):
        operations.extend(n.target for n in graph.graph.nodes if n.op.startswith("call"))
        return graph

    torch.compile = functools.partial(compiler, backend=noting)
    found = []
    for callbacks in ([], [GradientAccessProbe(steps=[99])]):
        torch.compiler.reset()
        strategy = with_options("scratch_fsdp_zero3", on_nonfinite="raise", compile=True)
        fit(strategy, folder, seeded(AdamwRegressor), make_loader(16), callbacks=callbacks)
        found.append(sorted(map(str, operations)))
        operations.clear()
    torch.compile = compiler
    assert found[0] == found[1] != []


def test_with_the_probe_each_operation_is_compiled_once_as_without(tmp_path):
    on_trainer_ranks(_compiled, 2, tmp_path)


_BLAMED = {
    "local": r"in the local gradient of 'blocks\.0\.up\.weight'.*Not finite either: 'bias'\.",
    "activation": r"local gradient of 'head.*first activation: the output of 'blocks\.1\.up'",
}


@pytest.mark.parametrize("where", _BLAMED)
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 4)])
def test_what_is_infinite_on_purpose_is_not_blamed(tmp_path, world_size, accumulation, where):
    """It was so in an earlier step, or is so in another micro-batch of the first one."""
    on_trainer_ranks(_masked, world_size, tmp_path, accumulation, where, _BLAMED[where])


_CLIPS = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
}


def _skipped(rank, world_size, folder, clips, value):
    for name in (*SHARDED[:2], "fsdp1_zero2", "fsdp2_zero3"):
        logger = CSVLogger(folder, name=name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = seeded(lambda: Broken("local", value))
            trainer, model = fit(
                with_options(name, on_nonfinite="skip"),
                folder,
                model,
                make_loader(96),
                accumulate_grad_batches=2,
                logger=logger,
                **_CLIPS[clips],
            )
        messages = [str(w.message) for w in caught if "Skipped" in str(w.message)]
        assert len(messages) == (rank == 0)
        assert trainer.strategy.num_skipped_steps == 1
        torch.testing.assert_close(model.after, model.before, atol=0, rtol=0, equal_nan=True)
        assert trainer.global_step == 6
        assert model.numbers == {0, 1}
        assert all(w.isfinite().all() for w in weights_of(model).values())
        if rank == 0:
            logger.save()
            text = Path(logger.experiment.metrics_file_path).read_text()
            assert "skipped_steps" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("clips", _CLIPS)
def test_a_skipped_step_writes_no_bit_and_training_goes_on(tmp_path, clips, value):
    on_trainer_ranks(_skipped, 2, tmp_path, clips, value)


def _clipped_twice(rank, world_size, folder):
    class ClipsTwice(Broken):
        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            self.clip_gradients(optimizer, 0.1, "norm")
            self.clip_gradients(optimizer, 0.05, "value")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = with_options("scratch_fsdp_zero3", on_nonfinite="skip")
        model = seeded(lambda: ClipsTwice("local"))
        trainer, _ = fit(strategy, folder, model, make_loader(96), accumulate_grad_batches=2)
    assert trainer.strategy.num_skipped_steps == 1


def test_a_step_that_is_clipped_twice_is_skipped_once(tmp_path):
    on_trainer_ranks(_clipped_twice, 2, tmp_path)


def _like_left_out(rank, world_size, folder):
    class LeavesOut(AdamwRegressor):
        """Does by hand what a skip does."""

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            if batch_idx == BATCH:
                closure()
            else:
                optimizer.step(closure=closure)

    for name in ("scratch_fsdp_zero3", "scratch_fsdp_zero2"):
        _, expected = fit(
            name, folder, seeded(LeavesOut), make_loader(96), accumulate_grad_batches=2
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _ = _run(name, folder, "loss", "skip")
        torch.testing.assert_close(weights_of(model), weights_of(expected), atol=0, rtol=0)


def test_the_run_goes_on_as_if_the_step_had_been_left_out(tmp_path):
    on_trainer_ranks(_like_left_out, 2, tmp_path)


def _scaled(rank, world_size, folder):
    def run(where, mode, scale):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        return _run("scratch_fsdp_zero3", folder, where, mode, plugins=[plugin])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, (trainer, model) = run("local", "raise", 8.0)  # an overflow, for all it knows
        assert trainer.precision_plugin.scaler.get_scale() == 4.0
        torch.testing.assert_close(model.after, model.before, atol=0, rtol=0, equal_nan=True)
        _, (trainer, _) = run("local", "skip", 8.0)
        assert trainer.strategy.num_skipped_steps == 1
    with pytest.raises(NonfiniteGradient, match="The loss was not finite on rank 1") as caught:
        run("loss", "raise", 8.0)
    assert "in micro-batches 1." in str(caught.value)  # of this step, not of those before
    with pytest.raises(NonfiniteGradient, match=r"a loss scale of 1\.0.*'blocks\.0\.up\.weight'"):
        run("local", "raise", 1.0)


def test_a_gradient_scaler_may_look_for_its_scale(tmp_path):
    on_trainer_ranks(_scaled, 2, tmp_path)


def _by_hand(rank, world_size, folder):
    class ByHand(Broken):
        def __init__(self):
            super().__init__("local")
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.batch = batch_idx
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        with pytest.raises(NonfiniteGradient, match=r"'blocks\.0\.up\.weight'.*micro-batch 0"):
            fit(with_options(name, on_nonfinite="raise"), folder, seeded(ByHand), make_loader(96))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer, model = fit(
                with_options(name, on_nonfinite="skip"), folder, seeded(ByHand), make_loader(96)
            )
        assert trainer.strategy.num_skipped_steps == 1
        torch.testing.assert_close(model.after, model.before, atol=0, rtol=0, equal_nan=True)


def test_manual_optimization_is_looked_at_before_each_step(tmp_path):
    on_trainer_ranks(_by_hand, 2, tmp_path)


def _two_optimizers(rank, world_size, folder):
    class Two(AdamwRegressor):
        """One backward, and a step of each; what the second one has is broken."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            rest = [*self.inlet.parameters(), *self.blocks.parameters()]
            return [torch.optim.SGD(p, lr=0.1) for p in (list(self.head.parameters()), rest)]

        def on_train_start(self):
            self.trainer.strategy.gradients.on_local(self._break)

        def _break(self, name, gradient, micro_batch):
            if name == "blocks.0.up.weight" and self.trainer.global_rank == RANK:
                gradient.view(-1)[0] = float("nan")

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        with pytest.raises(NonfiniteGradient, match=r"local gradient of 'blocks\.0\.up\.weight'"):
            fit(with_options(name, on_nonfinite="raise"), folder, seeded(Two), make_loader(8))


def test_the_step_of_another_optimizer_forgets_nothing(tmp_path):
    on_trainer_ranks(_two_optimizers, 2, tmp_path)


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
        make_loader(96),
        accumulate_grad_batches=2,
    )
    assert not all(w.isfinite().all() for w in weights_of(model).values())
    return True


def test_without_the_option_nothing_looks(tmp_path):
    on_trainer_ranks(_unlooked, 2, tmp_path)


def _no_anomaly(rank, world_size, folder):
    with pytest.raises(NonfiniteGradient, match=_MESSAGES["reduced"]):
        _run("scratch_fsdp_zero3", folder, "reduced", "raise", detect_anomaly=True)


def test_detect_anomaly_goes_with_it(tmp_path):
    on_trainer_ranks(_no_anomaly, 2, tmp_path)


def test_another_value_is_refused_at_once():
    with pytest.raises(ValueError, match="on_nonfinite: expected 'raise'"):
        with_options("scratch_fsdp_zero3", on_nonfinite="ignore")
