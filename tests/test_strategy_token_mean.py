"""Gradients are those of the mean over all tokens of an optimizer step.

Judged against one process that runs the joined, unpadded batch of the step through plain torch.
"""

import dataclasses
import warnings
from collections.abc import Mapping

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.trainer import (
    SHARDED,
    Block,
    fit,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)

LENGTHS = [3, 17, 1, 9, 0, 0, 0, 2, 30, 4, 7, 0, 21, 6, 1, 8, 13, 2, 11, 5, 19, 3, 10, 4]
WIDTH, LONGEST, VOCABULARY = 6, 30, 11


class Sequences(Dataset):
    """Padded sequences of very different lengths; of some, no token has a label."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(LONGEST, WIDTH, generator=generator)
        labels = torch.randint(VOCABULARY, (LONGEST,), generator=generator)
        labels[LENGTHS[index] :] = -100
        return {"x": x, "labels": labels, "counts": torch.tensor(LENGTHS[index])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(pl.LightningModule):
    def __init__(self, says="num_tokens", lr=0.3):
        super().__init__()
        self.net = Net()
        self.says = says
        self.lr = lr
        self.step_losses = []
        self.seen = []

    def training_step(self, batch, batch_idx):
        logits = self.net(batch["x"].flatten(0, 1))
        labels = batch["labels"]
        loss = F.cross_entropy(logits.float(), labels.flatten())
        num_tokens = (labels != -100).sum()
        self.log(
            "epoch_loss",
            loss.nan_to_num(),
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            batch_size=int(num_tokens),
        )
        if self.says is None:
            return loss
        return {"loss": loss, self.says: num_tokens} if self.says in _DICT else loss

    def on_before_optimizer_step(self, optimizer):
        self.step_losses.append(self.trainer.strategy.mean_loss)

    def on_after_backward(self):
        self.seen.append(self.trainer.strategy.gradients["net.head.bias"].state)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


_DICT = ("num_tokens", "weight")


def _loader(batch_size=2):
    # Dealt out in order: the Trainer's own sampler shuffles what is trained on.
    sampler = DistributedSampler(Sequences(), shuffle=False)
    return DataLoader(Sequences(), batch_size=batch_size, sampler=sampler)


def _reference(world_size, accumulation, *, batch_size=2, clip=None, make=None, lr=0.3):
    """Plain torch, one process: every step's tokens in one row, without padding."""
    model = seeded(Tokens).net
    optimizer = (make or torch.optim.SGD)(model.parameters(), lr=lr)
    data, losses, norms = Sequences(), [], []
    per_rank = len(LENGTHS) // world_size // batch_size  # batches of each rank; ranks alternate
    for start in range(0, per_rank, accumulation):
        rows = [
            (start + micro) * batch_size * world_size + k
            for micro in range(min(accumulation, per_rank - start))
            for k in range(batch_size * world_size)
        ]
        x = torch.cat([data[r]["x"][: LENGTHS[r]] for r in rows])
        labels = torch.cat([data[r]["labels"][: LENGTHS[r]] for r in rows])
        loss = F.cross_entropy(model(x), labels) if len(labels) else model(x).sum() * 0
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        losses.append(loss.detach())
    return dict(model.state_dict()), losses


def _net_of(model):
    return {name.removeprefix("net."): value for name, value in weights_of(model).items()}


