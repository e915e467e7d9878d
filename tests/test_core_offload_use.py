"""Offloading beside access, state and exceptions; what is refused; which memory holds what."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from lightning_fsdp import (
    ZERO2,
    CPUOffloadPolicy,
    full_optimizer_state_dict,
    full_state_dict,
    fully_shard,
    gradients,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    shard_model,
    weights,
)
from tests.support import ranks
from tests.support.models import TASKS, causal_lm, mlp
from tests.support.offloaded import CLIP, OFFLOAD, POLICIES, flat_params_of, stages_of
from tests.support.parity import (
    OPTIMIZERS,
    adamw,
    assert_same_tensors,
    assert_traces_match,
    batches_for,
    on_host,
    train_on_rank,
)
from tests.support.places import HOST, TwoPlaces
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# --- what surrounds a step ---


def _access(rank, world_size, offload):
    task, seen = TASKS["mlp"], []
    with TwoPlaces() if offload else contextlib.nullcontext() as places:
        model = shard_model(task.build(), offload_policy=offload)
        g = gradients(model)

        def on_reduced(name, shard, micro_batch):
            assert offload is None or places.place_of(shard) in (HOST, None)
            seen.append((name, shard.clone(), micro_batch))
            shard.mul_(2)

        g.on_reduced(on_reduced)
        with g.micro_batches("separate"):
            for micro_batch in range(2):
                task.loss(model, task.make_batch(0, micro_batch, rank)).backward()
        results = {
            "norm": g.norm(),
            "dot": g.dot(0, 1),
            **{f"{name} of 1": whole for name, whole in g.full(micro_batch=1)},
            **{f"whole {name}": g[name].full() for name in g},
            **{f"weight {name}": whole for name, whole in weights(model).full()},
            **{f"{name} as it came {n}": shard for name, shard, n in seen},
        }
        with g.micro_batches("local"):
            task.loss(model, task.make_batch(0, 2, rank)).backward()
        results.update({f"then {name}": g[name].full() for name in g})
    assert offload is None or places.mixtures == []
    return results


def test_gradients_and_weights_are_accessed_as_without_offloading():
    offloaded, resident = (run_on_ranks(_access, 2, offload) for offload in (OFFLOAD, None))
    for ours, theirs in zip(offloaded, resident, strict=True):
        assert_same_tensors(ours, theirs, atol=0)


def _save_and_load(rank, world_size, offload):
    task = TASKS["lm"]
    with TwoPlaces() if offload else contextlib.nullcontext() as places:
        model = shard_model(task.build(), offload_policy=offload)
        optimizer = adamw(model.parameters())
        batches = batches_for("lm", world_size, num_steps=3)
        train_on_rank(model, batches[:2], task.loss, optimizer, rank)
        state, optimizer_state = full_state_dict(model), full_optimizer_state_dict(optimizer)
        again = shard_model(causal_lm(seed=5), ZERO2, offload_policy=offload)
        resumed = adamw(again.parameters())
        load_full_state_dict(again, state)
        load_full_optimizer_state_dict(resumed, optimizer_state)
        traces = [
            train_on_rank(each, batches[2:], task.loss, its_optimizer, rank)
            for each, its_optimizer in ((model, optimizer), (again, resumed))
        ]
    assert offload is None or places.mixtures == []
    moments = {n: s["exp_avg"] for n, s in optimizer_state["state"].items()}
    return state, moments, traces


def test_state_is_saved_and_loaded_as_without_offloading():
    (offloaded, _), (resident, _) = (
        run_on_ranks(_save_and_load, 2, offload) for offload in (OFFLOAD, None)
    )
    for ours, theirs in zip(offloaded[:2], resident[:2], strict=True):
        assert_same_tensors(ours, theirs, atol=0)
    for trace in offloaded[2]:
        assert_traces_match(trace, resident[2][0], atol=0)


class _Failing(nn.Module):
    """Three layers; the backward fails in the first while gradients of the last come home."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.fails = False

    def forward(self, inputs):
        for index, layer in enumerate(self.layers):
            inputs = layer(inputs)
            if index == 0 and self.fails:
                inputs.register_hook(self._fail)
        return inputs

    def _fail(self, gradient):
        self.stages = list(map(stages_of, flat_params_of(self)))
        raise ArithmeticError("in the middle of a backward")


