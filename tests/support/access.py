"""Modules and callbacks that read gradients and weights at every moment of a run."""

import functools
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_fsdp import GradientUnavailable
from tests.support.trainer import Regressor, make_loader, make_trainer, seeded

NAMES = ["inlet.weight", "inlet.bias", "head.weight"]

NAMES += [
    f"blocks.{i}.{part}.{kind}"
    for i in (0, 1)
    for part in ("norm", "up", "down")
    for kind in ("weight", "bias")
]

NAMES += ["head.bias"]


def plain_model():
    return seeded(Regressor)


def local_reference(weights, batch, dtype):
    """Gradients of this rank's batch, unsharded."""
    model = plain_model().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    x, y = (t.to(dtype) for t in batch)
    F.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def mean(local):
    """Over ranks, in fp32; a sum of two terms has one result."""
    reduced = {}
    for name, gradient in local.items():
        reduced[name] = gradient.float().clone()
        dist.all_reduce(reduced[name])
        reduced[name] /= dist.get_world_size()
    return reduced


def refused(read):
    try:
        read()
    except GradientUnavailable as error:
        return str(error)
    raise AssertionError("expected GradientUnavailable")


class Watch(pl.Callback):
    """Looks at every moment of two steps of two micro-batches each."""

    def __init__(self, dtype, tolerance):
        self.dtype = dtype
        self.tolerance = tolerance
        self.waiting = {}  # local gradients of the micro-batches so far, summed
        self.seen_local = {}
        self.micro_batches = []
        self.checked = []

    def on_train_start(self, trainer, module):
        self.num_replicas = trainer.strategy.engine.grid.num_replicas
        strategy = trainer.strategy
        assert strategy.gradients.names() == strategy.weights.names()
        assert sorted(strategy.gradients.names()) == sorted(NAMES)
        self.handle = strategy.gradients.on_local(self.on_local)

    def on_local(self, name, gradient, micro_batch):
        assert name not in self.seen_local, "a gradient arrives once per backward"
        self.seen_local[name] = gradient.clone()
        self.micro_batches.append(micro_batch)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        weights = {name: weight.clone() for name, weight in trainer.strategy.weights.full()}
        for name, whole in weights.items():
            assert torch.equal(trainer.strategy.weights[name].full(), whole)
        self.local = local_reference(weights, batch, self.dtype)
        if batch_idx % 2 == 0:
            self.waiting = {name: torch.zeros_like(g) for name, g in self.local.items()}
        self.waiting = {name: g + self.local[name] / 2 for name, g in self.waiting.items()}

    def on_before_backward(self, trainer, module, loss):
        first = trainer.strategy.gradients["head.weight"]
        expected = "none" if trainer.fit_loop.batch_idx % 2 == 0 else "local"
        assert first.state == expected
        if expected == "none":
            message = refused(lambda: first.shard)
            assert trainer.strategy.engine.name in message
            assert "'head.weight'" in message
        self.seen_local, self.micro_batches = {}, []

    def on_after_backward(self, trainer, module):
        gradients, index = trainer.strategy.gradients, trainer.fit_loop.batch_idx
        assert set(self.micro_batches) == {index % 2}
        for name in NAMES:  # Lightning divides the loss by the number of micro-batches
            self.close(self.seen_local[name], self.local[name] / 2, f"on_local {name}")
        if index % 2 == 0:
            for name in NAMES:
                assert gradients[name].state == "local", name
                self.close(gradients[name].local(), self.waiting[name], f"local {name}")
                assert "'local'" in refused(lambda name=name: gradients[name].full())
                assert "'local'" in refused(lambda name=name: gradients[name].shard)
            self.checked.append("local")
        else:
            self.check_reduced(gradients)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.check_reduced(trainer.strategy.gradients)

    def check_reduced(self, gradients):
        expected = mean(self.waiting)
        for name in NAMES:
            assert gradients[name].state == "reduced", name
            self.close(gradients[name].full(), expected[name], f"reduced {name}")
            assert "'reduced'" in refused(lambda name=name: gradients[name].local())
        streamed = dict(gradients.full())
        assert sorted(streamed) == sorted(NAMES)
        for name, whole in streamed.items():
            self.close(whole, expected[name], f"streamed {name}")
        pieces = sum(shard.numel() for shard in gradients.shards().values())
        total = torch.tensor(pieces)
        dist.all_reduce(total)
        once = int(total) // self.num_replicas
        assert once == sum(g.numel() for g in expected.values())
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected.values()]))
        self.close(gradients.norm(), norm, "norm")
        self.close(gradients.dot(None).float(), norm**2, "dot")
        self.checked.append("reduced")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 2 == 1:
            trainer.optimizers[0].zero_grad()
            for name in NAMES:
                assert trainer.strategy.gradients[name].state == "none"
            self.checked.append("none")
        self.seen_local = {}

    def close(self, found, expected, what):
        assert found.shape == expected.shape, what
        torch.testing.assert_close(
            found.float(),
            expected.float(),
            rtol=self.tolerance,
            atol=self.tolerance,
            msg=lambda text: f"{what}: {text}",
        )


