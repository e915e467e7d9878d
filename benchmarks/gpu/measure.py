"""One case, measured in the process that this is called in.

::

    first step     compiles, and allocates the optimizer's state
    warm-up
    timed          seconds of steps and of optimizer steps, without a stop between them; memory
    host           seconds in which a step is issued to an idle device
    free network   seconds of steps if collectives took no time: what is saved was exposed
    CUDA graph     seconds of an optimizer step that is replayed

Time is that of the device, by events on its stream; where the host computes, that of the host.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.core_step import SHARD, blocks_of
from benchmarks.gpu import cases
from benchmarks.gpu.cases import Case
from benchmarks.gpu.record import DONE, FAILED, OUT_OF_MEMORY
from lightning_fsdp.bench import torch_internals
from lightning_fsdp.harness.failures import RankFailure
from lightning_fsdp.plan.models import block_classes, build, config_of
from lightning_fsdp.simulate.groups import find_usage, simulated
from lightning_fsdp.simulate.network import Cost, Network
from lightning_fsdp.strategies import unit_calls

WARMUP_STEPS, HOST_STEPS, GRAPH_STEPS = 2, 5, 20
TIMED_STEPS = {"cuda": 20, "cpu": 10}
# Of the models that stand for all where the host computes.
_SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512},
    "qwen2": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "layer_types": None,
        "intermediate_size": 128, "vocab_size": 512,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SwitchedNetwork(Network):
    """A network that can be made free while it is used.

    Attributes:
        is_free: Empty, or with anything in it: then nothing takes time.
    """

    is_free: list[bool] = field(default_factory=list)

    def cost(self, kind: str, nbytes: int, *ranks: int | None) -> Cost:
        cost = super().cost(kind, nbytes, *ranks)
        return Cost(cost.sent_bytes, 0.0) if self.is_free else cost


class Clock:
    """Moments on the current stream of a device, or on the host where that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now; on a stream, when all is done that was queued so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until nothing is queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two marks; after :meth:`settle`."""
        if self._device.type != "cuda":
            return float(stop - start)
        return float(start.elapsed_time(stop)) / 1e3


@dataclass(eq=False)
class Stepper:
    """Makes training steps.

    Attributes:
        tokens: ``(batch, seq_len)``, int64: always the same, so that the loss has to fall.
        optimizer_marks: Before and after each optimizer step so far.
    """

    model: nn.Module
    optimizer: AdamW
    tokens: Tensor
    clock: Clock
    optimizer_marks: list[tuple[Any, Any]] = field(default_factory=list)

    def backward(self) -> Tensor:
        """The loss, 0-d, on the device; gradients are there."""
        loss: Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """The same, and an optimizer step; nothing waits for the device."""
        loss = self.backward()
        before = self.clock.mark()
        self.optimizer.step()
        self.optimizer_marks.append((before, self.clock.mark()))
        self.optimizer.zero_grad()
        return loss

    def timed(self, num_steps: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds of steps, of the optimizer steps in them, and losses."""
        clock, losses = self.clock, []
        self.optimizer_marks.clear()
        clock.settle()
        marks = [clock.mark()]
        for _ in range(num_steps):
            losses.append(self.step())
            marks.append(clock.mark())
        clock.settle()
        step_s = [clock.seconds(*pair) for pair in itertools.pairwise(marks)]
        optimizer_s = [clock.seconds(*pair) for pair in self.optimizer_marks]
        return step_s, optimizer_s, [loss.item() for loss in losses]

    def issued(self, num_steps: int) -> list[float]:
        """Seconds of the host per step, each begun on an idle device."""
        found = []
        for _ in range(num_steps):
            self.clock.settle()
            start = time.perf_counter()
            self.step()
            found.append(time.perf_counter() - start)
        self.clock.settle()
        return found


def run_case(case: Case, device_type: str, out: str) -> None:
    """Measure a case, and write JSON; also of a failure, which is raised again."""
    result: dict[str, Any] = {}

    def write(**more: Any) -> None:
        result.update(more)
        Path(out).write_text(json.dumps(result))

    try:
        _measure(case, torch.device(device_type), write)
    except Exception as error:
        failure = RankFailure.of(0, error)
        state = OUT_OF_MEMORY if failure.is_out_of_memory else FAILED
        if result.get("state") != DONE:  # what was measured before stays
            write(state=state, says=f"{failure.type}: {failure.message}")
        raise


