"""A steady step queues its work and goes on: the host waits for the device nowhere in the core.

A wait costs twice: the device runs dry, and gathers and reductions stop overlapping with compute.
"""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, shard_model
from tests.support.fake_device import DEVICE, entered
from tests.support.parity import PLANS
from tests.support.ranks import run_on_ranks

BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.up, self.down = nn.Linear(20, 61), nn.Linear(61, 20)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Tied embedding and head."""

    def __init__(self, recomputes):
        super().__init__()
        self.embedding = nn.Embedding(67, 20)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(20, 67, bias=False)
        self.head.weight = self.embedding.weight
        self.recomputes = recomputes

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            if self.recomputes:
                hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = block(hidden)
        return self.head(hidden)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, fused=True)


def step_of(
    plan,
    *,
    make_optimizer=fused_adamw,
    num_micro_batches=1,
    recomputes=False,
    clip=None,
    scales=False,
    default_device=None,
    has_replicas=False,
    **arguments,
):
    """A training step of a sharded model on the device."""
    model = shard_model(Model(recomputes), PLANS[plan], **arguments)
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=scales)

    def step():
        with default_device or contextlib.nullcontext():
            for index in range(num_micro_batches):
                is_last = index == num_micro_batches - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    tokens = torch.zeros(2, 9, dtype=torch.long, device=DEVICE)
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                    scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                clip(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return step


def by_norm(model, norm_type=2.0):
    model.clip_grad_norm_(1.0, norm_type)


def by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.1)


CASES = {
    "sgd": {"make_optimizer": sgd},
    "adamw": {"make_optimizer": functools.partial(torch.optim.AdamW, foreach=True)},
    "fused adamw": {},
    "accumulation": {"num_micro_batches": 3},
    "clipping by norm": {"clip": by_norm},
    "clipping by largest": {"clip": functools.partial(by_norm, norm_type=float("inf"))},
    "clipping by value": {"clip": by_value},
    "bf16": {"mp_policy": BF16},
    "bf16, accumulation, clipping": {"mp_policy": BF16, "num_micro_batches": 2, "clip": by_norm},
    "recomputation": {"recomputes": True},
    "default device": {"default_device": DEVICE, "clip": by_norm},
    "replicas": {"has_replicas": True, "clip": by_norm},
    "state over all": {"has_replicas": True, "state_over": "all", "clip": by_norm},
    "state over all, accumulation": {
        "has_replicas": True,
        "state_over": "all",
        "num_micro_batches": 2,
    },
    "scaler, fused": {"scales": True},
}
OFFLOADED = {"offload_policy": CPUOffloadPolicy(), "make_optimizer": sgd}
# The host steps, so it has to have the gradients; those of each flat parameter come by themselves.
LANDINGS = ["synchronize in host_memory.landed"] * 4
NORM_OVER_THE_DEVICE = [
    "copy from pageable memory in norms.partial_norm",
    "copy to pageable memory in norms.global_norm",
]
ANSWER_OVER_THE_DEVICE = [
    "synchronize in whole_values._unscale",  # torch has queued copies of scale and answer
    "copy from pinned memory in whole_values._unscale",
    "copy to pinned memory in whole_values._unscale",
]
# The scale and the answer, which it divides and skips by.
OF_A_FUSED_STEP = ["copy to pageable memory in optimizer_guard.bring_scale"] * 2
MUST_WAIT = {
    "scaler": ({"make_optimizer": sgd, "scales": True}, ["_local_scalar_dense in torch"]),
    "offload": (OFFLOADED, LANDINGS),
    "offload, bf16": (OFFLOADED | {"mp_policy": BF16}, LANDINGS),
    "offload, clipping": (OFFLOADED | {"clip": by_norm}, LANDINGS + NORM_OVER_THE_DEVICE),
    "offload, scaler": (OFFLOADED | {"scales": True}, LANDINGS + ANSWER_OVER_THE_DEVICE),
    "offload, scaler, fused": (
        OFFLOADED | {"scales": True, "make_optimizer": fused_adamw},
        LANDINGS + ANSWER_OVER_THE_DEVICE + OF_A_FUSED_STEP,
    ),
}
ALL_OPTIONS = CASES | {name: options for name, (options, _) in MUST_WAIT.items()}
# ZeRO-2 differs in what stays whole: over micro-batches, where a block runs again, and where shards
# come from the host. What steps and clips sees shards alone.
OF_PLAN = {
    "zero2": [
        *("fused adamw", "accumulation", "bf16, accumulation, clipping", "recomputation"),
        *("state over all, accumulation", "offload, bf16"),
    ],
    "zero3": list(ALL_OPTIONS),
}


def _pairs_of(names):
    return [(plan, name) for plan in PLANS for name in OF_PLAN[plan] if name in names]


@functools.cache
def _observed(plan):
    """By case, what a fourth step waits for, and asks."""
    (seen,) = run_on_ranks(_observe, 1, plan, backend=None, timeout_s=600)
    return seen


def _observe(rank, world_size, plan):
    seen = {}
    with entered() as (waits, mesh):
        for name in OF_PLAN[plan]:
            options = ALL_OPTIONS[name]
            step = step_of(plan, mesh=mesh if "has_replicas" in options else None, **options)
            step()  # the order of units is not known yet
            step()  # nor is that with gathers ahead
            step()  # nor what follows such a step
            seen[name] = waits.during(step)
    return seen


@pytest.mark.parametrize(("plan", "name"), _pairs_of(CASES))
def test_a_steady_step_waits_for_nothing(plan, name):
    waits, _ = _observed(plan)[name]
    assert waits == []


@pytest.mark.parametrize(("plan", "name"), _pairs_of(MUST_WAIT))
def test_what_has_to_wait_is_known(plan, name):
    waits, _ = _observed(plan)[name]
    _, expected = MUST_WAIT[name]
    assert waits == expected


@pytest.mark.parametrize(("plan", "name"), _pairs_of(ALL_OPTIONS))
def test_a_steady_step_asks_other_hosts_no_more_than_it_must(plan, name):
    _, questions = _observed(plan)[name]
    # A backward that reduces says who used what, and needs no answer where all was used here.
    # Where a backward without reduction and one with it follow equal gathers in turns, each asks.
    options = ALL_OPTIONS[name]
    forks = plan == "zero3" and "num_micro_batches" in options and "state_over" not in options
    turns = ["agree", "agree"] if forks else []
    assert questions == [*turns, "any_rank"]


# --- the record itself ---


def _copy(pins, non_blocking, to_device):
    host, device = torch.zeros(3, pin_memory=pins), torch.zeros(3, device=DEVICE)
    source, target = (host, device) if to_device else (device, host)
    target[:2].copy_(source[:2], non_blocking=non_blocking)


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "writing by a mask": lambda x: x.index_put_((x > 0,), x.sum()),
    "equal": lambda x: torch.equal(x, x),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "a value made on the host": lambda x: torch.tensor(1.0, device=DEVICE),
    "to the host": lambda x: x.cpu(),
    "places on the host": lambda x: x[torch.arange(2)],
    "synchronize": lambda x: torch.cuda.synchronize(),
    "pageable to device": lambda x: _copy(False, True, True),
    "pageable to host": lambda x: _copy(False, True, False),
    "pinned, blocking": lambda x: _copy(True, False, False),
    "what is on its way to the host": lambda x: x.to("cpu", non_blocking=True) + 1,
}
GOES_ON = {
    "arithmetic": lambda x: (x @ x).softmax(0).clamp(min=0.5),
    "a value made there": lambda x: torch.full((), 1.0, device=DEVICE),
    "a mask as a factor": lambda x: torch.where(x > 0, x, 0.0),
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "like one of the host": lambda x: torch.empty_like(torch.zeros(3), device=DEVICE),
    "pinned to device": lambda x: _copy(True, True, True),
    "pinned to host": lambda x: _copy(True, True, False),
    "to the host, and back": lambda x: x.to("cpu", non_blocking=True).to(DEVICE, non_blocking=True),
    "item of the host": lambda x: torch.zeros(3).sum().item(),
}


def _try_each(rank, world_size):
    with entered() as (waits, _):
        x = torch.zeros(4, 4, device=DEVICE)
        return {
            name: len(waits.during(functools.partial(function, x))[0])
            for name, function in {**WAITS, **GOES_ON}.items()
        }


def test_the_record_knows_what_waits():
    (seen,) = run_on_ranks(_try_each, 1, backend=None)
    assert seen == dict.fromkeys(WAITS, 1) | dict.fromkeys(GOES_ON, 0)
