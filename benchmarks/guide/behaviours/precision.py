"""Dtypes in a step with bf16 compute and fp32 reduction, and offloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

import lightning_fsdp
from benchmarks.guide.probes import (
    BEHAVIOURS,
    Behaviour,
    Probe,
    behaviour,
    dtype,
    on_each_rank,
)
from benchmarks.guide.subjects import (
    Engine,
    Net,
    Outcome,
    Run,
    batch_of,
    mean_gradients,
    net,
    told,
)
from tests.support.counting import CollectiveCounter


class _Seen:
    """Dtypes inside of the last forward."""

    def __init__(self, model: nn.Module) -> None:
        self.input_of_the_model = self.weight = self.input = self.buffer = "none"
        self._block = model.blocks[0]
        model.inlet.register_forward_pre_hook(self._look_at_the_model)
        self._block.up.register_forward_pre_hook(self._look_at_a_unit)

    def _look_at_the_model(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.input_of_the_model = dtype(inputs[0])

    def _look_at_a_unit(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.weight, self.input = dtype(layer.weight), dtype(inputs[0])
        self.buffer = dtype(self._block.scale)


def _mixed(
    engine: Engine, look: Callable[[Run, _Seen], str], build: Callable[[], nn.Module] = net
) -> Outcome:
    run = Run(engine, build)

    def probe() -> str:
        policy = engine.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        run.shard(**{"mixed_precision" if engine.name == "fsdp1" else "mp_policy": policy})
        return look(run, _Seen(run.model))

    return told(run, probe)


def mixed(claim: str) -> Callable[[Callable[[Run, _Seen], str]], Probe]:
    """Register a function that looks at a model with bf16 compute and fp32 reduction."""

    def register(look: Callable[[Run, _Seen], str]) -> Probe:
        def probe(engine: Engine) -> Outcome:
            return _mixed(engine, look)

        BEHAVIOURS[look.__name__] = Behaviour("precision", claim, probe)
        return probe

    return register


@mixed("a parameter between steps; inside of forward; its gradient")
def dtypes_of_a_parameter(run: Run, seen: _Seen) -> str:
    run.train()
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    between = dtype(next(run.model.parameters()))
    return f"{between}; {seen.weight}; {on_each_rank(dtype(gradients[0]))}"


@mixed("fp32 inputs of the model become; its output; a buffer")
def dtypes_of_activations(run: Run, seen: _Seen) -> str:
    inputs, _ = batch_of(dist.get_rank())
    output = dtype(run.model(inputs))
    return f"{seen.input_of_the_model}; {output}; {seen.buffer}"


class _PassesFp32(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.inlet(inputs))
        return self.head(self.blocks[0](hidden.float()))


@behaviour("precision", "fp32 passed to a unit inside of the model")
def fp32_passed_to_an_inner_unit(engine: Engine) -> Outcome:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return _PassesFp32()

    def look(run: Run, seen: _Seen) -> str:
        run.train()
        return f"becomes {seen.input}"

    return _mixed(engine, look, build)


@mixed("what a reduction sends to other ranks")
def dtype_on_the_wire(run: Run, seen: _Seen) -> str:
    run.train()
    run.step()
    with CollectiveCounter() as counter:
        run.train()
    dtypes = {str(call.dtype).removeprefix("torch.") for call in counter.reductions()}
    return " and ".join(sorted(dtypes))


@mixed("gradients that wait for a later reduction are summed in")
def dtype_of_waiting_gradients(run: Run, seen: _Seen) -> str:
    with run.engine.no_sync(run.model):
        run.train(index=0)
        run.train(index=1)
    if run.engine.name == "here":
        return dtype(lightning_fsdp.gradients(run.model)["head.weight"].local())
    if run.engine.name == "fsdp1":
        return on_each_rank(dtype(run.model.head.weight.grad))
    state = run.model._get_fsdp_state()
    (parameter,) = [p for p in state._fsdp_param_group.fsdp_params if p._param_fqn == "head.weight"]
    waiting = parameter.unsharded_accumulated_grad
    return dtype(parameter._unsharded_param.grad if waiting is None else waiting)


def _offloading(engine: Engine, pin_memory: bool) -> dict[str, Any]:
    if engine.name == "fsdp1":
        return {"cpu_offload": fsdp.CPUOffload(offload_params=True)}
    library = fsdp if engine.name == "fsdp2" else lightning_fsdp
    return {"offload_policy": library.CPUOffloadPolicy(pin_memory=pin_memory)}


def _offloaded(engine: Engine, pin_memory: bool) -> Outcome:
    run = Run(engine)

    def probe() -> str:
        run.shard(**_offloading(engine, pin_memory))
        run.train()
        run.step()
        return "right" if run.is_right(mean_gradients(net)) else "**wrong values**"

    return told(run, probe)


@behaviour("offload", "offloading as documented, on a machine without an accelerator")
def offload_as_documented(engine: Engine) -> Outcome:
    return _offloaded(engine, pin_memory=True)


@behaviour("offload", "the same with `pin_memory=False`")
def offload_without_pinning(engine: Engine) -> Outcome:
    if engine.name == "fsdp1":
        return Outcome("no such option")
    return _offloaded(engine, pin_memory=False)
