"""State dicts: what goes in and out whole, and what costs nothing."""

import pytest
import torch
from torch import nn

from lightning_fsdp import (
    ZERO2,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    shard_model,
)
from tests.support.cases import each_on_ranks
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, bytes_of
from tests.support.models import (
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    tied_lm,
    tiny_gpt2,
    token_batch,
)
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    Trace,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    train_on_rank,
    train_reference,
    whole,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


def _look_at_state_dict(rank, world_size, plan):
    for build in (mlp, causal_lm, tied_lm, tiny_gpt2):
        model, expected = shard_model(build(), PLANS[plan]), build().state_dict()
        with CollectiveCounter() as counter:
            state = model.state_dict()
        assert counter.calls == [], "state_dict communicates"
        assert list(state) == list(expected)
        for name, tensor in state.items():
            assert tensor.shape == expected[name].shape, name
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(whole(tensor), expected[name]), name


@pytest.mark.parametrize("plan", PLANS)
def test_state_dict_has_original_names_and_shapes_and_costs_nothing(plan):
    run_on_ranks(_look_at_state_dict, 3, plan)


def _load_full_tensors(rank, world_size, plan):
    for build in (mlp, tied_lm):
        model = shard_model(build(), PLANS[plan])
        other = {name: 0.5 * tensor + 1 for name, tensor in build().state_dict().items()}
        before = dict(model.named_parameters())
        keys = model.load_state_dict(other)
        assert keys.missing_keys == keys.unexpected_keys == []
        assert all(p is before[name] for name, p in model.named_parameters())
        for name, tensor in model.state_dict().items():
            assert torch.equal(whole(tensor), other[name]), name
        # and back through its own state dict
        again = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(build().state_dict())
        model.load_state_dict(again)
        for name, tensor in model.state_dict().items():
            assert torch.equal(whole(tensor), other[name]), name
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other, "norm.weight": torch.zeros(3)})


@pytest.mark.parametrize("plan", PLANS)
def test_load_state_dict_takes_whole_tensors_and_keeps_its_slice(plan):
    run_on_ranks(_load_full_tensors, 3, plan)


def _load_between_forward_and_step(rank, world_size):
    """A ZeRO-2 cache does not survive a load."""
    model, reference = shard_model(mlp(), ZERO2), mlp()
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    model.zero_grad()
    other = {name: 0.5 * tensor for name, tensor in mlp().state_dict().items()}
    model.load_state_dict(other)
    reference.load_state_dict(other)
    with torch.no_grad():
        inputs = mlp_batch(0, 0, 0)["inputs"]
        assert torch.equal(model(inputs), reference(inputs))


def test_a_load_replaces_what_zero2_keeps():
    run_on_ranks(_load_between_forward_and_step, 2)


