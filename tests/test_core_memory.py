"""What is allocated, as a tracker of live storages sees it that knows nothing of the core.

The same GPT-2 step runs unsharded under the same tracker: what is alive there beside parameters and
gradients are the activations. What a sharded step holds beyond activations and shards, at every
unit boundary, are whole parameters and whole gradients.

    forward, after unit i     at most the next unit, gathered ahead
    backward, after unit i    at most the next unit, and unit i's gradient in its reduction
    after either              nothing
"""

import pytest
import torch

from lightning_fsdp import fully_shard, shard_model
from tests.support.memory import (
    SLACK_BYTES,
    StorageTracker,
    bytes_of,
    optimizer_tensors,
    storages_of,
    tensors_of,
)
from tests.support.models import (
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    shard_lm_by_hand,
    tiny_gpt2,
    token_batch,
)
from tests.support.parity import OPTIMIZERS
from tests.support.ranks import run_on_ranks

GPT2 = {"width": 64, "num_blocks": 4}


def gpt2_batch(step, rank):
    return token_batch(step, 0, rank, size=1, length=8, vocabulary=97)


class Boundaries:
    """Measures at every unit boundary of a GPT-2 step; put on after sharding, so that it looks
    after the core did.
    """

    def __init__(self, model, tracker, batch):
        self.model, self.tracker = model, tracker
        self.held = {}  # boundary -> bytes beyond shards, buffers and the batch
        self.batch = list(batch.values())
        self.storages = {}  # unit name -> identities of the storages it computed on
        self.live = {}  # boundary -> unit name -> bytes still in those storages
        body = model.transformer
        blocks = list(body.h)
        self.units = {f"h.{i}": block for i, block in enumerate(blocks)}
        self.handles = []
        for name, inner, block in zip(
            self.units, [b.mlp.c_fc for b in blocks], blocks, strict=True
        ):
            self.handles.append(inner.register_forward_pre_hook(self._remember(name, block)))
        for name, module in [
            ("wte", body.wte),
            ("wpe", body.wpe),
            *self.units.items(),
            ("ln_f", body.ln_f),
        ]:
            self.handles.append(module.register_forward_hook(self._after_forward(name)))
        self.handles.append(model.lm_head.register_forward_hook(self._after_forward("lm_head")))

    def measure(self, boundary, *, is_settled=False):
        known = [*tensors_of(self.model), *self.batch]
        read = self.tracker.settled_bytes if is_settled else self.tracker.live_bytes
        self.held[boundary] = read(exclude=known)
        live = self.tracker.live()
        self.live[boundary] = {
            name: sum(live.get(key, 0) for key in keys) for name, keys in self.storages.items()
        }

    def remove(self):
        for handle in self.handles:
            handle.remove()

    def _remember(self, name, block):
        def hook(module, args):
            self.storages[name] = storages_of(block.parameters())

        return hook

    def _after_forward(self, name):
        def hook(module, args, output):
            self.measure(f"forward {name}")
            output = output[0] if isinstance(output, tuple) else output
            # Fires when everything behind this output is through backward, before the module's own
            # backward.
            output.register_hook(lambda grad: self.measure(f"backward down to {name}"))

        return hook


def measure_step(model, tracker, batch):
    boundaries = Boundaries(model, tracker, batch)
    loss = lm_loss(model, batch)
    boundaries.measure("after forward", is_settled=True)
    loss.backward()
    del loss
    boundaries.measure("after backward", is_settled=True)
    boundaries.remove()
    return boundaries


def _hold_at_boundaries(rank, world_size):
    plain = tiny_gpt2(**GPT2)
    unit_bytes = 4 * sum(p.numel() for p in plain.transformer.h[0].parameters())
    with StorageTracker(plain) as tracker:
        activations = measure_step(plain, tracker, gpt2_batch(0, rank)).held
    model = tiny_gpt2(**GPT2)
    with StorageTracker() as tracker:
        shard_model(model)
        tracker.track(tensors_of(model))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        steps = []
        for step in range(3):
            boundaries = measure_step(model, tracker, gpt2_batch(step, rank))
            tracker.track(tensors_of(model))
            optimizer.step()
            optimizer.zero_grad()
            state = bytes_of(optimizer_tensors(optimizer))
            extra = {
                name: held - activations[name] - (state if step else 0)
                for name, held in boundaries.held.items()
            }
            steps.append((extra, boundaries.live))
    assert all(activations[name] > 0 for name in activations if name.startswith("forward"))
    return unit_bytes, steps


def test_zero3_holds_nothing_whole_at_unit_boundaries():
    for unit_bytes, steps in run_on_ranks(_hold_at_boundaries, 2):
        for extra, live in steps:
            _check_forward(extra, unit_bytes)
            _check_backward(extra, unit_bytes)
            _check_own_storages(live, unit_bytes)


