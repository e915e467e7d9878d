"""A run that any engine saved at any number of ranks is continued by any other at any other: the
same bits after the move, and the same training.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp import MixedPrecisionPolicy, load_sharded, save_sharded
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from lightning_fsdp.engines.fsdp2 import FSDP2Engine
from lightning_fsdp.engines.scratch import ScratchEngine
from tests.support.ranks import run_on_ranks

WORLD_SIZES = (1, 2, 3, 4)
ENGINES = {"scratch": ScratchEngine, "fsdp1": FSDP1Engine, "fsdp2": FSDP2Engine, "ddp": None}
GLOBAL_BATCH = 12  # divides by every number of ranks
NUM_STEPS = 2  # before the move, and after it


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6)
        self.scale = nn.Parameter(torch.ones(1))  # smaller than most numbers of ranks

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A tied weight, a frozen one, tiny ones, and a buffer that each rank writes on its own."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[0].up.weight.requires_grad_(False)
        self.register_buffer("mark", torch.zeros(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_optimizers(module):
    """Two groups, of which one holds a frozen parameter; and an optimizer that has no state."""
    named = dict(module.named_parameters())
    scales = [p for n, p in named.items() if n.endswith("scale")]
    matrices = [p for n, p in named.items() if n.endswith("weight") and "norm" not in n]
    others = [p for n, p in named.items() if n.endswith("bias") or "norm.weight" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=1e-3, eps=1e-4), torch.optim.SGD(scales, lr=1e-2)]


class Run:
    """A model under one engine, with its optimizers."""

    def __init__(self, kind, seed, zero_stage=3):
        self.module = self.wrapped = Model(seed)
        self.engine = None
        if ENGINES[kind] is None:
            # Which keeps its buckets: DDP otherwise makes others after the first step of any run,
            # and sums of more than two ranks then round in another order.
            self.wrapped = DistributedDataParallel(self.module, find_unused_parameters=True)
        else:
            self.engine = ENGINES[kind](zero_stage=zero_stage, units=["Layer"], cpu_offload=False)
        if self.engine and self.engine.shows_whole_shapes:
            self.shard()
        self.optimizers = make_optimizers(self.module)
        if self.engine and not self.engine.shows_whole_shapes:
            self.shard()
        for optimizer in self.optimizers if self.engine else ():
            self.engine.watch_optimizer(optimizer)
        self.module.mark.fill_(dist.get_rank() + 10 * seed)

    def shard(self):
        self.engine.shard(self.module, device=torch.device("cpu"), precision=MixedPrecisionPolicy())

    def train(self, steps):
        for step in steps:
            tokens = torch.randint(
                13, (GLOBAL_BATCH, 5), generator=torch.Generator().manual_seed(step)
            )
            share = GLOBAL_BATCH // dist.get_world_size()
            mine = tokens[dist.get_rank() * share :][:share]
            if self.engine is None:
                logits = self.wrapped(mine[:, :-1])
            else:
                logits = self.engine.run(self.module.forward, mine[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            if self.engine:
                self.engine.before_backward()
            loss.backward()
            if self.engine:
                self.engine.after_backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def whole(self):
        """Everything, in the form of plain torch."""
        if self.engine is None:
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            model = self.module.state_dict()
        else:
            states = [self.engine.full_optimizer_state_dict(o) for o in self.optimizers]
            model = self.engine.full_state_dict()
        return {"model": model, "optimizers": states}


def copied(value):
    """Not to be changed by training."""
    if isinstance(value, dict):
        return {key: copied(v) for key, v in value.items()}
    if isinstance(value, list):
        return [copied(v) for v in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder per engine and number of ranks: the checkpoint, and what the run was then and
    later."""
    root = tmp_path_factory.mktemp("matrix")
    for world_size in WORLD_SIZES:
        run_on_ranks(_write, world_size, root, timeout_s=40)
    return root


def _write(rank, world_size, root):
    for kind in ENGINES:
        folder = root / f"{kind}-{world_size}"
        run = Run(kind, seed=1)
        run.train(range(NUM_STEPS))
        save_sharded(folder, run.module, run.optimizers, {"steps": NUM_STEPS})
        then = copied(run.whole())
        run.train(range(NUM_STEPS, 2 * NUM_STEPS))
        later = run.whole()
        if rank == 0:
            torch.save({"then": then, "later": later}, folder / "expected.pt")
        dist.barrier()


def _moves(kind, world_size):
    """Whose checkpoints this one reads: over all readers each three of the four values of a move
    (who wrote, on how many, who reads, on how many) meet once. And its own.
    """
    kinds, numbers = list(ENGINES), len(WORLD_SIZES)
    to = kinds.index(kind) + WORLD_SIZES.index(world_size)
    for i, j in itertools.product(range(len(kinds)), range(numbers)):
        move = kinds[i], WORLD_SIZES[j]
        if (i + j + to) % numbers == 0 or move == (kind, world_size):
            yield move


def _read(rank, world_size, root, kind):
    for writer, writers in _moves(kind, world_size):
        what = f"{writer} on {writers} -> {kind} on {world_size}"
        folder = root / f"{writer}-{writers}"
        expected = torch.load(folder / "expected.pt")
        run = Run(kind, seed=2)
        extra = load_sharded(folder, run.wrapped, run.optimizers)
        assert extra == {"steps": NUM_STEPS}, what
        assert run.module.mark.tolist() == [10, 10], what  # that of rank 0
        assert_equal(run.whole(), expected["then"], what)
        run.train(range(NUM_STEPS, 2 * NUM_STEPS))
        is_same = (writer, writers) == (kind, world_size)
        tolerance = 0 if is_same else 5e-7
        found = run.whole()
        for name, theirs in expected["later"]["model"].items():
            torch.testing.assert_close(
                found["model"][name],
                theirs,
                atol=tolerance,
                rtol=0,
                msg=lambda text, w=what, n=name: f"{w}, {n}: {text}",
            )
        if is_same:
            assert_equal(found, expected["later"], what)


def assert_equal(found, expected, what):
    """Bit for bit."""
    if isinstance(expected, dict):
        assert list(map(str, found)) == list(map(str, expected)), (what, list(found))
        for key, value in expected.items():
            assert_equal(found[key], value, f"{what}, {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), what
        for index, value in enumerate(expected):
            assert_equal(found[index], value, f"{what}, {index}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, what
        assert found.shape == expected.shape, what
        assert torch.equal(found, expected), f"{what}: {found} is not {expected}"
    else:
        assert found == expected, what


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_engine_continues_what_any_other_saved(saved, kind, world_size):
    run_on_ranks(_read, world_size, saved, kind, timeout_s=280)
