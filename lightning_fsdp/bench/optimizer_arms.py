"""The ranks of one arm: an optimizer that was built before or after sharding, a few steps, a look.

``python -m lightning_fsdp.bench.optimizer_arms ARM NUM_RANKS STEPS FOLDER``

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
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.multiprocessing import spawn  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_fsdp.bench import documents
from lightning_fsdp.bench.optimizer_outcome import Outcome, Phase
from lightning_fsdp.callbacks.storages import Observer
from lightning_fsdp.core.fully_shard import fully_shard
from lightning_fsdp.engines.optimizers import optimizers_follow

_STRATEGIES = {"fsdp2": "fsdp2_zero3", "scratch": "scratch_fsdp_zero3"}
_SHARDERS: dict[str, Callable[..., Any]] = {"fsdp2": fsdp.fully_shard, "scratch": fully_shard}
_OPERATIONS_PER_SAMPLE = 32  # of the resident size


class Timeline(Observer):  # type: ignore[no-untyped-call]
    """Keeps how many bytes were alive after each operation, phase by phase."""

    def __init__(self) -> None:
        super().__init__([])
        self.phases: list[Phase] = []
        self._process = psutil.Process()

    def begin(self, name: str) -> None:
        """A phase; it ends with the next one."""
        if self.phases:
            self._measure()
        self.phases.append(Phase(name, rss_bytes=[self._process.memory_info().rss]))

    def finish(self) -> None:
        """Stop watching, with a last look at what rests."""
        self._measure()
        self.stop()

    @override
    def _measure(self) -> None:
        if self.phases:
            phase = self.phases[-1]
            phase.live_bytes.append(self.live_bytes)
            if len(phase.live_bytes) % _OPERATIONS_PER_SAMPLE == 0:
                phase.rss_bytes.append(self._process.memory_info().rss)


def build_model() -> nn.Module:
    """GPT-2 with embedding and head tied, 1.1 million parameters, always the same values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=2048, n_positions=32, n_embd=128, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model.train()


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


def run_arm(arm: str, rank: int, num_steps: int) -> Outcome:
    """Run one arm on this rank, in the default process group. Collective."""
    engine, _, kind = arm.partition("_")
    start = {name: p.detach().clone() for name, p in build_model().named_parameters()}
    timeline = Timeline()
    with _watched(timeline):
        timeline.begin("build")
        model = build_model()
        if kind == "lightning":
            run = _train_with_lightning(engine, model, rank, num_steps, timeline)
        else:
            run = _train(engine, kind, model, rank, num_steps, timeline)
    return Outcome(
        arm=arm,
        rank=rank,
        losses=run.losses,
        weights={name: _digest(whole) for name, whole in run.wholes.items()},
        trained=[name for name, whole in run.wholes.items() if not whole.equal(start[name])],
        num_entries=run.num_entries,
        num_held=run.num_held,
        phases=timeline.phases,
    )


@dataclass
class _Run:
    """What is looked at after the last step, the model still sharded; see :class:`Outcome`.

    Attributes:
        wholes: Every parameter, whole.
    """

    losses: list[float]
    wholes: dict[str, Tensor]
    num_entries: int
    num_held: int


def _look(losses: list[float], optimizer: Optimizer, model: nn.Module) -> _Run:
    mine = {id(p) for p in model.parameters()}
    entries = [p for group in optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        wholes = {
            name: getattr(p, "full_tensor", p.detach)().clone()
            for name, p in model.named_parameters()
        }
    return _Run(losses, wholes, len(entries), sum(id(p) in mine for p in entries))


def _train(
    engine: str, kind: str, model: Any, rank: int, num_steps: int, timeline: Timeline
) -> _Run:
    optimizer = None if kind == "after" else build_optimizer(model)
    backward: Callable[[Tensor], None] = torch.Tensor.backward
    timeline.begin("shard")
    if kind == "accelerate":
        accelerator = _accelerator()
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    else:
        following: AbstractContextManager[None] = nullcontext()
        if kind == "before_fixed" and optimizer is not None:
            following = optimizers_follow(model, optimizer)
        with following:
            for block in model.transformer.h:
                _SHARDERS[engine](block)
            _SHARDERS[engine](model)
    optimizer = optimizer or build_optimizer(model)
    losses = []
    for step in range(num_steps):
        timeline.begin(f"step {step + 1}")
        loss = loss_of(model, make_batch(step, rank))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    timeline.finish()
    return _look(losses, optimizer, model)


def _accelerator() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    # Accelerate takes a plugin on accelerators only, and would use DDP; what it does is the same.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def _train_with_lightning(
    engine: str, model: nn.Module, rank: int, num_steps: int, timeline: Timeline
) -> _Run:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.optimizer = build_optimizer(model)
            self.losses: list[float] = []

        def training_step(self, batch: Tensor) -> Tensor:
            loss = loss_of(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Optimizer:
            return self.optimizer

    class Watch(pl.Callback):
        run: _Run

        def setup(self, *_: Any, **__: Any) -> None:
            timeline.begin("shard")

        def on_train_batch_start(self, *_: Any) -> None:
            timeline.begin(f"step {len(module.losses) + 1}")

        def on_train_end(self, *_: Any) -> None:
            module.optimizer.zero_grad()  # the Trainer does it at the start of the next step
            timeline.finish()
            self.run = _look(module.losses, module.optimizer, module.model)

    module, watch = Module(), Watch()
    trainer = pl.Trainer(
        strategy=_STRATEGIES[engine], accelerator="cpu", devices=dist.get_world_size(),
        max_steps=num_steps, callbacks=[watch], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    batches = [make_batch(step, rank) for step in range(num_steps)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return watch.run


@contextmanager
def _watched(timeline: Timeline) -> Iterator[None]:
    """Inside, the timeline watches, until it is stopped."""
    timeline.start()
    try:
        yield
    except BaseException:
        timeline.stop()
        raise


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def _rank_main(rank: int, arm: str, num_ranks: int, num_steps: int, folder: str, at: str) -> None:
    # As torchrun says it; Lightning and accelerate ask for it.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks), GROUP_RANK="0", TORCHELASTIC_RUN_ID="bench",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    torch.set_num_threads(1)  # another number of threads, another order of sums
    dist.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=num_ranks)
    outcome = run_arm(arm, rank, num_steps)
    documents.write(Path(folder) / f"rank{rank}.json", outcome)
    dist.destroy_process_group()


def main(arm: str, num_ranks: str, num_steps: str, folder: str) -> None:
    """Start the ranks of an arm and wait for them."""
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (arm, int(num_ranks), int(num_steps), folder, f"{meeting}/ranks")
        spawn(_rank_main, args=arguments, nprocs=int(num_ranks))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(*sys.argv[1:])