def watched(rank, world_size, strategy, precision, folder):
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    watch = Watch(dtype, {"32-true": 1e-6, "bf16-true": 1e-2, "bf16-mixed": 2e-2}[precision])
    trainer = make_trainer(
        strategy,
        Path(folder),
        precision=precision,
        accumulate_grad_batches=2,
        limit_train_batches=4,
        callbacks=[watch],
    )
    trainer.fit(plain_model(), make_loader(64))
    assert watch.checked == ["local", "reduced", "reduced", "none"] * 2
    watch.handle.remove()


class Separately(Regressor):
    """Two micro-batches by hand, each kept apart."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.landed = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        gradients = self.trainer.strategy.gradients
        halves = [(x[:2], y[:2]), (x[2:], y[2:])]
        weights = dict(self.trainer.strategy.weights.full())
        weights = {name: whole.clone() for name, whole in weights.items()}
        expected = [mean(local_reference(weights, half, torch.float32)) for half in halves]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        handle = gradients.on_reduced(
            lambda name, shard, i: self.landed.append((name, shard.clone(), i))
        )
        with gradients.micro_batches("separate"):
            for half in halves:
                self.manual_backward(self.loss(half))
        handle.remove()
        assert {micro_batch for _, _, micro_batch in self.landed} == {0, 1}
        for name in gradients.names():
            for index in (0, 1):
                torch.testing.assert_close(
                    gradients[name].full(micro_batch=index), expected[index][name]
                )
            total = expected[0][name] + expected[1][name]
            torch.testing.assert_close(gradients[name].full(), total)
        shards = {(name, index): shard for name, shard, index in self.landed}
        for name, shard in gradients.shards(micro_batch=1).items():
            assert torch.equal(shards[name, 1], shard)
        self.landed.clear()
        dot = sum((expected[0][n].double() * expected[1][n].double()).sum() for n in expected[0])
        torch.testing.assert_close(gradients.dot(0, 1), dot, rtol=1e-5, atol=1e-8)
        assert "micro-batch 2" in refused(lambda: gradients["head.bias"].full(micro_batch=2))
        for read in (gradients.shards, gradients.full, functools.partial(gradients.dot, 0)):
            refusal = refused(functools.partial(lambda read: list(read(2)), read))
            assert "micro-batch 2: expected one of those kept" in refusal
        optimizer.step()
        optimizer.zero_grad()
        assert "'head.bias'" in refused(lambda: gradients["head.bias"].full(micro_batch=0))


def separately(rank, world_size, strategy, folder):
    trainer = make_trainer(strategy, Path(folder), limit_train_batches=2)
    trainer.fit(seeded(Separately), make_loader())
    assert trainer.global_step == 2
