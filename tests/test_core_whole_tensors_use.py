"""What users do around the steps of an optimizer over whole tensors: hooks, copies, other writers.

Descent updates each element by itself, so that the reference is arithmetic on whole tensors.
"""

import copy

import pytest
import torch

from lightning_fsdp import (
    full_optimizer_state_dict,
    full_state_dict,
    load_sharded,
    optimizers_follow,
    save_sharded,
    shard_model,
)
from lightning_fsdp.core.optimizers import travel
from lightning_fsdp.core.optimizers.whole_state import kept_by
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from recipes.optimizer import MuonAndAdamW, OptimizerConfig
from tests.support.cases import each_on_ranks
from tests.support.memory import StorageTracker
from tests.support.models import causal_lm, lm_loss, token_batch
from tests.support.optimizers import Normed, assert_same_state
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks


class Descent(torch.optim.Optimizer):
    """SGD that nothing is known of."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.fails = False

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.fails:
            raise ValueError("as asked")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)

    def update(self, parameter, group):
        parameter.add_(parameter.grad, alpha=-group["lr"])


def _backward(model, rank, step=0):
    lm_loss(model, token_batch(step, 0, rank)).backward()


def _matrices(model):
    return [p for p in model.blocks.parameters() if p.ndim == 2]


def _of(model, name):
    return {key: value for key, value in full_state_dict(model).items() if name in key}


def _gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _assert_stepped(model, before, gradients, lr=0.1):
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, before[name].add(gradients[name], alpha=-lr)), name


# --- who else writes, and when ---


def _hooks(rank, world_size):
    """Those of the user stand around the whole of it."""
    model = shard_model(causal_lm())
    optimizer = Descent(model.parameters())
    seen = {}

    def halve(*_):
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    def look(*_):
        seen.update({name: p.to_local().clone() for name, p in model.named_parameters()})

    for step in range(2):  # registered before the first step, and after it
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(look)
        _backward(model, rank, step)
        before, gradients = full_state_dict(model), _gradients(model)
        optimizer.step()
        _assert_stepped(model, before, gradients, lr=0.1 * 0.5 ** (step + 1))
        for name, parameter in model.named_parameters():
            assert torch.equal(seen[name], parameter.to_local()), name
        optimizer.zero_grad()


def _written_by_another(rank, world_size):
    """In a hook of AdamW, which steps parameters of the same memory."""
    model = shard_model(causal_lm())
    matrices = _matrices(model)
    ids = set(map(id, matrices))
    optimizer = Descent(matrices)
    adamw = torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids])
    writes = [lambda p: p.mul_(0), lambda p: p.data.add_(1), lambda p: p.to_local().fill_(2)]
    for step, write in enumerate([None, *writes]):
        _backward(model, rank, step)
        if write is not None:
            optimizer.param_groups[0]["lr"] = 0.0

            def clear(*_, write=write):
                with torch.no_grad():
                    for parameter in matrices:
                        write(parameter)

            hook = adamw.register_step_post_hook(clear)
            adamw.step()
            hook.remove()
            before = {p.spec.name: p.full_tensor() for p in matrices}
        optimizer.step()
        if write is not None:
            for parameter in matrices:
                assert torch.equal(parameter.full_tensor(), before[parameter.spec.name])
        optimizer.zero_grad()
        adamw.zero_grad()


class _SetsData(Descent):
    def update(self, parameter, group):
        parameter.data = parameter.data.add(parameter.grad, alpha=-group["lr"])


def _data_is_set(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _SetsData(model.parameters())
    for step in range(2):
        _backward(model, rank, step)
        before, gradients = full_state_dict(model), _gradients(model)
        optimizer.step()
        _assert_stepped(model, before, gradients)
        optimizer.zero_grad()


def _options_change(rank, world_size):
    """In a closure."""
    model = shard_model(causal_lm())
    optimizer = Descent(model.parameters())
    before = full_state_dict(model)

    def closure():
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.note = "seen"
        _backward(model, rank)

    optimizer.step(closure)
    assert_same_state(dict(full_state_dict(model)), dict(before))
    assert (optimizer.param_groups[0]["lr"], optimizer.note) == (0.0, "seen")


def _a_step_fails(rank, world_size):
    """What it had gathered is not stepped later."""
    model = shard_model(causal_lm())
    optimizer = Descent(model.parameters())
    _backward(model, rank)
    optimizer.fails = True
    with pytest.raises(ValueError, match="as asked"):
        optimizer.step()
    optimizer.fails = False
    optimizer.zero_grad()
    _backward(model, rank, 1)
    chosen = [p for p in model.parameters() if "blocks" not in p.spec.name]
    before = _of(model, "blocks")
    for parameter in model.parameters():
        if "blocks" in parameter.spec.name:
            parameter.grad = None
    optimizer.step()
    assert chosen
    assert_same_state(_of(model, "blocks"), before)


class _Bound(Descent):
    """Keeps a method of its own, and a state that is nobody's."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.chosen = self.with_moment
        self.state["count"] = torch.zeros(())

    def with_moment(self, parameter, group):
        state = self.state[parameter]
        state["moment"] = state.get("moment", 0) + parameter.grad
        self.state["count"] = self.state["count"] + 1
        parameter.add_(state["moment"], alpha=-group["lr"])

    def update(self, parameter, group):
        self.chosen(parameter, group)


