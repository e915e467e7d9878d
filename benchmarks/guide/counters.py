"""What each engine holds and sends in a training step, counted on two ranks. Exact: no clock.

    memory    Bytes of all live storages of a rank, as torch's dispatcher sees them, in units of P,
              the model in fp32: at rest (parameters and AdamW's state after a step), after the
              forward, and the most in forward and backward. The batch is so small that
              activations are nothing beside P.
    traffic   Gathers and reductions of one optimizer step, and the bytes that came from the other
              rank and went to it, in units of P.

The model has 8 equal blocks, each a unit, and next to nothing outside of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.guide.subjects import ENGINES, Net, batch_of, loss_of
from lightning_fsdp import ZERO2, ZERO3, shard_model
from lightning_fsdp.callbacks.storages import Observer, nbytes_of, resting_tensors
from tests.support.counting import CollectiveCounter
from tests.support.ranks import run_on_ranks

WORLD_SIZE = 2
NUM_BLOCKS = 8
NUM_MICRO_BATCHES = 4
_NUM_MEASUREMENTS = 4
ACCUMULATIONS = ("one", "each", "last")
"""One micro-batch; four, reduced each; four, reduced with the last."""

Memory = dict[str, float]
"""By moment, in units of P."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to shard.

    Attributes:
        engine: Key of the engines.
        stage: 2 or 3.
        call: For the table.
    """

    engine: str
    stage: int
    call: str


ARMS = [
    Arm(engine=engine, stage=stage, call=call)
    for engine, call in (
        ("fsdp1", "each block wrapped, and the model"),
        ("fsdp2", "`fully_shard` each block, and the model"),
        ("here", "`fully_shard` each block, and the model"),
        ("here", "`shard_model(model, ...)`"),
    )
    for stage in (3, 2)
] + [Arm(engine=engine, stage=3, call="the model alone") for engine in ("fsdp1", "fsdp2", "here")]


def _build() -> Net:
    torch.manual_seed(3)
    return Net(width=128, inner=512, depth=NUM_BLOCKS)


def _shard(arm: Arm) -> nn.Module:
    if "shard_model" in arm.call:
        return shard_model(_build(), {2: ZERO2, 3: ZERO3}[arm.stage])
    engine = ENGINES[arm.engine]
    options: dict[str, Any] = {"units": lambda model: []} if "alone" in arm.call else {}
    return engine.shard(_build(), stage=arm.stage, **options)


class _Training:
    """A sharded model with AdamW, after its first step: state is allocated, orders are known."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.model = arm, _shard(arm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for _ in range(2):
            self.step("one")

    def forward(self) -> torch.Tensor:
        return loss_of(self.model, batch_of(dist.get_rank()))

    def step(self, accumulation: str) -> None:
        num_micro_batches = 1 if accumulation == "one" else NUM_MICRO_BATCHES
        for index in range(num_micro_batches):
            if accumulation == "last" and index < num_micro_batches - 1:
                with ENGINES[self.arm.engine].no_sync(self.model):
                    self.forward().backward()
            else:
                self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self) -> Memory:
        """In units of P."""
        whole = sum(p.nbytes for p in _build().parameters())
        resting = resting_tensors(self.model, [self.optimizer])
        found = {"resting": nbytes_of(resting) / whole}
        observer = Observer(resting)
        del resting
        observer.start()

        def peak_of(phase: str, run: Callable[[], Any]) -> Any:
            observer.observation.peak_bytes = 0
            result = run()
            found[f"{phase}_peak"] = observer.observation.peak_bytes / whole
            return result

        loss = peak_of("forward", self.forward)
        found["after_forward"] = _settled(observer) / whole
        peak_of("backward", loss.backward)
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        with ENGINES[self.arm.engine].no_sync(self.model):
            self.forward().backward()
        found["after_unsynced"] = _settled(observer) / whole
        observer.stop()
        self.step("one")  # what waits is reduced
        return found

    def traffic(self, accumulation: str) -> dict[str, float]:
        """Of one optimizer step; bytes in units of P."""
        whole = sum(p.nbytes for p in _build().parameters())
        self.step(accumulation)  # what an earlier one has left whole is freed by a step
        with CollectiveCounter() as counter:
            self.step(accumulation)
        return {
            "gathers": counter.num_gathers(WORLD_SIZE),
            "reductions": counter.num_reductions(WORLD_SIZE),
            "moved": (counter.gathered_bytes(WORLD_SIZE) + counter.reduced_bytes(WORLD_SIZE))
            / whole,
        }


def _settled(observer: Observer) -> int:
    """Live bytes once gloo's threads have let go of the last operations' tensors."""
    readings: list[int] = []
    while len(readings) < 50 and readings[-8:].count(observer.live_bytes) < 8:
        readings.append(observer.live_bytes)
        time.sleep(0.01)
    return readings[-1]


def count(
    rank: int, world_size: int, index: int, is_expected: Callable[[Memory], bool] | None = None
) -> dict[str, Any]:
    """The figures of one arm on this rank.

    Args:
        rank: This one.
        world_size: How many there are.
        index: Of the arm.
        is_expected: Of what this rank holds: where it is so on all ranks, none measures again.
    """
    training = _Training(ARMS[index])
    # gloo's threads let go of a buffer late at times: the least is what the engine holds.
    least = training.memory()
    for _ in range(_NUM_MEASUREMENTS - 1):
        if is_expected is not None and _on_all_ranks(is_expected(least)):
            break
        least = {key: min(held, least[key]) for key, held in training.memory().items()}
    return {
        "memory": {key: round(held, 2) for key, held in least.items()},
        "traffic": {
            accumulation: {k: round(v, 2) for k, v in training.traffic(accumulation).items()}
            for accumulation in ACCUMULATIONS
        },
    }


def _on_all_ranks(is_so: bool) -> bool:
    each = torch.tensor(int(is_so))
    dist.all_reduce(each, dist.ReduceOp.MIN)
    return bool(each)


def run_all() -> list[dict[str, Any]]:
    """Every arm, all on the same ranks; memory of the rank that has more; JSON."""
    rows = []
    for arm, *ranks in zip(
        ARMS, *run_on_ranks(_count_each, WORLD_SIZE, timeout_s=240), strict=True
    ):
        memory = {key: max(r["memory"][key] for r in ranks) for key in ranks[0]["memory"]}
        rows.append({**asdict(arm), "memory": memory, "traffic": ranks[0]["traffic"]})
    return rows


def _count_each(rank: int, world_size: int) -> list[dict[str, Any]]:
    found = []
    for index, arm in enumerate(ARMS):
        try:
            found.append(count(rank, world_size, index))
        except BaseException as error:
            error.add_note(f"arm: {arm}")
            raise
    return found
