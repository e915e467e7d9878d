"""The whole copy goes through its states as flat_parameter.py draws them, whatever ends a pass."""

import pytest
import torch
import torch.distributed as dist

from lightning_fsdp import ZERO2, ZERO3, shard_model
from lightning_fsdp.core.engine.communicator import Pending
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.ranks import pairs
from lightning_fsdp.core.safety import guards
from lightning_fsdp.core.sharded_module import units_in
from tests.support.models import mlp, mlp_batch, mlp_loss
from tests.support.one_host import new_mesh
from tests.support.ranks import run_on_ranks

DRAWN = {("sharded", "gathering"), ("gathering", "unsharded"), ("unsharded", "sharded")}


class _Noted:
    """Stands for ``FlatParameter.state``, and notes which state follows which."""

    def __init__(self):
        self.changes = set()

    def __get__(self, flat_param, owner):
        return flat_param.__dict__["copy"]

    def __set__(self, flat_param, state):
        if "copy" in flat_param.__dict__:
            self.changes.add((flat_param.state, state))
        flat_param.__dict__["copy"] = state


def _run(rank, world_size, plan):
    noted = FlatParameter.state = _Noted()
    model = shard_model(mlp(), plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):  # from the second on, gathers start ahead
        mlp_loss(model, mlp_batch(step, 0, rank)).backward()
        optimizer.step()
        with torch.no_grad():
            mlp_loss(model, mlp_batch(step, 0, rank))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    return noted.changes


@pytest.mark.parametrize("plan", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_each_state_is_left_for_the_one_that_is_drawn_after_it(plan):
    assert run_on_ranks(_run, 2, plan) == [DRAWN] * 2


def _interrupt_before_the_wait(rank, world_size):
    model = shard_model(mlp(), ZERO3)
    (flat_param, *_) = units_in(model)[0].flat_params
    flat_param.unshard("a holder")
    waiting = flat_param.wait_for_unshard

    def interrupt():
        flat_param.wait_for_unshard = waiting
        raise KeyboardInterrupt

    flat_param.wait_for_unshard = interrupt
    with pytest.raises(KeyboardInterrupt):
        flat_param.reshard("a holder")
    storage = flat_param.buffer.flat.untyped_storage()
    states = [(flat_param.state, storage.nbytes() > 0)]
    flat_param.abandon("a holder", drops_gradients=True)
    guards._set_access = _interrupt  # while the memory is still gone
    with pytest.raises(KeyboardInterrupt):
        flat_param.unshard("a holder")
    return [*states, (flat_param.state, storage.nbytes() > 0)]


def test_memory_that_a_gather_writes_into_is_not_freed_by_an_interrupt_before_the_wait():
    for states in run_on_ranks(_interrupt_before_the_wait, 2):
        assert states == [("gathering", True), ("sharded", False)]


class _SendsNothing:
    """A process group in which Ctrl-C comes between a receive and its send."""

    def __init__(self, group):
        self.recv = group.recv

    def send(self, *args):
        raise KeyboardInterrupt


def _interrupt_a_gather(rank, world_size, when):
    """What rank 0 was to receive, rank 1 sends when rank 0 has freed the memory."""
    model = shard_model(mlp(), ZERO3, mesh=new_mesh(2, timeout_s=1.0), comm="pairs")
    (flat_param, *_) = units_in(model)[0].flat_params
    _gather(flat_param)
    memory = flat_param.buffer.flat.numpy()  # which keeps it, so that it can be looked at
    flat_param.reshard("a holder")
    dist.barrier()
    if rank == 1:
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"gather of unit .* expected rank 0 to take"):
            _gather(flat_param)
        dist.barrier()
        return
    start = pairs.send_and_receive
    if when == "in the start":
        pairs.send_and_receive = lambda group, *args: start(_SendsNothing(group), *args)
    else:
        Pending.join = _interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        _gather(flat_param)
    flat_param.reshard("a holder")
    memory[:] = 0.0  # it belongs to somebody else now
    dist.barrier()
    dist.barrier()
    assert not memory.any(), "something has arrived"
    del caught  # as long as an error is handled, there are the frames that it went through


def _gather(flat_param):
    flat_param.unshard("a holder")
    flat_param.wait_for_unshard()


def _interrupt(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["in the start", "in the wait"])
def test_nothing_is_written_to_memory_that_an_interrupted_gather_freed(when):
    run_on_ranks(_interrupt_a_gather, 2, when)
