"""Base and adapters read into sharded models of peft, against peft's own ``from_pretrained``."""

import warnings
from pathlib import Path

import peft
import torch
from torch.distributed import fsdp

from lightning_fsdp import ZERO2, load_adapters, load_pretrained, shard_model
from tests.support.adapters import (
    KINDS,
    adapted,
    loss_of,
    token_batch,
    trained,
)
from tests.support.cases import each_on_ranks
from tests.support.pretrained import _core_zero3, _plain, logits_of, wholes

WARNS = ("dora", "bf16 dora", "head", "tokens", "untied", "whole head")


def _zero2(model):
    return shard_model(model, ZERO2)


def _fsdp2(model):
    for block in model.get_base_model().base_model.layers:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


def _base(kind, seed=5):
    make, _ = KINDS[kind]
    torch.manual_seed(seed)
    base = make()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return base


def _saved(folder, kind):
    """Written by transformers and peft in one process; other values than ``adapted`` gives."""
    where = folder / kind
    base = _base(kind)
    base.save_pretrained(where / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about embeddings
        torch.manual_seed(3)
        model = peft.get_peft_model(base, KINDS[kind][1]())
        with torch.no_grad():
            for parameter in trained(model):
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(where / "adapters")


def _load(model, where, kind):
    """Base, then adapters; what is not named stays."""
    before = wholes(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_pretrained(model, where / "base")
    said = [str(w.message) for w in caught if "load_adapters" in str(w.message)]
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    assert len(said) == (kind in WARNS and rank == 0), (kind, said)
    between = wholes(model)
    named = model.named_parameters(remove_duplicate=False)
    names = {n for n, p in named if p.requires_grad and ".base_layer." not in n}
    for name, value in between.items():
        assert torch.equal(value, before[name]) == (name in names), (kind, name)
    load_adapters(model, where / "adapters")


def _reads(rank, world_size, case, folder):
    kind, shard = case
    where = Path(folder) / kind
    model = shard(adapted(kind))
    loss_of(model, token_batch(0, 0, rank)).backward()  # units have been gathered and freed
    _load(model, where, kind)
    expected = peft.PeftModel.from_pretrained(_base(kind), where / "adapters")
    torch.testing.assert_close(wholes(model), dict(expected.state_dict()), atol=0, rtol=0)
    assert torch.equal(logits_of(model), logits_of(expected)), kind
    model.train()
    loss_of(model, token_batch(0, 0, rank)).backward()


def test_base_and_adapters_are_those_that_peft_reads(tmp_path):
    ways = [_core_zero3, _zero2, _fsdp2]
    for kind in KINDS:
        _saved(tmp_path, kind)
    kinds = [kind for kind in KINDS if kind != "gpt2"]
    cases = [(kind, ways[i % 3]) for i, kind in enumerate(kinds)]
    cases += [("gpt2", _core_zero3), ("bf16", _core_zero3), ("dora", _fsdp2), ("ia3", _zero2)]
    each_on_ranks(_reads, 2, cases, str(tmp_path), timeout_s=300)
    each_on_ranks(_reads, 3, [("tied", _core_zero3)], str(tmp_path), timeout_s=100)
    _reads(0, 1, ("dora", _plain), str(tmp_path))
