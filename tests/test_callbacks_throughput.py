"""Rates and times of a run whose clock the test turns, so that they are exact."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_fsdp import ThroughputMonitor, linear_cross_entropy
from lightning_fsdp.callbacks import throughput
from tests.support.trainer import STRATEGIES, make_trainer, on_trainer_ranks, seeded, weights_of

PAD, WIDTH, LENGTH = 0, 16, 10
# Seconds that each part takes on rank 0; on rank 1 twice as many.
TAKES = {"data": 0.5, "forward": 1.0, "backward": 2.0, "optimizer": 0.25}


class _Kept(Logger):
    """Keeps what it is given."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.metrics = []
        self.trainer_steps = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        if "throughput/tokens_per_s" in metrics:
            self.metrics.append((step, metrics))
        if "loss" in metrics:
            self.trainer_steps.append(step)


class _Clock(pl.Callback):
    """Comes before the monitor, and lets time pass in front of each of its marks."""

    def __init__(self, rank):
        self.now, self.rank = 0.0, rank

    def perf_counter(self):
        return self.now

    def passes(self, part):
        self.now += TAKES[part] * (1 + self.rank)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.passes("data")

    def on_before_backward(self, trainer, module, loss):
        self.passes("forward")

    def on_after_backward(self, trainer, module):
        self.passes("backward")

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.passes("optimizer")

    def on_validation_epoch_end(self, trainer, module):
        self.now += 1000.0  # must not count