def _bound_methods(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _Bound(_matrices(model))
    _backward(model, rank)
    gradients = _gradients(model)
    optimizer.step()
    state = full_optimizer_state_dict(optimizer)["state"]
    for place, parameter in enumerate(_matrices(model)):
        assert torch.equal(state[place]["moment"], gradients[parameter.spec.name])
    assert state["count"] > 0


CASES = [
    _hooks, _written_by_another, _data_is_set, _options_change, _a_step_fails, _bound_methods,
]  # fmt: skip


def _run_case(rank, world_size, case):
    case(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_is_one_of_the_users_optimizer(world_size):
    each_on_ranks(_run_case, world_size, CASES)


class _Writes(Descent):
    """Keeps the slices that it got when it was built."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.kept = [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.kept:
                parameter.sub_(0.1)


def _writes_to_slices(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _Writes(model.parameters())
    _backward(model, rank)
    optimizer.step()


class _Several(torch.optim.Optimizer):
    def __init__(self, optimizers):
        super().__init__([g for each in optimizers for g in each.param_groups], {})
        self.optimizers = optimizers

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


def _steps_several(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _Several([torch.optim.AdamW(model.parameters())])
    _backward(model, rank)
    optimizer.step()


class ScheduleFreeAdamW(Descent):
    """By name, one whose eval() and train() write to parameters."""


def _is_schedule_free(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = ScheduleFreeAdamW(model.parameters())
    _backward(model, rank)
    optimizer.step()


class _Sums(Descent):
    def __init__(self, parameters):
        super().__init__(parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)


def _allocates_beside_slices(rank, world_size):
    model = shard_model(causal_lm())
    optimizer = _Sums(model.parameters())
    _backward(model, rank)
    optimizer.step()


def _in_another_order(rank, world_size):
    model = shard_model(causal_lm())
    equal = [block.up.weight for block in model.blocks]
    optimizer = Descent(equal[::-1] if rank else equal)
    _backward(model, rank)
    optimizer.step()


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        (_writes_to_slices, "RuntimeError", "has written to the slices of 'embedding.weight'"),
        (_steps_several, "NotImplementedError", "steps another optimizer, .optimizers"),
        (_is_schedule_free, "NotImplementedError", "elementwise_optimizer"),
        (_allocates_beside_slices, "RuntimeError", "'sum' of 'embedding.weight'"),
        (_in_another_order, "RuntimeError", "Descent steps blocks.0.up.weight"),
    ],
)
def test_what_cannot_be_right_is_named_on_every_rank(case, error, message):
    assert_errors(errors_on_ranks(case, 2), error, message)


# --- state of before ---


def _stepped_before_sharding(rank, world_size, make, follow):
    model = causal_lm()
    optimizer = make(model)
    _backward(model, 0)
    optimizer.step()
    model.zero_grad()
    if follow:
        with optimizers_follow(model, optimizer):
            shard_model(model)
    else:
        shard_model(model)
    for step in (1, 2):
        _backward(model, 0, step)  # the same on all ranks
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model), full_optimizer_state_dict(optimizer), len(optimizer.state)


def _in_one_process(make):
    model = causal_lm()
    optimizer = make(model)
    for step in range(3):
        _backward(model, 0, step)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def _normed(model):
    return Normed(_matrices(model))


def _muon_and_adamw(model):
    matrices = _matrices(model)
    ids = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in ids]
    return MuonAndAdamW(matrices, [{"params": others}], OptimizerConfig(lr=0.01))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("make", [_normed, _muon_and_adamw])
def test_state_of_before_sharding_goes_on(make, follow):
    found = run_on_ranks(_stepped_before_sharding, 2, make, follow)
    weights, state = _in_one_process(make)
    for ours, our_state, _ in found:
        for name, value in weights.items():
            torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=0)
        assert sorted(our_state["state"]) == sorted(state["state"])
    if make is _normed:  # no rank keeps what another owns
        assert sum(num_entries for _, _, num_entries in found) == len(state["state"])


def _save_state_of_before(rank, world_size, folder):
    model = causal_lm()
    optimizer = _normed(model)
    _backward(model, 0)
    optimizer.step()
    model.zero_grad()
    shard_model(model)
    for step in (1, 2):
        _backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    save_sharded(folder, model, [optimizer])
    state = full_optimizer_state_dict(optimizer)["state"]
    other = shard_model(causal_lm(seed=5))
    restored = _normed(other)
    load_sharded(folder, other, [restored])
    assert_same_state(full_optimizer_state_dict(restored)["state"], state)


def test_only_owners_write_state(tmp_path):
    run_on_ranks(_save_state_of_before, 2, tmp_path)


def _save_adafactor(rank, world_size, folder):
    model = shard_model(causal_lm())
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    _backward(model, rank)
    optimizer.step()
    save_sharded(folder, model, [optimizer])
    return full_optimizer_state_dict(optimizer)


def test_a_plain_model_reads_state_of_other_shapes(tmp_path):
    expected = run_on_ranks(_save_adafactor, 2, tmp_path)[0]
    model = causal_lm(seed=5)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    load_sharded(tmp_path, model, [optimizer])
    assert_same_state(optimizer.state_dict()["state"], expected["state"])


def _copied(rank, world_size):
    """Owners that came about in three steps are not those of a plan of all at once."""
    model = shard_model(causal_lm())
    parts = [[p for p in block.parameters() if p.ndim == 2] for block in model.blocks]
    optimizer = torch.optim.Muon(parts[0][:1], lr=0.02)
    for step, more in enumerate([[*parts[0][1:], *parts[1]], [*parts[2], model.head.weight], []]):
        _backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        if more:
            optimizer.add_param_group({"params": more})
    copied_model, copied = copy.deepcopy((model, optimizer))
    state = full_optimizer_state_dict(optimizer)
    assert_same_state(full_optimizer_state_dict(copied)["state"], state["state"])
    owners = [
        [piece.owner for piece in whole_tensors_of(each).pieces()] for each in (optimizer, copied)
    ]
    assert owners[0] == owners[1]
    assert copied_model is not model


def test_a_copy_has_the_same_owners():
    run_on_ranks(_copied, 2)


def _frozen(rank, world_size):
    model = causal_lm()
    for block in list(model.blocks)[:2]:
        block.requires_grad_(False)
    shard_model(model)
    optimizer = torch.optim.Muon(_matrices(model), lr=0.02)
    communicator = model.head.weight.spec.communicator
    sent = []
    for step in range(3):
        before = getattr(communicator.traffic.get("all_to_all"), "sent_bytes", 0)
        _backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        sent.append(communicator.traffic["all_to_all"].sent_bytes - before)
    return sent


def test_what_is_never_stepped_travels_once():
    found = run_on_ranks(_frozen, 2)
    assert any(first > second for first, second, _ in found)
    assert all(second == third for _, second, third in found)


_BUCKET_BYTES = 2**12


def _step_under_a_tracker(rank, world_size):
    """Bytes that a step has beyond those before it, and what it may have."""
    travel._BUCKET_BYTES = _BUCKET_BYTES
    model = shard_model(causal_lm(num_blocks=60))
    optimizer = Descent(_matrices(model))
    _backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    _backward(model, rank, 1)
    peak = 0

    def see():
        nonlocal peak
        peak = max(peak, tracker.live_bytes())

    tracker = StorageTracker(model, see)
    tracker.track(kept_by(optimizer))
    before = tracker.live_bytes()
    with tracker:
        optimizer.step()
    pieces = [piece for piece in whole_tensors_of(optimizer).pieces() if piece.is_cut]
    gradients = sum(4 * piece.cut.numel for piece in pieces if piece.is_here)
    largest = max(piece.cut.numel for piece in pieces)
    travels = sum(4 * piece.local.numel() for piece in pieces if not piece.is_here)
    # A bucket once as parts, once together, on its way and on arrival; sums of bits as int64.
    bucket = 4 * (world_size * _BUCKET_BYTES + 4 * largest) + 24 * largest
    return peak - before, gradients + bucket, travels, bucket


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_holds_its_tensors_and_a_bucket_of_what_travels(world_size):
    for held, allowed, _, _ in run_on_ranks(_step_under_a_tracker, world_size):
        assert 0 < held <= allowed
