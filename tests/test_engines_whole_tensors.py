"""Whole tensors under torch's engines: what others write, frozen parameters, several fits."""

import pytest
import torch
from torch import nn

from lightning_fsdp import MixedPrecisionPolicy
from lightning_fsdp.engines.fsdp1 import FSDP1Engine
from lightning_fsdp.engines.fsdp2 import FSDP2Engine
from tests.support.cases import each_on_ranks
from tests.support.ranks import run_on_ranks
from tests.support.whole_tensors import Descent

ENGINES = [FSDP1Engine, FSDP2Engine]


def _model():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    return nn.Sequential(nn.Sequential(*layers))


def _shard(cls, model, optimizer, units=10**9):
    engine = cls(zero_stage=3, units=units, cpu_offload=False)
    engine.shard(model, device=torch.device("cpu"), precision=MixedPrecisionPolicy())
    engine.watch_optimizer(optimizer)
    return engine


def _backward(engine, model, rank, step=0):
    torch.manual_seed(100 + 10 * step + rank)
    loss = engine.run(model.forward, torch.randn(4, 16)).pow(2).mean()
    engine.before_backward()
    loss.backward()
    engine.after_backward()


def _write(engine, how):
    with torch.no_grad():
        if how == "access":
            for weight in engine.weights.values():
                weight.shard.zero_()
        for parameter in engine.parameters.values():
            if how == "in place":
                parameter.mul_(0)
            elif how == "data":
                parameter.data.mul_(0)


def _written_to(rank, world_size, cls):
    for how in ("in place", "data", "access"):
        model = _model()
        optimizer = Descent(model.parameters())
        engine = _shard(cls, model, optimizer)
        for step in range(2):
            _backward(engine, model, rank, step)
            if step == 1:
                optimizer.param_groups[0]["lr"] = 0.0
                _write(engine, how)
            optimizer.step()
            optimizer.zero_grad()
        for name, weight in engine.weights.full():
            assert not weight.any(), f"{how}: {name}"


def test_what_others_write_is_stepped():
    each_on_ranks(_written_to, 2, ENGINES)


def _frozen(rank, world_size, cls):
    model = _model()
    model[0][0].weight.requires_grad_(False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1, weight_decay=0.1)
    # One flat parameter under FSDP1: who has nothing of the frozen one has gradients beside it.
    engine = _shard(cls, model, optimizer, units=lambda module: module is model[0])
    before = dict(engine.weights.full())
    _backward(engine, model, rank)
    optimizer.step()
    after = dict(engine.weights.full())
    assert torch.equal(before["0.0.weight"], after["0.0.weight"])
    assert not torch.equal(before["0.1.weight"], after["0.1.weight"])


def test_frozen_parameters_stay():
    each_on_ranks(_frozen, 2, ENGINES)


def _several_fits(rank, world_size, cls):
    model = _model()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    for fit in range(2):
        engine = _shard(cls, model, optimizer)
        before = dict(engine.weights.full())
        _backward(engine, model, rank, fit)
        optimizer.step()
        optimizer.zero_grad()
        after = dict(engine.weights.full())
        assert all(not torch.equal(before[name], after[name]) for name in before)
        engine.make_whole(model)
        plain = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()  # between fits it steps what the module has
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert not torch.equal(parameter, plain[name])


@pytest.mark.parametrize("cls", ENGINES)
def test_an_optimizer_serves_several_fits(cls):
    run_on_ranks(_several_fits, 2, cls)