class _Tokens(pl.LightningModule):
    """One matmul of WIDTH x WIDTH per position, and one of WIDTH x 1."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.up(self.table(batch["input_ids"]))).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Positions forward: 2 flops per weight; backward: once more for the weights, once for the inputs.
FLOPS_PER_POSITION = 3 * 2 * (WIDTH * WIDTH + WIDTH)


def _samples(with_mask):
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(64):
        ids = torch.randint(1, 20, (LENGTH,), generator=generator)
        ids[LENGTH - 4 :] = PAD  # 6 tokens of 10 positions
        samples.append({"input_ids": ids})
        if with_mask:
            samples[index]["attention_mask"] = (ids != PAD).long()
    return samples


def _timed(rank, world_size, strategy, with_mask, folder):
    weights = []
    for is_monitored in (False, True):
        clock, logger = _Clock(rank), _Kept()
        throughput.time = clock  # has perf_counter
        monitor = ThroughputMonitor(
            pad_id=None if with_mask else PAD, flops_per_token="count", peak_flops=1e4
        )
        module = seeded(_Tokens)
        trainer = make_trainer(
            strategy,
            Path(folder),
            accumulate_grad_batches=2,
            log_every_n_steps=2,
            val_check_interval=3,
            callbacks=[clock, monitor] if is_monitored else [],
            logger=logger,
        )
        loader = DataLoader(_samples(with_mask), batch_size=4)
        trainer.fit(module, loader, DataLoader(_samples(with_mask)[:8], batch_size=4))
        weights.append(weights_of(module))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    tokens = 4 * 6  # of a micro-batch
    assert monitor.flops_per_token == pytest.approx(FLOPS_PER_POSITION * 40 / tokens)
    if rank > 0:
        assert logger.metrics == []
        return
    assert [step for step, _ in logger.metrics] == logger.trainer_steps == [1, 3]
    step_s = 2 * (TAKES["data"] + TAKES["forward"] + TAKES["backward"]) + TAKES["optimizer"]
    slowest = step_s * world_size
    for _, metrics in logger.metrics:
        rate = metrics["throughput/tokens_per_s"]
        assert rate == pytest.approx(2 * tokens * world_size / slowest)
        mean = (1 + world_size) / 2
        for part, seconds in TAKES.items():
            times = 1 if part == "optimizer" else 2
            assert metrics[f"throughput/{part}_s"] == pytest.approx(times * seconds * mean), part
        used = 2 * FLOPS_PER_POSITION * 40 / slowest
        assert metrics["throughput/mfu"] == pytest.approx(used / 1e4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rates_times_and_utilisation_are_exact(tmp_path, strategy):
    on_trainer_ranks(_timed, 2, strategy, strategy == "ddp", str(tmp_path))


def _without_peak(rank, world_size, folder):
    logger = _Kept()
    monitor = ThroughputMonitor(num_tokens=lambda batch: 7)
    trainer = make_trainer(
        "auto", Path(folder), log_every_n_steps=1, callbacks=[monitor], logger=logger
    )
    trainer.fit(seeded(_Tokens), DataLoader(_samples(False), batch_size=4))
    assert len(logger.metrics) == 16
    assert all("throughput/mfu" not in metrics for _, metrics in logger.metrics)
    assert all(metrics["throughput/tokens_per_s"] > 0 for _, metrics in logger.metrics)


def test_utilisation_is_absent_when_the_peak_is_unknown(tmp_path):
    on_trainer_ranks(_without_peak, 1, str(tmp_path))


def test_what_cannot_be_told_is_refused():
    with pytest.raises(ValueError, match="flops_per_token as well"):
        ThroughputMonitor(peak_flops=1e12)
    with pytest.raises(TypeError, match="expected a batch with attention_mask or input_ids"):
        ThroughputMonitor().num_tokens([torch.zeros(2)])


class _Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        heads = self.inner(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return x + self.outer(
            scaled_dot_product_attention(*heads).transpose(1, 2).reshape(2, 8, 16)
        )


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_checkpointing_computes_again_counts_once(is_reentrant):
    flops = []
    for recomputes in (False, True):
        block, x = _Attends(), torch.ones(2, 8, 16, requires_grad=True)
        with throughput.flop_counter() as counter:
            y = checkpoint(block, x, use_reentrant=is_reentrant) if recomputes else block(x)
            y.sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] > 0


def test_a_loss_without_logits_counts_as_the_linear_layer():
    hidden, weight = (torch.ones(size, 16, requires_grad=True) for size in (30, 100))
    with throughput.flop_counter() as counter:
        linear_cross_entropy(hidden, weight, torch.zeros(30, dtype=torch.long)).backward()
    assert counter.get_total_flops() == 3 * 2 * 30 * weight.numel()


def test_products_of_experts_are_counted():
    rows = torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.ones(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    with throughput.flop_counter() as counter:
        out = torch.nn.functional.grouped_mm(rows, experts, offs=ends)
        out.backward(torch.ones_like(out))
    assert counter.get_total_flops() == 3 * 2 * 8 * 16 * 32


class _Leaves(_Tokens):
    """Some micro-batches have no loss, and so no backward."""

    without = ()

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.without else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(("without", "is_counted"), [((0, 2), True), (range(16), False)])
def test_where_no_backward_follows_nothing_is_counted_and_nothing_stays(
    tmp_path, without, is_counted
):
    monitor, module = ThroughputMonitor(pad_id=PAD, flops_per_token="count"), seeded(_Leaves)
    module.without = without
    trainer = make_trainer("auto", tmp_path, devices=1, callbacks=[monitor])
    loader = DataLoader(_samples(False), batch_size=4)
    trainer.fit(module, loader, loader)
    assert (monitor.flops_per_token is not None) == is_counted
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.parametrize("name", ["attention_mask", "input_ids"])
def test_tokens_that_the_device_counts_are_not_waited_for(name):
    monitor = ThroughputMonitor(pad_id=0)
    monitor._device = torch.device("cpu")  # whose clock it is
    with FakeTensorMode():  # which has no values to read
        batch = {name: torch.ones(2, 3, dtype=torch.long, device="cuda")}
        for _ in range(2):
            monitor.on_train_batch_start(None, None, batch, 0)
        assert monitor._tokens.device.type == "cuda"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_of_a_mask_in_16_bits_are_all_counted(dtype):
    monitor = ThroughputMonitor()
    monitor._device = torch.device("cpu")
    for _ in range(20):
        batch = {"attention_mask": torch.ones(80, 1024, dtype=dtype)}
        monitor.on_train_batch_start(None, None, batch, 0)
    assert float(monitor._tokens) == 20 * 80 * 1024