def _full_round_trip(rank, world_size, folder):
    for index, build in enumerate((mlp, tied_lm, tiny_gpt2)):
        model = shard_model(build())
        state = full_state_dict(model)
        if rank == 0:
            expected = build().state_dict(keep_vars=True)
            assert list(state) == list(expected)
            for name, tensor in state.items():
                same = [other for other in expected if expected[other] is expected[name]]
                assert [other for other in state if state[other] is tensor] == same
                assert type(tensor) is torch.Tensor, f"{name}: {type(tensor)}"
                assert torch.equal(tensor, expected[name]), name
            torch.save(state, folder / f"{index}.pt")
            build().load_state_dict(torch.load(folder / f"{index}.pt", weights_only=True))
        torch.distributed.barrier()
        loaded = torch.load(folder / f"{index}.pt", weights_only=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_full_state_dict(model, loaded)
        for name, tensor in model.state_dict().items():
            assert torch.equal(whole(tensor), loaded[name]), name


@pytest.mark.parametrize("world_size", [1, 3])
def test_full_state_dict_is_a_plain_file_and_loads_back(world_size, tmp_path):
    run_on_ranks(_full_round_trip, world_size, tmp_path)


def _write_to_what_was_saved(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    shard_model(model, ignored_params={model[1].weight})
    state = full_state_dict(model)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    for name, tensor in state.items():
        assert torch.equal(tensor, before[name]), name


def test_a_full_state_shares_no_memory_with_the_module():
    run_on_ranks(_write_to_what_was_saved, 2)


def _full_state_in_little_memory(rank, world_size):
    """Nothing is held on the way beside the result."""
    model = shard_model(tiny_gpt2(width=64, num_blocks=4))
    peaks = []
    with StorageTracker(model) as tracker:
        at_rest = tracker.settled_bytes()
        tracker.at_each_operation = lambda: peaks.append(tracker.live_bytes())
        state = full_state_dict(model)
    result = bytes_of(state.values())
    assert result > 4 * max(bytes_of([tensor]) for tensor in state.values())
    assert result <= max(peaks) - at_rest <= result + 4096


def _with_a_copy_of_a_weight(rank, world_size):
    model = shard_model(causal_lm())
    model.register_buffer("start", model.head.weight.detach().clone())
    before = model.head.weight.full_tensor()
    with torch.no_grad():
        model.head.weight.add_(1.0)
    for rank0_only in (False, True):
        state = full_state_dict(model, rank0_only=rank0_only)
        if rank == 0 or not rank0_only:
            assert torch.equal(state["start"], before)
            assert torch.equal(state["head.weight"], before + 1)


def test_a_copy_of_a_weight_has_values_of_its_own():
    run_on_ranks(_with_a_copy_of_a_weight, 2)


def test_full_state_dict_gathers_into_the_result_alone():
    run_on_ranks(_full_state_in_little_memory, 2)


def _full_on_rank_0(rank, world_size, dtype):
    model, dense = shard_model(tied_lm().to(dtype)), tied_lm().to(dtype)
    for (name, parameter), expected in zip(
        model.named_parameters(), dense.parameters(), strict=True
    ):
        with CollectiveCounter() as counter:
            made = parameter.full_tensor(rank0_only=True)
        assert made.shape == expected.shape, name
        assert made.dtype == dtype, name
        if rank == 0:
            assert torch.equal(made, expected), name
        else:
            assert made.is_meta, name
        kinds = {call.kind for call in counter.calls}
        assert kinds <= {"recv" if rank == 0 else "send"}, name
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_rank_0_alone_wants_whole_the_others_send_and_do_not_hold(dtype):
    run_on_ranks(_full_on_rank_0, 3, dtype)


def _train_resume(rank, world_size):
    """A full state put into a fresh model continues as if nothing had happened (SGD without
    momentum).
    """
    model = shard_model(causal_lm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        lm_loss(model, token_batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh = shard_model(causal_lm(seed=2))
    load_full_state_dict(fresh, _on_all_ranks(full_state_dict(model), rank))
    for each in (model, fresh):
        lm_loss(each, token_batch(2, 0, rank)).backward()
    assert_same_tensors(
        {name: whole(p.grad) for name, p in fresh.named_parameters()},
        {name: whole(p.grad) for name, p in model.named_parameters()},
        atol=0,
    )


def _on_all_ranks(state, rank):
    box = [state if rank == 0 else None]
    torch.distributed.broadcast_object_list(box)
    return box[0]


def test_a_full_state_continues_training():
    run_on_ranks(_train_resume, 2)


def _optimizer_state_dict(rank, world_size):
    """An optimizer's own state dict goes into another optimizer of the same sharding."""
    model = shard_model(mlp())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    optimizer.step()
    fresh = OPTIMIZERS["adamw"](model.parameters())
    fresh.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        ours, theirs = fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"]
        assert ours.shape == parameter.shape
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


def test_optimizer_state_has_original_shapes_and_loads():
    run_on_ranks(_optimizer_state_dict, 2)


def _batches(world_size):
    return make_batches(mlp_batch, num_steps=4, num_micro_batches=1, world_size=world_size)


def _continue_from_full_states(rank, world_size, name):
    """Two steps, then two more in a model and an optimizer that start from the others' states."""
    batches, model = _batches(world_size), shard_model(mlp())
    optimizer = OPTIMIZERS[name](model.parameters())
    train_on_rank(model, batches[:2], mlp_loss, optimizer, rank)
    states = full_state_dict(model), full_optimizer_state_dict(optimizer)
    fresh = shard_model(mlp(seed=2))
    optimizer = OPTIMIZERS[name](fresh.parameters())
    load_full_state_dict(fresh, states[0])
    load_full_optimizer_state_dict(optimizer, states[1])
    return train_on_rank(fresh, batches[2:], mlp_loss, optimizer, rank)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_full_states_of_model_and_optimizer_continue_as_if_nothing_had_happened(name):
    plain = train_reference(mlp(), _batches(2), mlp_loss, OPTIMIZERS[name])
    expected = Trace(plain.losses[2:], plain.gradients[2:], plain.parameters[2:])
    for trace in run_on_ranks(_continue_from_full_states, 2, name):
        assert_traces_match(trace, expected, atol=1e-7)


def _look_in_inference_mode(rank, world_size, plan):
    model = shard_model(mlp(), PLANS[plan])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    optimizer.step()
    expected = full_state_dict(model), full_optimizer_state_dict(optimizer)["state"]
    with torch.inference_mode():
        found = full_state_dict(model), full_optimizer_state_dict(optimizer)["state"]
        model.load_state_dict(model.state_dict())
        for parameter in model.parameters():
            parameter.data.mul_(2)
            parameter.grad.data.mul_(2)
    assert_same_tensors(found[0], expected[0], atol=0)
    for index, values in expected[1].items():
        assert_same_tensors(found[1][index], values, atol=0)
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, 2 * expected[0][name]), name
    optimizer.step()


def test_state_is_taken_and_written_in_inference_mode():
    each_on_ranks(_look_in_inference_mode, 2, PLANS)
