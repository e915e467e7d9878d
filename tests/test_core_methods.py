"""Methods other than forward, and state dicts: what goes in and out whole."""

import pytest
import torch
from torch import nn

from lightning_fsdp import (
    ZERO2,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    register_forward_method,
    shard_model,
)
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, bytes_of
from tests.support.models import (
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    shard_lm_by_hand,
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
from tests.support.ranks import errors_on_ranks, run_on_ranks

# --- methods ---


def _generate(rank, world_size):
    prompt = torch.tensor([[5, 17, 3]])
    expected = tiny_gpt2().eval().generate(prompt, max_new_tokens=6, do_sample=False)
    results = {}
    for name, plan in PLANS.items():
        model = shard_model(tiny_gpt2(), plan).eval()
        register_forward_method(model, "generate")
        results[name] = model.generate(prompt, max_new_tokens=6, do_sample=False)
        lm_loss(model.train(), token_batch(0, 0, rank)).backward()
        assert all(p.grad is not None for p in model.parameters())
    return expected, results


def test_generate_of_gpt2_gives_the_same_tokens():
    for expected, results in run_on_ranks(_generate, 2):
        for name, tokens in results.items():
            assert torch.equal(tokens, expected), name


class _Scorer(nn.Module):
    """All its work is in a method that is not forward; it calls a unit inside it and uses weights
    of its own.
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.weight = nn.Parameter(torch.randn(7, 3))

    def score(self, inputs, *, power=1):
        return self.layer(inputs).tanh() @ self.weight**power


def _train_by_method(rank, world_size):
    torch.manual_seed(0)
    model = _Scorer()
    fully_shard(model.layer)
    fully_shard(model)
    register_forward_method(model, "score")
    torch.manual_seed(0)
    reference = _Scorer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    their_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        (model.score(mlp_batch(step, 0, rank)["inputs"], power=2) ** 2).mean().backward()
        for each in range(world_size):
            loss = (reference.score(mlp_batch(step, 0, each)["inputs"], power=2) ** 2).mean()
            (loss / world_size).backward()
        for each in (optimizer, their_optimizer):
            each.step()
            each.zero_grad()
    return (
        {name: whole(p) for name, p in model.named_parameters()},
        {name: whole(p) for name, p in reference.named_parameters()},
    )


def test_a_registered_method_gathers_trains_and_passes_its_arguments():
    for ours, theirs in run_on_ranks(_train_by_method, 2):
        assert_same_tensors(ours, theirs, atol=1e-6)


def _register_wrong(rank, world_size, name):
    model = fully_shard(mlp())
    model.of_the_object = lambda inputs: model(inputs)
    register_forward_method(nn.Linear(2, 2) if name == "forward of a stranger" else model, name)


@pytest.mark.parametrize("name", ["no_such_method", "scale", "of_the_object"])
def test_registering_what_is_no_method_is_refused(name):
    for error in errors_on_ranks(_register_wrong, 1, name):
        assert error is not None
        assert error.type_name == "ValueError"
        assert name in error.message


def _explicit_unshard(rank, world_size):
    model, inputs = causal_lm(width=24), token_batch(0, 0, rank)["tokens"][:, :-1]
    shard_lm_by_hand(model, fully_shard)
    block, gathers = model.blocks[0], {}
    with torch.no_grad(), StorageTracker(model) as tracker:
        model(inputs)
        with CollectiveCounter() as counter:
            block.unshard()
            handle = model.blocks[1].unshard(async_op=True)
            handle.wait()
        gathers["unshard"] = counter.num_gathers(world_size)
        gathers["whole"] = len(tracker.whole_sizes())
        with CollectiveCounter() as counter:
            model(inputs)
        gathers["forward"] = counter.num_gathers(world_size)
        block.unshard()
        block.reshard()
        gathers["whole after reshard"] = len(tracker.whole_sizes())
    return gathers


def test_explicit_unshard_gathers_ahead_and_reshard_frees():
    for gathers in run_on_ranks(_explicit_unshard, 2):
        assert gathers == {"unshard": 2, "whole": 2, "forward": 7 - 2, "whole after reshard": 0}


# --- state dicts ---


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