def _go_on_after_failure(rank, world_size, offload, fails):
    torch.manual_seed(1)
    model = shard_model(_Failing(), units=["Linear"], offload_policy=offload)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for model.fails in [fails, False]:
        optimizer.zero_grad()
        try:
            model(torch.full((2, 5), 1.0 + rank)).square().mean().backward()
        except ArithmeticError:
            assert offload is None or 0 in model.stages  # the last copy was to come
            assert {*map(stages_of, flat_params_of(model))} == {None}
    optimizer.step()
    return full_state_dict(model)


def test_after_an_exception_the_next_step_is_right():
    expected = run_on_ranks(_go_on_after_failure, 2, None, False)
    assert_same_tensors(
        run_on_ranks(_go_on_after_failure, 2, OFFLOAD, True)[0], expected[0], atol=0
    )


# --- what is refused ---


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def _wrong(rank, world_size, what):
    model = mlp()
    if what == "no policy":
        fully_shard(model, offload_policy="cpu")
    elif what == "pinned":
        fully_shard(model, offload_policy=CPUOffloadPolicy())
    elif what == "pinned, torch's":
        fully_shard(model, offload_policy=torch_fsdp.CPUOffloadPolicy())
    elif what == "ranks differ":
        fully_shard(model, offload_policy=OFFLOAD if rank == 0 else None)
    elif what == "tied":
        tied = _Tied()
        fully_shard(tied.first, offload_policy=OFFLOAD)
        fully_shard(tied.second)
    elif what == "moved":
        fully_shard(model, offload_policy=OFFLOAD).to("meta")(torch.ones(2, 7))


no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="memory can be pinned here"
)


@pytest.mark.parametrize(
    ("what", "types", "words"),
    [
        ("no policy", "TypeError", ["offload_policy", "CPUOffloadPolicy", "'cpu'"]),
        pytest.param("pinned", "ValueError", ["pin_memory=False"], marks=no_accelerator),
        pytest.param("pinned, torch's", "ValueError", ["pin_memory=False"], marks=no_accelerator),
        ("ranks differ", "RuntimeError", ["ranks disagree", "CPUOffloadPolicy", "not offloaded"]),
        ("tied", "ValueError", ["unit 'Linear'", "one offload_policy", "CPUOffloadPolicy", "None"]),
        ("moved", "NotImplementedError", ["stays on cpu", "moved to meta", "full_state_dict"]),
    ],
)
def test_what_cannot_be_offloaded_is_named(what, types, words):
    assert_errors(errors_on_ranks(_wrong, 2, what), types, *words)


# --- which memory holds what ---


def _train_and_look(rank, world_size, offload, precision):
    task, computes_on = TASKS["mlp"], ranks.active_device
    model = shard_model(task.build(), mp_policy=POLICIES[precision], offload_policy=offload)
    optimizer = adamw(model.parameters())
    batches = batches_for("mlp", world_size, num_steps=3)
    trace = train_on_rank(model, batches, task.loss, optimizer, rank, accumulation="sum", clip=CLIP)
    task.loss(model, batches[0][0][rank]).backward()
    is_pinned = offload is not None and offload.pin_memory
    device = computes_on if offload is None else "cpu"
    with pytest.raises(NotImplementedError, match=f"stays on {device}.*moved to meta"):
        model.to("meta")
    # A gradient that travels in the reduce dtype is widened where it arrives.
    is_widened = precision == "bf16 reduce"
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            assert tensor.device.type == tensor.to_local().device.type == device
        assert parameter.to_local().is_pinned() == is_pinned
        assert parameter.grad.to_local().is_pinned() == (is_pinned and not is_widened)
    assert {s.buffer.flat.device.type for s in flat_params_of(model)} == {computes_on}
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == device
    return on_host(trace)


@pytest.mark.parametrize("precision", list(POLICIES))
@pytest.mark.parametrize("pin_memory", [pytest.param(True, marks=pytest.mark.gpu), False])
def test_shards_are_on_the_host_and_values_are_those_of_the_device(pin_memory, precision):
    """On a GPU the optimizer steps on another processor: its last bits may differ."""
    if pin_memory and ranks.active_device == "cpu":
        pytest.skip("needs a CUDA device: pytest --device cuda")
    offload = CPUOffloadPolicy(pin_memory=pin_memory)
    offloaded, resident = (
        run_on_ranks(_train_and_look, 1, each, precision)[0] for each in (offload, None)
    )
    assert_traces_match(offloaded, resident, atol=1e-6 if precision == "fp32" else 1e-3)
