"""What tensors of another device do to checkpoints, buffers, memory and backends, without one."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, gradients, shard_model
from lightning_fsdp.checkpoint import state as checkpoint_state
from lightning_fsdp.core.tensors.norms import scale
from lightning_fsdp.engines import native_state, scratch
from tests.support.fake_device import DEVICE, entered
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks


def _engine():
    return scratch.ScratchEngine(zero_stage=3, units=None, cpu_offload=False)


def test_ranks_tell_each_other_of_state_on_the_host():
    # A tensor of a device is unpickled there, on the device of the rank that has sent it: the
    # receiver gets a context on it, or an error if it does not see it.
    with FakeTensorMode():
        step = torch.ones((), device="cuda")
        (of_sharded,) = checkpoint_state._of_all_ranks([{"slices": {}, "state": {"w": [step]}}])
        engine = SimpleNamespace(range_here=lambda _: (0, 1), is_cut=lambda *_: False)
        with mock.patch.object(native_state, "all_gather_objects", lambda mine: [mine]):
            of_native = native_state._kinds_on_any_rank(engine, {0: {"step": step}}, ["w"])
    assert of_sharded["state"]["w"][0].device.type == "cpu"
    assert of_native[0]["step"][1].device.type == "cpu"


def _waits(rank, world_size):
    found = {}
    with entered() as (waits, _):
        for policy in (None, CPUOffloadPolicy()):
            layers = [nn.Linear(16, 16) for _ in range(4)]
            model = shard_model(nn.Sequential(*layers), units=["Linear"], offload_policy=policy)
            for _ in range(2):
                model(torch.zeros(4, 16, device=DEVICE)).sum().backward()
            both = [p.grad for p in model.parameters()]
            factor = torch.ones((), dtype=torch.float64, device=DEVICE)
            scaling = waits.during(lambda g=both, f=factor: scale(g, f))[0]
            largest = waits.during(lambda g=both: g[0].max())[0]
            found[policy is not None] = scaling, largest
    return found


def test_scaling_gradients_and_their_largest_element_wait_for_no_more_than_one_number():
    (found,) = run_on_ranks(_waits, 1, backend=None)
    assert found[False] == ([], [])
    assert found[True][0] == ["copy to pageable memory in norms.<lambda>"]


def _buffers_alone(rank, world_size):
    module = nn.Module()
    module.register_buffer("mask", torch.ones(4))
    with mock.patch.object(scratch, "device_type_of", return_value="meta"):
        _engine().shard(module, device=torch.device("meta"), precision=MixedPrecisionPolicy())
    return module.mask.device.type


def test_a_module_of_buffers_alone_moves_to_the_device():
    assert run_on_ranks(_buffers_alone, 1) == ["meta"]


def _on_gloo(rank, world_size):
    _engine().shard(
        nn.Linear(2, 2), device=torch.device("cuda", 0), precision=MixedPrecisionPolicy()
    )


def test_a_backend_that_leaves_the_device_aside_is_refused():
    assert_errors(
        errors_on_ranks(_on_gloo, 2),
        "ValueError",
        "process_group_backend: expected one with which this core shards on cuda:0, got 'gloo'",
    )


def _offload_on_a_host_with_a_device(rank, world_size):
    def unpinned(make):
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch, "zeros", unpinned(torch.zeros)),
        mock.patch.object(torch, "empty_like", unpinned(torch.empty_like)),
    ):
        model = shard_model(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy())
        model(torch.ones(2, 4)).sum().backward()
        return [whole.sum().item() for _, whole in gradients(model).full()]


def test_what_is_computed_on_the_host_pins_nothing_where_there_is_a_device():
    assert run_on_ranks(_offload_on_a_host_with_a_device, 2) == [[32.0, 8.0]] * 2
