"""The gradient scaler of torch's engines has one answer for all ranks, from one collective."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from lightning_fsdp.engines.fsdp2 import FSDP2Engine
from lightning_fsdp.engines.torch_internals import AgreeingGradScaler
from tests.support.fake_device import DEVICE, entered
from tests.support.ranks import run_on_ranks

_HOST, _DEVICE = torch.device("cpu"), torch.device("cuda", 0)
# By rank, where it has gradients: nowhere, on the host (offloaded), on both.
_FOUND = ({}, {_HOST: 0.0}, {_HOST: 0.0, _DEVICE: 1.0})


def _agree(rank, world_size):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    scaler = AgreeingGradScaler.of(torch.amp.GradScaler("cpu"), _HOST)
    found = {device: torch.tensor(value) for device, value in _FOUND[rank].items()}

    def unscale(self, optimizer):
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found

    torch.amp.GradScaler.unscale_ = unscale  # in this process alone
    asked, all_reduce = [], dist.all_reduce

    def count(tensor, op):
        asked.append(tensor.device)
        all_reduce(tensor, op)

    dist.all_reduce = count
    scaler.unscale_(optimizer)
    return asked, {device: value.item() for device, value in found.items()}


def test_ranks_ask_once_wherever_their_gradients_are():
    for rank, (asked, found) in enumerate(run_on_ranks(_agree, 3, group_timeout_s=20)):
        assert asked == [_HOST]  # where the scaler is, and its group communicates
        assert found == dict.fromkeys(_FOUND[rank] or [_HOST], 1.0)


def _unscale_on_the_host(rank, world_size):
    with entered() as (waits, _):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        scaler = AgreeingGradScaler.of(torch.amp.GradScaler("cpu"), DEVICE)
        scaler.scale(torch.zeros((), device=DEVICE))
        optimizer = torch.optim.SGD([parameter])
        found, _ = waits.during(lambda: scaler.unscale_(optimizer))
        return found


def test_gradients_on_the_host_wait_for_the_scale():
    (found,) = run_on_ranks(_unscale_on_the_host, 1, backend=None)
    assert found
    assert not any("no wait" in what for what in found), found


def _unscale_dtensors(rank, world_size):
    model = fully_shard(torch.nn.Linear(3, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters())
    scaler = AgreeingGradScaler.of(torch.amp.GradScaler("cpu", init_scale=4.0), _HOST)
    factor = torch.full((), float("inf") if rank == 1 else 4.0)
    scaler.scale(torch.zeros(()))
    model(torch.ones(1, 3)).sum().backward()
    model.weight.grad.to_local().mul_(factor)
    with CommDebugMode() as collectives:
        scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    found = [each.item() for each in state["found_inf_per_device"].values()]
    return found, collectives.get_total_counts(), model.weight.grad.to_local()


def test_slices_of_fsdp2_are_unscaled_with_one_question_to_the_others():
    """NCCL takes no number that lies on the host, as offloaded slices do."""
    for rank, (found, num_asked, piece) in enumerate(run_on_ranks(_unscale_dtensors, 2)):
        assert found == [1.0]
        assert num_asked == 1
        assert torch.equal(piece, torch.full((2, 3), float("inf") if rank == 1 else 1.0))


def test_offloaded_on_a_device_fsdp2_has_this_scaler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    scaler = torch.amp.GradScaler("cpu")
    for is_offloaded in (True, False):
        engine = FSDP2Engine(zero_stage=3, units=None, cpu_offload=is_offloaded)
        assert isinstance(engine.agreeing(scaler), AgreeingGradScaler) == is_offloaded