def _compare(
    rank, world_size, folder, names, accumulation, options, trainer_options, says="num_tokens"
):
    expected, losses = _reference(
        world_size, accumulation, clip=trainer_options.get("gradient_clip_val")
    )
    for name in names:
        _, model = fit(
            with_options(name, **options),
            folder,
            seeded(lambda: Tokens(says)),
            _loader(),
            accumulate_grad_batches=accumulation,
            use_distributed_sampler=False,
            **trainer_options,
        )
        torch.testing.assert_close(
            _net_of(model), expected, atol=2e-6, rtol=2e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
        torch.testing.assert_close(model.step_losses, losses, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_is_that_of_one_process_on_the_joined_unpadded_batch(
    tmp_path, world_size, accumulation
):
    """With micro-batches and ranks without a token, and a last window that is shorter."""
    names = SHARDED if world_size == 2 else ("scratch_fsdp_zero3", "fsdp2_zero2")
    on_trainer_ranks(_compare, world_size, tmp_path, names, accumulation, {}, {})


@pytest.mark.parametrize("clip", [0.05])
def test_the_norm_that_is_clipped_is_that_of_the_final_gradient(tmp_path, clip):
    on_trainer_ranks(_compare, 2, tmp_path, SHARDED, 2, {}, {"gradient_clip_val": clip})


def test_reduced_micro_batches_are_weighed_alike(tmp_path):
    on_trainer_ranks(_compare, 2, tmp_path, SHARDED, 4, {"accumulation": "sum"}, {})


@pytest.mark.parametrize("key", ["counts", "weight"])
def test_the_number_comes_from_a_key_of_the_batch_or_of_the_dictionary(tmp_path, key):
    says = key if key == "weight" else "nothing"
    names = ("scratch_fsdp_zero3", "fsdp1_zero3")
    on_trainer_ranks(_compare, 2, tmp_path, names, 2, {"weigh_by": key}, {}, says)


# -- with what else there is -----------------------------------------------------------------------


class _Whole(Tokens):
    """Momentum that takes a step of the whole matrix: an optimizer that needs whole tensors."""

    def configure_optimizers(self):
        return _Normalised(self.parameters(), lr=self.lr)


class _Normalised(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / (1 + p.grad.norm()))


def _whole_tensors(rank, world_size, folder):
    expected, _ = _reference(world_size, 2, make=_Normalised)
    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        _, model = fit(
            name,
            folder,
            seeded(_Whole),
            _loader(),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
        )
        torch.testing.assert_close(_net_of(model), expected, atol=2e-6, rtol=2e-5)


def test_optimizers_over_whole_tensors_get_the_weighed_gradient(tmp_path):
    on_trainer_ranks(_whole_tensors, 2, tmp_path)


def _narrow(rank, world_size, folder, precision):
    expected, losses = _reference(world_size, 2)
    for name in ("scratch_fsdp_zero3", "fsdp2_zero2"):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if precision == "16-mixed" else None
        _, model = fit(
            name,
            folder,
            seeded(Tokens),
            _loader(),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
            plugins=[MixedPrecision(precision, "cpu", scaler)],
        )
        torch.testing.assert_close(model.step_losses, losses, atol=0.03, rtol=0.02)
        start, found = dict(seeded(Tokens).net.state_dict()), _net_of(model)
        moved = _distance(expected, start)
        assert _distance(found, expected) < 0.05 * moved, (name, moved)


def _distance(one, other):
    return sum((one[name] - other[name]).square().sum() for name in one).sqrt()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_narrow_gradients_keep_their_magnitude(tmp_path, precision):
    on_trainer_ranks(_narrow, 2, tmp_path, precision)


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
        fit(name, folder, model, _loader(), use_distributed_sampler=False)
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
    _, losses = _reference(1, 1, lr=0.0)
    for name in ("scratch_fsdp_zero3", "fsdp1_zero3", "fsdp2_zero3"):
        model = seeded(lambda: _LeavesOut(lr=0.0))
        strategy = with_options(name, accumulation="sum")
        options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False}
        fit(strategy, folder, model, _loader(), **options, limit_train_batches=4)
        torch.testing.assert_close(model.step_losses, [losses[0], losses[2]])
        data, net = Sequences(), seeded(Tokens).net
        for found, rows in zip(model.seen, ((0, 1), (4, 5)), strict=True):
            net.zero_grad()
            batch = [torch.stack([data[r][key] for r in rows]) for key in ("x", "labels")]
            F.cross_entropy(net(batch[0].flatten(0, 1)), batch[1].flatten()).backward()
            torch.testing.assert_close(found, net.head.bias.grad)


def test_a_step_whose_last_micro_batch_has_no_loss_is_finished(tmp_path):
    on_trainer_ranks(_left_out, 1, tmp_path)


def _apart(rank, world_size, folder):
    class Keeps(pl.Callback):
        parts = None

        def on_train_start(self, trainer, module):
            self.context = trainer.strategy.gradients.micro_batches("separate")
            self.context.__enter__()

        def on_before_optimizer_step(self, trainer, module, optimizer):
            gradient = trainer.strategy.gradients["net.head.bias"]
            self.parts, self.total = [gradient.full(m) for m in (0, 1)], gradient.full()

    for name in ("scratch_fsdp_zero3", "fsdp2_zero3"):
        keeps = Keeps()
        fit(
            with_options(name, accumulation="sum"),
            folder,
            seeded(Tokens),
            _loader(),
            accumulate_grad_batches=2,
            use_distributed_sampler=False,
            callbacks=[keeps],
            max_steps=1,
        )
        keeps.context.__exit__(None, None, None)
        torch.testing.assert_close(sum(keeps.parts), keeps.total, atol=1e-7, rtol=1e-5)
        net = seeded(Tokens).net
        rows = range(4 * world_size)
        num_tokens = sum(LENGTHS[r] for r in rows)
        first, data = list(rows)[: 2 * world_size], Sequences()
        loss = sum(
            F.cross_entropy(net(data[r]["x"]), data[r]["labels"], reduction="sum") for r in first
        )
        (loss / num_tokens).backward()
        torch.testing.assert_close(keeps.parts[0], net.head.bias.grad, atol=1e-6, rtol=1e-5)


def test_a_micro_batch_kept_apart_is_its_share_of_the_mean(tmp_path):
    on_trainer_ranks(_apart, 2, tmp_path)


def _logged(rank, world_size, folder):
    _, losses = _reference(world_size, 1, lr=0.0)
    trainer, _ = fit(
        "scratch_fsdp_zero3",
        folder,
        seeded(lambda: Tokens(lr=0.0)),
        _loader(),
        use_distributed_sampler=False,
    )
    counts = torch.tensor(LENGTHS).view(-1, 2 * world_size).sum(1)
    expected = (torch.stack(losses) * counts).sum() / counts.sum()
    torch.testing.assert_close(trainer.callback_metrics["epoch_loss"], expected)


def test_what_is_logged_with_the_number_as_batch_size_is_the_mean_over_the_epochs_tokens(tmp_path):
    on_trainer_ranks(_logged, 2, tmp_path)


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
    _, straight = fit("scratch_fsdp_zero3", folder, seeded(Tokens), _loader(), **options)
    _, resumed = fit(
        "scratch_fsdp_zero3",
        folder,
        seeded(Tokens, seed=1),
        _loader(),
        ckpt_path=folder / "0.ckpt",
        **options,
    )
    assert len(resumed.step_losses) == len(straight.step_losses) / 2
    for name, value in weights_of(resumed).items():
        assert torch.equal(value, weights_of(straight)[name]), name


def test_a_resumed_run_comes_to_the_same_bits(tmp_path):
    on_trainer_ranks(_resumed, 2, tmp_path)


# -- without it, and wrong use ---------------------------------------------------------------------


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


@dataclasses.dataclass(frozen=True)
class _Frozen:
    x: torch.Tensor

    def to(self, *args, **kwargs):
        return _Frozen(self.x.to(*args, **kwargs))


class _Own(Mapping):
    """A mapping that is not built from its items alone."""

    def __init__(self, x, note):
        self.content, self.note = {"x": x}, note

    def to(self, *args, **kwargs):
        return _Own(self.content["x"].to(*args, **kwargs), self.note)

    def __getitem__(self, key):
        return self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


def _in(kind, x):
    if kind == "frozen":
        return _Frozen(x)
    if kind == "mapping":
        return _Own(x, "a note")
    if kind == "nested":
        return torch.nested.nested_tensor([x, (10 * x).long()[:1]], dtype=torch.int64)
    return getattr(x, kind)()  # a sparse one


class _Any(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net(torch.ones(1, WIDTH)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _any_batch(rank, world_size, folder):
    warnings.simplefilter("ignore")  # torch's, of sparse and nested tensors
    for kind in ("frozen", "mapping", "nested", "to_sparse", "to_sparse_csr"):
        batches = DataLoader([_in(kind, torch.ones(2, 3))] * 2, batch_size=None)
        trainer, _ = fit("scratch_fsdp_zero3", folder, seeded(_Any), batches)
        assert trainer.global_step == 1, kind


def test_without_a_number_a_batch_may_be_anything(tmp_path):
    on_trainer_ranks(_any_batch, 2, tmp_path)


def _labelled(num_tokens, shift):
    labels = torch.where(torch.arange(LONGEST) < num_tokens, shift, -100)
    return {"x": torch.ones(1, LONGEST, WIDTH), "index": torch.tensor([shift]), "labels": labels}


def _warned(rank, world_size, folder, of_ranks):
    batches = [_labelled(num, i) for i, num in enumerate(of_ranks[rank])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            "scratch_fsdp_zero3",
            folder,
            seeded(lambda: Tokens(None)),
            DataLoader(batches, batch_size=None),
            accumulate_grad_batches=2 if world_size == 1 else 1,
            use_distributed_sampler=False,
        )
    return [str(w.message) for w in caught if "labels that are not -100" in str(w.message)]


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ([[4, 9, 3], [26, 5, 7]], "Ranks have 4 to 26 labels that are not -100 in a micro-batch"),
        ([[30, 30, 30], [2, 2, 2]], "Ranks have 2 to 30 labels"),
        ([[5, 30, 30], [5, 2, 2]], "Micro-batches of rank 0 have 5 to 30 labels"),
        ([[30, 2, 30]], "Micro-batches of rank 0 have 2 to 30 labels"),
        ([[7, 7, 7], [7, 7, 7]], None),
        ([[30, 30, 30], [30, 30, 30]], None),
    ],
    ids=["", "one full", "later", "one rank", "equal", "all full"],
)
def test_labels_that_are_left_out_without_a_number_are_warned_of_once(tmp_path, of_ranks, message):
    of_rank_0, *others = on_trainer_ranks(_warned, len(of_ranks), tmp_path, of_ranks)
    assert not any(others)
    assert len(of_rank_0) == (message is not None)
    for warned in of_rank_0:
        assert message in warned
        low, high = map(int, message.split(" have ")[1].split(" labels")[0].split(" to "))
        assert f"{high / low:.1f} times" in warned
        assert '"num_tokens"' in warned


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
            _loader(),
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


def _missing(rank, world_size, folder):
    with pytest.raises(ValueError, match=r"weigh_by='tokens'.*the batch: \['counts', 'labels'"):
        fit(with_options("fsdp2_zero3", weigh_by="tokens"), folder, seeded(Tokens), _loader())


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
        fit("scratch_fsdp_zero3", folder, seeded(_ByHand), _loader())
    with pytest.raises(NotImplementedError, match=r"weigh_by='counts'.*automatic_optimization"):
        fit(
            with_options("scratch_fsdp_zero3", weigh_by="counts"),
            folder,
            seeded(_ByHand),
            _loader(),
        )


def test_manual_optimization_weighs_by_itself(tmp_path):
    on_trainer_ranks(_by_hand, 2, tmp_path)


def test_a_key_that_is_no_text_is_refused_at_once():
    with pytest.raises(TypeError, match="weigh_by: expected the key"):
        with_options("scratch_fsdp_zero3", weigh_by=3)
