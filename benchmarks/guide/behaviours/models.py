"""Models that sharding has to cope with, each trained for one step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.guide.probes import (
    BEHAVIOURS,
    Behaviour,
    Probe,
    behaviour,
)
from benchmarks.guide.subjects import (
    Engine,
    Outcome,
    Run,
    loss_of,
    mean_gradients,
    net,
    one_step,
    told,
)


def _model(claim: str) -> Callable[[Callable[[], nn.Module]], Probe]:
    """Register a model that each engine trains for a step."""

    def register(build: Callable[[], nn.Module]) -> Probe:
        def probe(engine: Engine) -> Outcome:
            return one_step(engine, build, _MODEL_LOSSES.get(build.__name__, loss_of))

        BEHAVIOURS[build.__name__] = Behaviour("models", claim, probe)
        return probe

    return register


_MODEL_LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {}


@_model("a weight shared by two units")
def weight_shared_by_units() -> nn.Module:
    model = net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


@_model("fp32 and bf16 in one unit")
def two_dtypes_in_a_unit() -> nn.Module:
    model = net()
    model.blocks[0].down.weight.data = model.blocks[0].down.weight.data.bfloat16()
    down = model.blocks[0].down
    down.forward = lambda hidden: F.linear(hidden, down.weight.float(), down.bias)
    return model


@_model("frozen and trainable in one unit")
def frozen_and_trainable_in_a_unit() -> nn.Module:
    model = net()
    model.blocks[0].up.requires_grad_(False)
    return model


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.blocks = self.net.blocks
        self.factor = nn.Parameter(torch.tensor(0.75))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) * self.factor


@_model("a parameter without a dimension")
def scalar_parameter() -> nn.Module:
    return _Scaled()


@_model("a parameter that is not contiguous")
def transposed_parameter() -> nn.Module:
    model = net()
    weight = model.head.weight
    model.head.weight = nn.Parameter(weight.detach().t().contiguous().t())
    return model


@_model("a unit that no rank runs")
def unit_that_no_rank_runs() -> nn.Module:
    model = net()
    model.forward = lambda inputs: model.head(model.blocks[0](torch.tanh(model.inlet(inputs))))
    return model


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList([nn.Linear(7, 7)])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.inlet(inputs.view(2, 2, 5)))
        hidden = self.blocks[0](hidden)  # a view: Linear folds the leading dimensions
        hidden += 1.0
        return self.head(torch.tanh(hidden)).view(4, 3)


@_model("`y += 1` on a unit's output that is a view")
def in_place_on_a_view() -> nn.Module:
    torch.manual_seed(3)
    return _InPlace()


@_model("two forwards, then one backward")
def two_forwards_one_backward() -> nn.Module:
    return net()


_MODEL_LOSSES["two_forwards_one_backward"] = lambda model, batch: (
    loss_of(model, batch) + loss_of(model, (batch[0] + 1, batch[1]))
)


@behaviour("models", "an exception in a forward, then the next step")
def exception_in_a_forward(engine: Engine) -> Outcome:
    run = Run(engine)

    def broken(model: nn.Module, batch: Any) -> Tensor:
        handle = model.blocks[1].down.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            return loss_of(model, batch)
        finally:
            handle.remove()

    def probe() -> str:
        run.shard()
        try:
            run.train(broken)
        except ZeroDivisionError:
            run.train()
            run.step()
        return "right" if run.is_right(mean_gradients(net)) else "**wrong values**"

    return told(run, probe)


@behaviour("models", "`copy.deepcopy(model)`, then both train")
def deepcopy_of_a_model(engine: Engine) -> Outcome:
    run = Run(engine)

    def probe() -> str:
        run.shard()
        run.train()
        run.optimizer.zero_grad()
        run.at = "at once"
        twin = Run(engine)
        twin.model = copy.deepcopy(run.model)
        twin.optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.25)
        for one in (run, twin):
            one.train()
            one.step()
        right = mean_gradients(net)
        return "right" if run.is_right(right) and twin.is_right(right) else "**wrong values**"

    return told(run, probe)
