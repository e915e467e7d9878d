"""The gradient scaler of FSDP1 has one answer for all ranks, from one collective."""

import torch
import torch.distributed as dist

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
