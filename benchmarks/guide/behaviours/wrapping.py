"""What sharding makes of a module and its parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import fsdp

import lightning_fsdp
from benchmarks.guide.probes import (
    behaviour,
    code,
    on_each_rank,
    seen,
)
from benchmarks.guide.subjects import (
    Engine,
    Net,
    Outcome,
    Run,
    are_equal,
    batch_of,
    mean_gradients,
    net,
    told,
)


@seen("wrapping", "the call gives")
def what_the_call_gives(run: Run) -> str:
    is_net = isinstance(run.model, Net)
    return (
        f"the same {code('Net')}, its class extended"
        if is_net
        else (f"a {code(type(run.model).__name__)} around it")
    )


@seen("wrapping", "a name in `named_parameters()`")
def a_name_of_a_parameter(run: Run) -> str:
    return code([name for name, _ in run.model.named_parameters()][2])


@seen("wrapping", "`model.head.weight` is a")
def type_of_a_parameter(run: Run) -> str:
    return code(type(run.model.head.weight).__name__)


@seen("wrapping", "shape that a `(3, 7)` weight shows")
def shape_of_a_parameter(run: Run) -> str:
    return on_each_rank(code(tuple(run.model.head.weight.shape)))


@seen("wrapping", "its elements on the two ranks")
def elements_of_a_parameter(run: Run) -> str:
    weight = run.model.head.weight
    mine = weight.to_local() if hasattr(weight, "to_local") else weight
    return on_each_rank(mine.numel())


@behaviour("wrapping", "an `nn.Parameter` from before is the model's still")
def parameters_keep_their_identity(engine: Engine) -> Outcome:
    run = Run(engine)

    def probe() -> str:
        model = net()
        before = set(map(id, model.parameters()))
        after = set(map(id, engine.shard(model).parameters()))
        return "yes" if before == after else "no"

    return told(run, probe)


@behaviour("wrapping", "optimizer built before sharding")
def optimizer_built_before_sharding(engine: Engine) -> Outcome:
    run = Run(engine)

    def probe() -> str:
        model = net()
        run.optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        run.model = engine.shard(model)
        before = engine.whole_weights(run.model)
        run.train()
        run.step()
        if are_equal(engine.whole_weights(run.model), before, 0.0):
            return "**trains nothing, silently**"
        return "right" if run.is_right(mean_gradients(net)) else "**wrong values**"

    return told(run, probe)


@seen("wrapping", "a method other than forward, `model.encode(x)`")
def method_other_than_forward(run: Run) -> str:
    return _encoded(run)


@seen("wrapping", "the same, once registered")
def method_that_is_registered(run: Run) -> str:
    if run.engine.name == "fsdp1":
        return "no such call"
    if run.engine.name == "fsdp2":
        fsdp.register_fsdp_forward_method(run.model, "encode")
    else:
        lightning_fsdp.register_forward_method(run.model, "encode")
    return _encoded(run)


def _encoded(run: Run) -> str:
    inputs, _ = batch_of(dist.get_rank())
    run.at = "at once"
    is_right = torch.allclose(run.model.encode(inputs), net().encode(inputs))
    return "right" if is_right else "**wrong values**"
