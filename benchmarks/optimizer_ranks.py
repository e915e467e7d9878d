"""The ranks of one arm: an optimizer that was built before or after sharding, a few steps, a look.

    arm                  model    optimizer    sharding
    after                built -----------------> x ------> built
    before_fixed         built --> built -------> x, inside of optimizers_follow
    before_not_fixed     built --> built -------> x
    lightning            built --> built -------> x, by the Trainer
    accelerate           built --> built -------> x, by Accelerator.prepare (extra ``peers``)

All arms of an engine start from the same weights and take the same batches, so that what is fixed
ends in the same bits. Each is a set of fresh processes: no arm inherits memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fsdp.bench import documents
from lightning_fsdp.callbacks.storages import Ledger
from lightning_fsdp.core.fully_shard import fully_shard
from lightning_fsdp.engines.optimizers import optimizers_follow
from lightning_fsdp.harness.environment import process_bytes
from lightning_fsdp.harness.gpt2 import build_gpt2

_STRATEGIES = {"fsdp2": "fsdp2_zero3", "scratch": "scratch_fsdp_zero3"}
_SHARDERS: dict[str, Callable[..., Any]] = {"fsdp2": fsdp.fully_shard, "scratch": fully_shard}


@dataclass
class Phase:
    """A stretch of an arm.

    Attributes:
        name: ``build``, ``shard``, ``step 1``, ...
        live_bytes: Of tensors, after each operation on them.
    """

    name: str
    live_bytes: list[int]


@dataclass
class Outcome:
    """What one rank found.

    Attributes:
        losses: Of each step, on this rank.
        weights: Digest of each whole parameter at the end.
        trained: Parameters that changed.
        num_entries: Parameters that the optimizer holds.
        num_held: Those of them that are the model's.
        phases: Memory over time.
        resting_bytes: Of tensors after the last step.
        peak_bytes: Most bytes of tensors alive at once.
        rss_bytes: Most bytes that the process had in memory.
    """

    arm: str
    rank: int
    losses: list[float]
    weights: dict[str, str]
    trained: list[str]
    num_entries: int
    num_held: int
    phases: list[Phase]
    rss_bytes: int | None = None
    resting_bytes: int = field(init=False)
    peak_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.resting_bytes = self.phases[-1].live_bytes[-1] if self.phases else 0
        self.peak_bytes = max((n for phase in self.phases for n in phase.live_bytes), default=0)


def build_model() -> nn.Module:
    """GPT-2 with embedding and head tied, 1.1 million parameters, always the same values."""
    return build_gpt2(num_layers=4, width=128, num_heads=4, vocabulary=2048, num_positions=32)


def build_optimizer(model: nn.Module) -> Optimizer:
    """AdamW without weight decay on what has one dimension."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


def make_batch(step: int, rank: int) -> Tensor:
    """``(2, 32)`` token numbers, others for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(2048, (2, 32), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of the next token."""
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ArmRank:
    """One rank of an arm, in the default process group."""

    def __init__(self, arm: str, rank: int, num_steps: int) -> None:
        self.arm, self.rank, self.num_steps = arm, rank, num_steps
        self.engine, _, self.kind = arm.partition("_")
        self.start = {name: p.detach().clone() for name, p in build_model().named_parameters()}
        self.ledger = Ledger(torch.device("cpu"))
        self._begun: list[tuple[str, int]] = []  # phases, and the ledger's clock

    def run(self) -> Outcome:
        """Train, and look at what was trained. Collective."""
        self.ledger.start()
        try:
            self.begin("build")
            train = self._train_with_lightning if self.kind == "lightning" else self._train
            return train(build_model())
        except BaseException:
            self.ledger.stop()
            raise

    def begin(self, name: str) -> None:
        """A phase; it ends with the next one, or with the look at what was trained."""
        self.ledger.settle()
        self._begun.append((name, self.ledger.num_operations + 1))

    def _phases(self) -> list[Phase]:
        totals = [sum(of_owners.values()) for of_owners in self.ledger.moments(["all"])]
        names, starts = zip(*self._begun, strict=True)
        ends = [*starts[1:], None]
        return [Phase(name, totals[i:j]) for name, i, j in zip(names, starts, ends, strict=True)]

    def look(self, losses: list[float], optimizer: Optimizer, model: nn.Module) -> Outcome:
        """After the last step, the model still sharded."""
        self.ledger.settle()
        self.ledger.stop()
        mine = {id(p) for p in model.parameters()}
        entries = [p for group in optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            wholes = {
                name: getattr(p, "full_tensor", p.detach)().clone()
                for name, p in model.named_parameters()
            }
        return Outcome(
            arm=self.arm, rank=self.rank, losses=losses, phases=self._phases(),
            weights={name: _digest(whole) for name, whole in wholes.items()},
            trained=[name for name, whole in wholes.items() if not whole.equal(self.start[name])],
            num_entries=len(entries), num_held=sum(id(p) in mine for p in entries),
            rss_bytes=process_bytes("VmHWM"),
        )  # fmt: skip

    def _train(self, model: Any) -> Outcome:
        optimizer = None if self.kind == "after" else build_optimizer(model)
        backward: Callable[[Tensor], None] = torch.Tensor.backward
        self.begin("shard")
        if self.kind == "accelerate":
            accelerator = _accelerator()
            model, optimizer = accelerator.prepare(model, optimizer)
            backward = accelerator.backward
        else:
            following: AbstractContextManager[None] = nullcontext()
            if self.kind == "before_fixed" and optimizer is not None:
                following = optimizers_follow(model, optimizer)
            with following:
                for block in model.transformer.h:
                    _SHARDERS[self.engine](block)
                _SHARDERS[self.engine](model)
        optimizer = optimizer or build_optimizer(model)
        losses = []
        for step in range(self.num_steps):
            self.begin(f"step {step + 1}")
            loss = loss_of(model, make_batch(step, self.rank))
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
        return self.look(losses, optimizer, model)

    def _train_with_lightning(self, model: nn.Module) -> Outcome:
        import lightning.pytorch as pl

        rank, found = self, list[Outcome]()

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.optimizer = build_optimizer(model)
                self.losses: list[float] = []

            def setup(self, *_: Any, **__: Any) -> None:
                rank.begin("shard")

            def on_train_batch_start(self, *_: Any) -> None:
                rank.begin(f"step {len(self.losses) + 1}")

            def training_step(self, batch: Tensor) -> Tensor:
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self) -> Optimizer:
                return self.optimizer

            def on_train_end(self) -> None:
                self.optimizer.zero_grad()  # the Trainer does it at the start of the next step
                found.append(rank.look(self.losses, self.optimizer, self.model))

        trainer = pl.Trainer(
            strategy=_STRATEGIES[self.engine], accelerator="cpu", devices=dist.get_world_size(),
            max_steps=self.num_steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        batches = [make_batch(step, self.rank) for step in range(self.num_steps)]
        trainer.fit(Module(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        return found[0]


def _accelerator() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"],
    )  # fmt: skip
    accelerator = Accelerator(cpu=True)
    # Accelerate takes a plugin on accelerators only, and would use DDP; what it does is the same.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def write_outcome(rank: int, arm: str, num_steps: int, folder: str) -> None:
    """Run one arm on this rank, and write what it found. Collective."""
    # As torchrun says it; Lightning and accelerate ask for it.
    num_ranks = str(dist.get_world_size())
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE=num_ranks,
        GROUP_RANK="0", TORCHELASTIC_RUN_ID="bench",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    documents.write(Path(folder) / f"rank{rank}.json", ArmRank(arm, rank, num_steps).run())
