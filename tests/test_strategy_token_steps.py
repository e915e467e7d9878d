"""The mean over tokens of steps that are unlike: jumps, steps added up by hand, losses left out."""

import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.support.token_mean import LENGTHS, WIDTH, Net, Sequences, Tokens, loader, reference
from tests.support.trainer import fit, on_trainer_ranks, seeded, with_options


class _Jumps(pl.LightningModule):
    """As many tokens as the batch says."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.weights = []

    def training_step(self, batch, batch_idx):
        return {"loss": self.net(torch.ones(1, WIDTH)).square().mean(), "num_tokens": batch}

    def on_after_backward(self):
        self.weights.append(float(self.trainer.precision_plugin.token_mean.weight))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _jump(rank, world_size, folder):
    model = seeded(_Jumps)
    numbers = [4, 5, 5000, 5500, 3, 2]
    loader = DataLoader([n + rank for n in numbers], batch_size=None)
    options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False}
    fit("scratch_fsdp_zero3", folder, model, loader, **options)
    assert len(model.weights) == len(numbers)
    assert all(0.2 < weight < 1 for weight in model.weights), model.weights


def test_the_weights_of_losses_stay_near_one_where_steps_differ(tmp_path):
    on_trainer_ranks(_jump, 2, tmp_path)


class _Adds(Tokens):
    """Adds up the gradients of two batches by hand, each the mean over its own tokens."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        (optimizer.step if batch_idx % 2 else _call)(closure=closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.trainer.strategy.gradients["net.head.bias"].full())


def _call(closure):
    closure()


def _added(rank, world_size, folder):
    data, expected = Sequences(), []
    net = seeded(Tokens).net
    for start in range(0, len(LENGTHS) // 2 // world_size * 2 * world_size, 2 * world_size):
        rows = range(start, start + 2 * world_size)
        if start % (4 * world_size) == 0:
            net.zero_grad()
        num_tokens = max(sum(LENGTHS[r] for r in rows), 1)
        for r in rows:
            loss = F.cross_entropy(net(data[r]["x"]), data[r]["labels"], reduction="sum")
            (loss / num_tokens).backward()
        if start % (4 * world_size):
            expected.append(net.head.bias.grad.clone())
    for name in ("scratch_fsdp_zero3", "fsdp1_zero2", "fsdp2_zero3"):
        model = seeded(lambda: _Adds(lr=0.0))
        fit(name, folder, model, loader(), use_distributed_sampler=False)
        found = [gradient for gradient in model.seen if isinstance(gradient, torch.Tensor)]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_gradients_that_are_added_up_by_hand_are_finished_once(tmp_path):
    on_trainer_ranks(_added, 2, tmp_path)


class _LeavesOut(Tokens):
    """On one rank Lightning allows no loss; here of each step's last micro-batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.seen.append(self.trainer.strategy.gradients["net.head.bias"].full())

    def on_after_backward(self):
        pass


def _left_out(rank, world_size, folder):
    warnings.simplefilter("ignore")  # Lightning's
    _, losses = reference(1, 1, lr=0.0)
    for name in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        model = seeded(lambda: _LeavesOut(lr=0.0))
        strategy = with_options(name, accumulation="sum")
        options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False}
        fit(strategy, folder, model, loader(), **options, limit_train_batches=4)
        torch.testing.assert_close(model.step_losses, [losses[0], losses[2]])
        data, net = Sequences(), seeded(Tokens).net
        for found, rows in zip(model.seen, ((0, 1), (4, 5)), strict=True):
            net.zero_grad()
            batch = [torch.stack([data[r][key] for r in rows]) for key in ("x", "labels")]
            F.cross_entropy(net(batch[0].flatten(0, 1)), batch[1].flatten()).backward()
            torch.testing.assert_close(found, net.head.bias.grad)


def test_a_step_whose_last_micro_batch_has_no_loss_is_finished(tmp_path):
    on_trainer_ranks(_left_out, 1, tmp_path)


class _Stops(_LeavesOut):
    """Leaves an epoch before the last micro-batch of a step."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 3) else None

    def training_step(self, batch, batch_idx):
        return Tokens.training_step(self, batch, batch_idx)


def _stopped(rank, world_size, folder):
    for name in ("scratch_fsdp_zero3", "fsdp1_zero2", "fsdp2_zero3"):
        model = seeded(lambda: _Stops(lr=0.0))
        options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False}
        fit(name, folder, model, loader(), **options, limit_train_batches=4, max_epochs=2)
        # No weight moves: the second epoch begins with the step that the first began with.
        assert len(model.seen) == len(model.step_losses) == 3
        torch.testing.assert_close(model.seen[1], model.seen[0])
        torch.testing.assert_close(model.step_losses[1], model.step_losses[0])


def test_a_step_that_was_left_before_its_end_weighs_nothing_in_the_next(tmp_path):
    on_trainer_ranks(_stopped, 2, tmp_path)
