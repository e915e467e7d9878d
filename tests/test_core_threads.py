"""Steps called from other threads than the main one, in pieces or two at once, and hooks that run
in autograd's own threads: the same bits, the same order.
"""

import contextlib
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import CPUOffloadPolicy, gradients, shard_model
from lightning_fsdp.core.engine import torch_internals
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.optimizers import optimizer_guard
from tests.support.fake_device import DEVICE, NAME, entered
from tests.support.models import TASKS
from tests.support.one_exchange import InOneExchange
from tests.support.parity import (
    PLANS,
    Trace,
    adamw,
    assert_traces_match,
    make_batches,
    sgd,
    train_reference,
)
from tests.support.ranks import run_on_ranks


def in_a_thread(function):
    """Call in a thread of its own, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def at_once(function):
    return function()


# Where the whole step runs, and where each forward, backward, clipping and optimizer's step in it.
WAYS = {"step": (in_a_thread, at_once), "each call": (at_once, in_a_thread)}


def train(model, task, batches, rank, *, way=(at_once, at_once), dtype=None, make_optimizer=adamw):
    """Two micro-batches a step, the first without communication; clipped."""
    run_step, run = way
    trace, optimizer = Trace(), make_optimizer(model.parameters())

    def loss_of(batch, num_parts):
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            return task.loss(model, batch) / num_parts

    def step_with(micro_batches):
        loss_sum = 0.0
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = run(functools.partial(loss_of, micro_batch[rank], len(micro_batches)))
                run(loss.backward)
            loss_sum += loss.item()
        run(functools.partial(model.clip_grad_norm_, 0.3))
        trace.record(InOneExchange(model))
        run(optimizer.step)
        optimizer.zero_grad()
        trace.record_step(InOneExchange(model), loss_sum)

    for micro_batches in batches:
        run_step(functools.partial(step_with, micro_batches))
    return trace


def batches_of(task, world_size):
    return make_batches(task.make_batch, num_steps=2, num_micro_batches=2, world_size=world_size)


class Recomputing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def _build(task, recomputes):
    model = task.build()
    if recomputes:
        model.blocks = nn.ModuleList(Recomputing(block) for block in model.blocks)
    return model


OPTIONS = {
    "plain": {"plans": ("zero2", "zero3")},
    "recomputation": {"plans": ("zero3",), "recomputes": True},
    "autocast": {"plans": ("zero2",), "dtype": torch.bfloat16},
}


def _train_in(rank, world_size, option):
    task, traces = TASKS["lm"], {}
    recomputes, dtype = option.get("recomputes", False), option.get("dtype")
    for plan in option["plans"]:
        for name, way in {"main": (at_once, at_once), **WAYS}.items():
            model = shard_model(_build(task, recomputes), PLANS[plan])
            batches = batches_of(task, world_size)
            traces[plan, name] = train(model, task, batches, rank, way=way, dtype=dtype)
    return traces


@pytest.mark.parametrize("option", OPTIONS)
def test_a_step_in_other_threads_gives_the_same_bits(option):
    ranks = run_on_ranks(_train_in, 2, OPTIONS[option], timeout_s=280)
    task = TASKS["lm"]
    reference = train_reference(
        _build(task, False), batches_of(task, 2), task.loss, adamw, clip=(0.3, 2.0)
    )
    for traces in ranks:
        for plan in OPTIONS[option]["plans"]:
            for way in WAYS:
                what = f"{plan}, {way}"
                assert_traces_match(traces[plan, way], traces[plan, "main"], atol=0, what=what)
            if option == "plain":
                assert_traces_match(traces[plan, "main"], reference, atol=task.atol, what=plan)


# --- two models in two threads ---


def _train_two(rank, world_size, plan):
    names = "mlp", "lm"
    groups = [dist.new_group(list(range(world_size))) for _ in names]

    def subjects():
        for name, group in zip(names, groups, strict=True):
            mesh = DeviceMesh.from_group(group, "cpu")
            model = shard_model(TASKS[name].build(), PLANS[plan], mesh=mesh)
            batches = batches_of(TASKS[name], world_size) * 4
            yield functools.partial(train, model, TASKS[name], batches, rank, make_optimizer=sgd)

    alone = [training() for training in subjects()]
    together = list(subjects())  # sharded in one thread: groups are opened in one order
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(training) for training in together]
        return alone, [future.result() for future in futures]


@pytest.mark.parametrize("plan", PLANS)
def test_two_models_in_two_threads_train_as_one_after_the_other(plan):
    for alone, together in run_on_ranks(_train_two, 2, plan):
        for ours, theirs in zip(together, alone, strict=True):
            assert_traces_match(ours, theirs, atol=0)


def test_hooks_on_optimizers_are_registered_once_whoever_shards_first(monkeypatch):
    registered = []

    def register(hook):
        time.sleep(0.05)  # as long as it takes the other thread to get here
        registered.append(hook)

    monkeypatch.setattr(optimizer_guard, "_hooks", [])
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        monkeypatch.setattr(optimizer_guard, name, register)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(optimizer_guard.watch) for _ in range(2)]:
            each.result()
    assert len(registered) == 2


# --- autograd's own threads ---


def _events_of(run):
    """What units and reductions do meanwhile, in which threads."""
    events, threads = [], set()

    def noting(name, method):
        @functools.wraps(method)
        def noted(self, *args):
            in_backward = torch_internals.current_backward() >= 0
            events.append((name, self.name, in_backward, torch.is_grad_enabled()))
            if in_backward:
                threads.add(threading.get_ident())
            return method(self, *args)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for cls, name in (
            (Unit, "unshard"),
            (Unit, "wait_for_unshard"),
            (Unit, "reshard"),
            (FlatParameter, "receive"),
            (FlatParameter, "reduce"),
            (FlatParameter, "land"),
        ):
            patch.setattr(cls, name, noting(name, getattr(cls, name)))
        run()
    return events, threads


def _two_steps(plan, device, *, offload_policy=None, scales=False):
    layers = nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 15), nn.Tanh(), nn.Linear(15, 7)
    model = shard_model(
        nn.Sequential(*layers), PLANS[plan], units=["Linear"], offload_policy=offload_policy
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(NAME if scales else "cpu", enabled=scales)

    def run():
        for _ in range(2):
            with model.no_sync():
                scaler.scale(model(torch.zeros(4, 7, device=device)).sum()).backward()
            scaler.scale(model(torch.zeros(4, 7, device=device)).sum()).backward()
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            gradients(model).dot(None)
            optimizer.zero_grad()

    return run


def _on_the_host(rank, world_size, plan):
    events, threads = _events_of(_two_steps(plan, None))
    return events, threads == {threading.get_ident()}


def _on_a_device(rank, world_size, plan):
    with entered():
        events, threads = _events_of(_two_steps(plan, DEVICE))
    return events, len(threads) == 1 and threads != {threading.get_ident()}


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_in_the_thread_of_a_device_do_what_those_of_the_host_do(plan):
    (on_the_host,) = run_on_ranks(_on_the_host, 1, plan, backend="gloo")
    (on_a_device,) = run_on_ranks(_on_a_device, 1, plan, backend=None)
    assert on_the_host[1]
    assert on_a_device[1], "they ran in no thread of their own"
    assert on_a_device[0] == on_the_host[0]


def _states(rank, world_size, create_graph):
    """What the core may ask for, where autograd calls it: in a hook, and in a queued callback."""
    states = []

    def look():
        states.append(
            {
                "thread": threading.get_ident(),
                "is_in_backward": torch_internals.current_backward() >= 0,
                "grad": torch.is_grad_enabled(),
                "autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
                "profiler": torch_internals.profiled("a step", "of a unit")
                is not torch_internals._NOTHING,
                "modes": len(_get_current_dispatch_mode_stack()),
            }
        )

    def hook(_):
        look()
        torch_internals.call_at_end_of_backward(look)

    with entered():
        leaf = nn.Parameter(torch.zeros(4, 4, device=DEVICE))
        leaf.register_post_accumulate_grad_hook(hook)
        loss = (leaf @ leaf).sum()
        with torch.profiler.profile(), torch.autocast("cpu", torch.bfloat16):
            look()
            loss.backward(create_graph=create_graph)
    return states


@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_hands_its_threads_the_state_of_the_caller(create_graph):
    ((caller, in_hook, in_callback),) = run_on_ranks(_states, 1, create_graph, backend=None)
    assert in_hook["thread"] != caller["thread"]
    assert in_callback == in_hook
    expected = caller | {"is_in_backward": True, "grad": create_graph}
    assert in_hook == expected | {"thread": in_hook["thread"]}
    assert caller["autocast"] == torch.bfloat16
    assert caller["profiler"]
    assert caller["modes"] == 2


def _in_a_new_thread(rank, world_size):
    with entered() as (waits, _):
        for plan in PLANS:
            for policy in (None, CPUOffloadPolicy()):
                waits.in_a_thread(_two_steps(plan, DEVICE, offload_policy=policy, scales=True))
        other = []
        waits.in_a_thread(lambda: other.append(torch.zeros(1, device=NAME).device.index))
        return other


def test_steps_stay_on_their_device_in_a_thread_that_has_another():
    assert run_on_ranks(_in_a_new_thread, 1, backend=None) == [[1]]
