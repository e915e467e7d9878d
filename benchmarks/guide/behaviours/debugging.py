"""Ranks that disagree, and an optimizer that needs whole tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.guide.probes import (
    behaviour,
)
from benchmarks.guide.subjects import (
    Engine,
    Outcome,
    Run,
    are_equal,
    mean_gradients,
    net,
    one_step,
    told,
)


@behaviour("debugging", "rank 1 skips a unit")
def a_rank_skips_a_unit(engine: Engine) -> Outcome:
    def build() -> nn.Module:
        model = net()
        if dist.get_rank() == 1:
            model.forward = lambda x: model.head(model.blocks[0](torch.tanh(model.inlet(x))))
        return model

    return one_step(engine, build)


@behaviour("debugging", "rank 1 has a model of another size")
def ranks_disagree_about_sizes(engine: Engine) -> Outcome:
    def build() -> nn.Module:
        model = net()
        if dist.get_rank() == 1:
            model.head = nn.Linear(7, 3, bias=False)
        return model

    return one_step(engine, build)


@behaviour("debugging", "an optimizer that needs whole tensors (Adafactor)")
def adafactor(engine: Engine) -> Outcome:
    run = Run(engine)

    def probe() -> str:
        run.shard()
        run.at = "when built"
        run.optimizer = torch.optim.Adafactor(run.model.parameters(), lr=0.25)
        run.train()
        run.step()
        plain = net()
        gradients = mean_gradients(net)
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name]
        torch.optim.Adafactor(plain.parameters(), lr=0.25).step()
        right = {name: p.detach() for name, p in plain.named_parameters()}
        found = engine.whole_weights(run.model)
        return "right" if are_equal(found, right, 1e-5) else "**other results, silently**"

    return told(run, probe)
