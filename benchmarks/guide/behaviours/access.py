"""What can be read of gradients, and when, with each engine's own means."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import lightning_fsdp
from benchmarks.guide.probes import (
    code,
    on_each_rank,
    seen,
)
from benchmarks.guide.subjects import (
    Run,
    are_equal,
    batch_of,
    loss_of,
    mean_gradients,
    net,
)


@seen("by-hand", "`p.grad` after a synced backward, `p` of `(3, 7)`")
def gradient_after_sync(run: Run) -> str:
    run.train()
    gradient = run.model.head.weight.grad
    if gradient is None:
        return on_each_rank("None")
    return on_each_rank(f"{code(type(gradient).__name__)} {tuple(gradient.shape)}")


@seen("by-hand", "all whole gradients, by the engine's own call")
def whole_gradients(run: Run) -> str:
    run.train()
    run.at = "at once"
    right = are_equal(run.engine.whole_gradients(run.model), mean_gradients(net))
    calls = {
        "fsdp1": "summon_full_params(with_grads=True)",
        "fsdp2": "p.grad.full_tensor()",
        "here": "p.grad.full_tensor()",
    }
    return f"{'right' if right else '**wrong values**'}: {code(calls[run.engine.name])}"


@seen("by-hand", "`p.register_hook(fn)`")
def tensor_hook(run: Run) -> str:
    calls: list[Tensor] = []
    run.at = "at once"
    run.model.head.weight.register_hook(calls.append)
    run.train()
    return _calls(calls)


@seen("by-hand", "`p.register_post_accumulate_grad_hook(fn)`")
def post_accumulate_hook(run: Run) -> str:
    calls: list[Tensor] = []
    run.at = "at once"
    run.model.head.weight.register_post_accumulate_grad_hook(
        lambda p: calls.append(p.grad.detach())
    )
    run.train()
    return _calls(calls)


@seen("by-hand", "`weight.register_hook(fn)` from a forward pre-hook of its layer")
def hook_inside_of_forward(run: Run) -> str:
    calls: list[Tensor] = []
    run.model.head.register_forward_pre_hook(
        lambda layer, _: layer.weight.register_hook(calls.append) and None
    )
    run.train()
    return _calls(calls)


def _calls(calls: list[Tensor]) -> str:
    if not calls:
        return "**never called**"
    local = net()
    loss_of(local, batch_of(dist.get_rank())).backward()
    mean = mean_gradients(net)["head.weight"]
    gradient = calls[0]
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    for name, right in (("this rank's own", local.head.weight.grad), ("the mean", mean)):
        if whole.shape == right.shape and torch.allclose(whole, right, atol=1e-6):
            return f"gets {name}, a {code(type(gradient).__name__)}"
    return "gets something else"


@seen("by-hand", "this rank's own gradient after an unsynced backward")
def gradient_without_sync(run: Run) -> str:
    with run.engine.no_sync(run.model):
        run.train()
    local = net()
    loss_of(local, batch_of(dist.get_rank())).backward()
    right = local.head.weight.grad
    if run.engine.name == "here":
        found = lightning_fsdp.gradients(run.model)["head.weight"].local()
        how = code("gradients(model)[name].local()")
    else:
        found, how = run.model.head.weight.grad, code("p.grad")
    if found is None:
        return "`p.grad` is `None`"
    return f"right: {how}" if torch.allclose(found, right, atol=1e-6) else "**wrong values**"


@seen("by-hand", "whole gradients after an unsynced backward, by the call above")
def whole_gradients_without_sync(run: Run) -> str:
    with run.engine.no_sync(run.model):
        run.train()
    run.at = "at once"
    found = run.engine.whole_gradients(run.model)
    return f"gives {len(found)} of {len(list(net().parameters()))}"


@seen("by-hand", "`zero_grad()` after an unsynced backward; the next step is")
def zero_grad_without_sync(run: Run) -> str:
    with run.engine.no_sync(run.model):
        run.train(index=0)
    run.optimizer.zero_grad()
    run.train(index=1)
    run.step()
    if run.is_right(mean_gradients(net, indices=[1])):
        return "right"
    if run.is_right(mean_gradients(net, indices=[0, 1])):
        return "**stepped with the dropped micro-batch too**"
    return "**wrong values**"


@seen("by-hand", "`torch.nn.utils.clip_grad_norm_` returns")
def norm_by_torch(run: Run) -> str:
    run.train()
    run.at = "at once"
    return _norm(run, torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9))


@seen("by-hand", "`model.clip_grad_norm_` returns")
def norm_by_the_model(run: Run) -> str:
    run.train()
    run.at = "at once"
    return _norm(run, run.model.clip_grad_norm_(1e9))


@seen("by-hand", "clipping after an unsynced backward returns")
def norm_without_sync(run: Run) -> str:
    with run.engine.no_sync(run.model):
        run.train()
    run.at = "at once"
    if run.engine.name == "fsdp2":
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
    else:
        norm = run.model.clip_grad_norm_(1e9)
    return _norm(run, norm)


def _norm(run: Run, norm: Tensor) -> str:
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    right = torch.cat([g.flatten() for g in mean_gradients(net).values()]).norm()
    if torch.allclose(norm, right, atol=1e-6):
        return on_each_rank("the norm")
    return (
        "**0**"
        if norm == 0
        else "**another number on each rank**"
        if " and " in (on_each_rank(float(norm)))
        else "**another number**"
    )


@seen("by-hand", "`torch.autograd.grad(loss, parameters)`")
def autograd_grad(run: Run) -> str:
    loss = loss_of(run.model, batch_of(dist.get_rank()))
    run.at = "at once"
    found = torch.autograd.grad(loss, list(run.model.parameters()))
    return f"gives {len(found)} gradients"