def _measure(case: Case, device: torch.device, write: Callable[..., None]) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    network = SwitchedNetwork(**vars(cases.network_of(case.world_size)))
    with _group(case, device, network):
        stepper, flops_per_token = _prepare(case, device)
        num_steps, clock = TIMED_STEPS[device.type], stepper.clock
        start = time.perf_counter()
        stepper.step()
        clock.settle()
        first_step_s = time.perf_counter() - start
        stepper.timed(WARMUP_STEPS)
        gc.collect()
        gc.freeze()  # or the collector walks all modules ever imported, in the middle of some step
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of the whole model, before it was sharded
            stepper.timed(1)
            torch.cuda.reset_peak_memory_stats(device)
        before = find_usage()
        step_s, optimizer_s, losses = stepper.timed(num_steps)
        usage = find_usage()
        memory = _memory(device)
        used = None if usage is None or before is None else usage.per_step_since(before, num_steps)
        host_s = stepper.issued(HOST_STEPS)
        free_step_s, exposed_s = None, None
        if used is not None:
            network.is_free.append(True)
            stepper.timed(WARMUP_STEPS)
            free_step_s, _, _ = stepper.timed(num_steps)
            exposed_s = statistics.median(step_s) - statistics.median(free_step_s)
        write(
            state=DONE,
            case=asdict(case),
            batch=len(stepper.tokens),
            seq_len=stepper.tokens.shape[1],
            step_s=step_s,
            optimizer_s=optimizer_s,
            host_s=host_s,
            first_step_s=first_step_s,
            losses=losses,
            flops_per_token=flops_per_token,
            free_step_s=free_step_s,
            exposed_s=exposed_s,
            simulated=used,
            num_graphs=torch_internals.num_graphs(),
            **memory,
        )
        if device.type == "cuda" and case.world_size == 1:
            write(captured_optimizer_s=None, capture_failure="the process ended while it captured")
            captured_s, failure = _captured(stepper)
            write(captured_optimizer_s=captured_s, capture_failure=failure)


@contextmanager
def _group(case: Case, device: torch.device, network: Network) -> Iterator[None]:
    """The process group that an arm asks for."""
    if case.arm == "unsharded":
        yield
    elif case.world_size > 1:
        with simulated(network, device.type):
            yield
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/meeting"
            dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
            try:
                yield
            finally:
                dist.destroy_process_group()


def _prepare(case: Case, device: torch.device) -> tuple[Stepper, float]:
    """Everything before the first step; and the operations that a token takes."""
    setting, is_small = case.setting, device.type == "cpu"
    config = config_for(config_of(setting.model), is_small=is_small)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = build(config)
    torch.set_default_dtype(torch.float32)
    if setting.is_compiled:
        for block in blocks_of(model):
            # `forward` and not the module: an engine's hooks stay outside of the graph, as they do
            # where torch's documentation compiles blocks for FSDP2.
            backend = "aot_eager" if is_small else "inductor"
            block.forward = torch.compile(block.forward, backend=backend)
    if setting.is_recomputed:
        unit_calls.apply(model, None, checkpointing=block_classes(model), compiles=False)
    batch = cases.SMALL_BATCH if is_small else cases.BATCH_OF[setting.model]
    seq_len = cases.SMALL_SEQ_LEN if is_small else cases.SEQ_LEN
    flops_per_token = flops_of(model, config, seq_len)
    sharded = model if case.arm == "unsharded" else SHARD[case.arm](model)
    optimizer = AdamW(sharded.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, seq_len), generator=generator)
    return Stepper(sharded, optimizer, tokens.to(device), Clock(device)), flops_per_token


def config_for(config: Any, *, is_small: bool) -> Any:
    """The config to train with, of transformers: as it is, or shrunk."""
    if not is_small:
        return config
    return type(config)(**{**config.to_dict(), **_SMALL[config.model_type]})


def flops_of(model: nn.Module, config: Any, seq_len: int) -> float:
    """Of forward and backward, per token; what is recomputed counts once.

    6 per parameter that is multiplied with, and attention over all positions, masked ones included.

    Source: PaLM (arXiv 2204.02311), appendix B.
    """
    head = model.get_output_embeddings().weight
    looked_up = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    num_looked_up = sum(weight.numel() for weight in looked_up if weight is not head)
    num_multiplied = sum(p.numel() for p in model.parameters()) - num_looked_up
    return 6.0 * num_multiplied + 12.0 * config.num_hidden_layers * config.hidden_size * seq_len


def _memory(device: torch.device) -> dict[str, int | None]:
    """Peaks since they were reset; the host's allocator keeps none."""
    is_cuda = device.type == "cuda"
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
    }


def _captured(stepper: Stepper) -> tuple[list[float] | None, str | None]:
    """Seconds of optimizer steps from a CUDA graph; or why there is none."""
    optimizer, clock = stepper.optimizer, stepper.clock
    try:
        stepper.backward()
        for group in optimizer.param_groups:
            group["capturable"] = True
        aside, main = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(main)
        with torch.cuda.stream(aside):
            optimizer.step()
        main.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog queries events in a thread of its own, which may go on.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            optimizer.step()
        marks = []
        for _ in range(GRAPH_STEPS + 1):
            marks.append(clock.mark())
            graph.replay()
        marks.append(clock.mark())
        clock.settle()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a result)
        failure = RankFailure.of(0, error)
        return None, f"{failure.type}: {failure.message}"
    return [clock.seconds(*pair) for pair in itertools.pairwise(marks[1:])], None