def _check_forward(extra, unit_bytes):
    boundaries = [name for name in extra if name.startswith("forward")]
    assert boundaries == [
        f"forward {name}" for name in ("wte", "wpe", "h.0", "h.1", "h.2", "h.3", "ln_f", "lm_head")
    ]
    for name in boundaries:
        assert extra[name] <= 1.05 * unit_bytes + SLACK_BYTES, f"{name}: {extra[name]} bytes whole"
    head_bytes = 4 * tiny_gpt2(**GPT2).lm_head.weight.numel()  # stays for the backward
    assert extra["after forward"] <= 1.05 * head_bytes + SLACK_BYTES, (
        f"after forward: {extra['after forward']} bytes whole"
    )


def _check_backward(extra, unit_bytes):
    boundaries = [name for name in extra if name.startswith("backward down to h.")]
    assert len(boundaries) == 4
    for name in boundaries:
        # The next unit, gathered ahead; this unit's gradient and what its reduction receives.
        assert extra[name] <= 1.05 * 3 * unit_bytes + SLACK_BYTES, (
            f"{name}: {extra[name]} bytes whole"
        )
    assert abs(extra["after backward"]) <= SLACK_BYTES, (
        f"after backward: {extra['after backward']} bytes"
    )


def _check_own_storages(live, unit_bytes):
    """The very storages that a block computed on are empty once it is through, in forward and in
    backward.
    """
    for index in range(4):
        own = f"h.{index}"
        assert live[f"forward {own}"][own] == 0, f"{own} is whole after its forward"
        assert live["after forward"][own] == 0
        if index:
            assert live[f"backward down to h.{index - 1}"][own] == 0, (
                f"{own} is whole after its backward"
            )
    assert set(live["after backward"].values()) == {0}


def _count_whole_units(rank, world_size, make_sharded, batch_of):
    """Most units whole at once and most bytes in them, of forward and backward and of a forward
    alone.
    """
    peaks, model = [], make_sharded()
    with StorageTracker(model) as tracker:
        sizes = []
        tracker.at_each_operation = lambda: sizes.append(tracker.whole_sizes())
        for step in range(3):
            lm_loss(model, batch_of(step, rank)).backward()
            with torch.no_grad():
                lm_loss(model, batch_of(step, rank))
            peaks.append((max(map(len, sizes)), max(map(sum, sizes))))
            sizes.clear()
    return peaks


def _gpt2():
    return shard_model(tiny_gpt2(**GPT2))


def _lm():
    return shard_lm_by_hand(causal_lm(width=96), fully_shard, reshard_after_forward=True)


def _lm_batch(step, rank):
    return token_batch(step, 0, rank)


@pytest.mark.parametrize("world_size", [2, 3])
def test_at_most_two_units_are_whole_at_any_operation(world_size):
    for peaks in run_on_ranks(_count_whole_units, world_size, _lm, _lm_batch):
        assert [number for number, _ in peaks] == [2, 2, 2]


def test_never_more_than_two_units_bytes_are_whole():
    """GPT-2: the tied weight is gathered beside the embedding's and the head's own parameters."""
    largest = 4 * sum(p.numel() for p in tiny_gpt2(**GPT2).transformer.h[0].parameters())
    for peaks in run_on_ranks(_count_whole_units, 2, _gpt2, gpt2_batch):
        for _, most in peaks:
            assert largest <= most <= 2.02 * largest


def _change_a_shard_before_backward(rank, world_size):
    """Backward must use what the shards say then, as plain autograd does when a weight's data
    changes.
    """
    model, reference = mlp(), mlp()
    for module in (model.first, model.second, model.last, model):
        fully_shard(module)
    loss = mlp_loss(model, mlp_batch(0, 0, 0))
    expected = mlp_loss(reference, mlp_batch(0, 0, 0))
    with torch.no_grad():
        model.second.weight.mul_(2.0)
        reference.second.weight.data.mul_(2.0)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    unchanged = mlp()
    mlp_loss(unchanged, mlp_batch(0, 0, 0)).backward()
    torch.testing.assert_close(
        model.first.weight.grad.full_tensor(), reference.first.weight.grad, rtol=1e-5, atol=1e-8
    )
    distance = (reference.first.weight.grad - unchanged.first.weight.grad).abs().max()
    assert distance > 1e-4, "the change makes no difference: the test shows nothing"


@pytest.mark.parametrize("world_size", [2, 3])
def test_backward_gathers_the_shards_again(world_size):
    run_on_ranks(_change_a_shard_before_backward, world_size)
