"""A model with its optimizers under each engine, trained and compared bit for bit."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fsdp import MixedPrecisionPolicy
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from lightning_fsdp.engines.fsdp2 import FSDP2Engine
from lightning_fsdp.engines.scratch import ScratchEngine

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
    """Two groups, of which one holds a frozen parameter; one without state of parameters."""
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
            own = self.optimizers[1].state  # entries of no parameter, as some optimizers count
            own["num_steps"] = own.get("num_steps", 0) + 1
            own["seen"] = {"tokens": tokens[0].float()}

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
