"""What users do around the steps of an optimizer over whole tensors: hooks, closures, other writes;
and what a step sends and holds.

Descent updates each element by itself, so that the reference is arithmetic on whole tensors.
"""

import pytest
import torch

from lightning_fsdp import full_optimizer_state_dict, full_state_dict, shard_model
from lightning_fsdp.core.optimizers import travel
from lightning_fsdp.core.optimizers.whole_tensors import whole_tensors_of
from lightning_fsdp.engines.owned_state import kept_by
from tests.support.cases import each_on_ranks
from tests.support.memory import StorageTracker
from tests.support.models import causal_lm
from tests.support.optimizers import assert_same_state
from tests.support.ranks import PLAIN, run_on_ranks
from tests.support.whole_tensors import Descent, backward, matrices_of


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
    model = shard_model(causal_lm(num_blocks=2))
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
        backward(model, rank, step)
        before, gradients = full_state_dict(model), _gradients(model)
        optimizer.step()
        _assert_stepped(model, before, gradients, lr=0.1 * 0.5 ** (step + 1))
        for name, parameter in model.named_parameters():
            assert torch.equal(seen[name], parameter.to_local()), name
        optimizer.zero_grad()


def _written_by_another(rank, world_size):
    """In a hook of AdamW, which steps parameters of the same memory."""
    model = shard_model(causal_lm(num_blocks=2))
    matrices = matrices_of(model)
    ids = set(map(id, matrices))
    optimizer = Descent(matrices)
    adamw = torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids])
    writes = [lambda p: p.mul_(0), lambda p: p.data.add_(1), lambda p: p.to_local().fill_(2)]
    for step, write in enumerate([None, *writes]):
        backward(model, rank, step)
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
    model = shard_model(causal_lm(num_blocks=2))
    optimizer = _SetsData(model.parameters())
    for step in range(2):
        backward(model, rank, step)
        before, gradients = full_state_dict(model), _gradients(model)
        optimizer.step()
        _assert_stepped(model, before, gradients)
        optimizer.zero_grad()


def _options_change(rank, world_size):
    """In a closure."""
    model = shard_model(causal_lm(num_blocks=2))
    optimizer = Descent(model.parameters())
    before = full_state_dict(model)

    def closure():
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.note = "seen"
        backward(model, rank)

    optimizer.step(closure)
    assert_same_state(dict(full_state_dict(model)), dict(before))
    assert (optimizer.param_groups[0]["lr"], optimizer.note) == (0.0, "seen")


def _a_step_fails(rank, world_size):
    """What it had gathered is not stepped later."""
    model = shard_model(causal_lm(num_blocks=2))
    optimizer = Descent(model.parameters())
    backward(model, rank)
    optimizer.fails = True
    with pytest.raises(ValueError, match="as asked"):
        optimizer.step()
    optimizer.fails = False
    optimizer.zero_grad()
    backward(model, rank, 1)
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
    model = shard_model(causal_lm(num_blocks=2))
    optimizer = _Bound(matrices_of(model))
    backward(model, rank)
    gradients = _gradients(model)
    optimizer.step()
    state = full_optimizer_state_dict(optimizer)["state"]
    for place, parameter in enumerate(matrices_of(model)):
        assert torch.equal(state[place]["moment"], gradients[parameter.spec.name])
    assert state["count"] > 0


def _back_in_a_group(rank, world_size):
    """A parameter that was taken out of the groups goes on with its state, at its owner."""
    model = shard_model(causal_lm(num_blocks=2))
    optimizer = _Bound(matrices_of(model))
    held = optimizer.param_groups[0]["params"]
    gone, expected = held[1], 0
    for step, parameters in enumerate([held[:], [p for p in held if p is not gone], held[:]]):
        held[:] = parameters
        optimizer.zero_grad()
        backward(model, rank, step)
        if any(p is gone for p in held):
            expected = expected + gone.grad.full_tensor()
        optimizer.step()
    state = full_optimizer_state_dict(optimizer)["state"]
    assert torch.equal(state[1]["moment"], expected)


CASES = [
    _hooks, _written_by_another, _data_is_set, _options_change, _a_step_fails, _bound_methods,
    _back_in_a_group,
]  # fmt: skip


def _run_case(rank, world_size, case):
    case(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_is_one_of_the_users_optimizer(world_size):
    each_on_ranks(_run_case, world_size, CASES)


# --- what travels, and what is held ---


def _frozen(rank, world_size):
    model = causal_lm(num_blocks=2)
    for block in list(model.blocks)[:1]:
        block.requires_grad_(False)
    shard_model(model)
    optimizer = torch.optim.Muon(matrices_of(model), lr=0.02)
    communicator = model.head.weight.spec.communicator
    sent = []
    for step in range(3):
        before = getattr(communicator.traffic.get("all_to_all"), "sent_bytes", 0)
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        sent.append(communicator.traffic["all_to_all"].sent_bytes - before)
    return sent


def test_what_is_never_stepped_travels_once():
    found = run_on_ranks(_frozen, 2)
    assert any(first > second for first, second, _ in found)
    assert all(second == third for _, second, third in found)


_BUCKET_BYTES = 2**10


def _step_under_a_tracker(rank, world_size, num_blocks):
    """Bytes that a step has beyond those before it, and what it may have."""
    travel._BUCKET_BYTES = _BUCKET_BYTES
    model = shard_model(causal_lm(num_blocks=num_blocks))
    optimizer = Descent(matrices_of(model))
    backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, rank, 1)
    peak = 0

    def see():
        nonlocal peak
        peak = max(peak, tracker.live_bytes())

    tracker = StorageTracker(model, see)
    tracker.track(kept_by(optimizer))
    before = tracker.live_bytes()
    with tracker:
        optimizer.step()
    tensors = [owned for owned in whole_tensors_of(optimizer).agree_on_owners() if owned.is_cut]
    gradients = sum(4 * owned.cut.numel for owned in tensors if owned.is_here)
    largest = max(owned.cut.numel for owned in tensors)
    # A bucket once as parts, once together, on its way and on arrival; sums of bits as int64.
    bucket = 4 * (world_size * _BUCKET_BYTES + 4 * largest) + 24 * largest
    return peak - before, gradients + bucket


# Where ranks read each other's memory, nothing is put together to travel. Elsewhere all together
# must be more than what is allowed for a bucket.
@pytest.mark.parametrize(("world_size", "backend", "num_blocks"), [(2, PLAIN, 60), (3, "gloo", 20)])
def test_a_rank_holds_its_tensors_and_a_bucket_of_what_travels(world_size, backend, num_blocks):
    for held, allowed in run_on_ranks(
        _step_under_a_tracker, world_size, num_blocks, backend=backend
    ):
        assert 0 < held <= allowed
