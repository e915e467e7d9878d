"""The meters the core is judged with see what they claim to see."""

import hashlib
import threading

import torch
import torch.distributed as dist
from torch import nn

from lightning_fsdp.core.torch_internals import all_gather_single, reduce_scatter_single
from tests.support.counting import CollectiveCounter
from tests.support.memory import StorageTracker, tensors_of
from tests.support.ranks import PLAIN, run_on_ranks


def test_the_tracker_follows_storages_that_are_emptied_and_refilled():
    with StorageTracker() as tracker:
        tensor = torch.zeros(1000)
        view = tensor[10:]
        assert tracker.live_bytes() == 4000
        tensor.untyped_storage().resize_(0)
        assert tracker.live_bytes() == 0
        view.untyped_storage().resize_(2000)
        assert tracker.live_bytes() == 2000
        assert tracker.live_bytes(exclude=[tensor]) == 0
        del tensor
        assert tracker.live_bytes() == 2000
        del view
        assert tracker.live_bytes() == 0


def test_the_tracker_sees_what_only_autograd_holds():
    module = nn.Linear(10, 10, bias=False)
    with StorageTracker(module) as tracker:
        outputs = (module(torch.ones(5, 10)).exp() ** 2).sum()
        # Inputs, the exponential (twice, saved by two operations) and the sum.
        assert tracker.live_bytes(exclude=tensors_of(module)) == 4 * (50 + 50 + 1)
        outputs.backward()
        assert tracker.live_bytes(exclude=tensors_of(module)) == 4
        assert module.weight.grad is not None


def test_what_another_thread_is_about_to_let_go_of_is_not_counted():
    """As a thread of gloo that waits for a processor; both are ready to run."""
    with StorageTracker() as tracker:
        held, kept = [torch.zeros(1000)], torch.zeros(10)

        def let_go_late():
            hashlib.sha256(bytes(2**26))  # without Python's lock
            held.clear()

        thread = threading.Thread(target=let_go_late)
        thread.start()
        assert tracker.settled_bytes() == kept.nbytes
        thread.join()


def _count(rank, world_size):
    """Each kind once, some of them from inside a backward."""
    control = dist.new_group(backend="gloo")
    part, whole = torch.ones(4), torch.zeros(4 * world_size)
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(
        lambda _: torch.autograd.Variable._execution_engine.queue_callback(
            lambda: all_gather_single(whole, part)
        )
    )
    outputs = leaf * 2
    outputs.grad_fn.register_prehook(lambda _: reduce_scatter_single(part, whole))
    peer = 1 - rank
    with CollectiveCounter() as counter:
        outputs.sum().backward()
        dist.all_to_all_single(whole, whole.clone())
        works = [dist.irecv(whole[:2], peer), dist.irecv(whole[2:4], peer)]
        works += [dist.isend(part[:2], peer), dist.isend(part[2:], peer)]
        for work in works:
            work.wait()
        dist.all_reduce(part, group=control)
        all_gather_single(whole, part, group=control)
    kinds = [call.kind for call in counter.data()]
    control_kinds = [call.kind for call in counter.control()]
    return (
        kinds,
        control_kinds,
        counter.num_gathers(world_size),
        counter.num_reductions(world_size),
        counter.gathered_bytes(world_size),
        counter.reduced_bytes(world_size),
    )


def test_the_counter_sees_every_collective_in_forward_and_backward():
    for backend in ("gloo", PLAIN):
        for counted in run_on_ranks(_count, 2, backend=backend):
            kinds, control_kinds, *numbers = counted
            assert kinds == [
                "reduce_scatter",
                "all_gather",
                "all_to_all",
                *["recv"] * 2,
                *["send"] * 2,
            ]
            assert control_kinds == ["all_reduce", "all_gather"]
            # Two gathers with 16 bytes of the peer's each, two reductions with 16 to the peer.
            assert numbers == [2, 2, 32, 32]
