"""Models with adapters of peft train under every engine what they train in plain torch."""

import functools
import warnings
from pathlib import Path

import pytest
import torch

from lightning_fsdp import ZERO2, ZERO3, fully_shard, shard_model
from tests.support.adapters import (
    FEW_GRAPHS,
    KINDS,
    Adapted,
    adapted,
    adapted_loader,
    loss_of,
    token_batch,
)
from tests.support.cases import each_on_ranks, each_on_trainer_ranks
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    assert_traces_match,
    make_batches,
    sgd,
    train_reference,
)
from tests.support.trainer import SHARDED, make_trainer, weights_of, with_options


def _zero2(model):
    return shard_model(model, ZERO2)


def _zero3(model):
    return shard_model(model, ZERO3)


def _by_hand(model):
    inner = model.get_base_model().base_model
    for block in inner.h if hasattr(inner, "h") else inner.layers:
        fully_shard(block)
    return fully_shard(model)


def _recomputed(model):
    """Each block's forward runs again in its backward, and gathers for it."""
    base, runs = model.get_base_model(), []
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: runs.append(1))
    model = shard_model(model, ZERO3)
    forward = model.forward

    def checked(*args, **kwargs):
        assert len(runs) % 2 == 0, "a block was not computed again"
        return forward(*args, **kwargs)

    model.forward = checked
    return model


def _tolerance(kind):
    return 2e-2 if kind.startswith("bf16") else 3e-6


def _train(rank, world_size, case):
    kind, shard = case
    batches = make_batches(token_batch, num_steps=2, num_micro_batches=2, world_size=world_size)
    expected = train_reference(adapted(kind), batches, loss_of, sgd, clip=(0.5, 2.0))
    model = shard(adapted(kind))
    found = train_on_rank(model, batches, loss_of, sgd(model.parameters()), rank, clip=(0.5, 2.0))
    assert_traces_match(found, expected, atol=_tolerance(kind), what=f"{kind}, {shard.__name__}")
    before = dict(adapted(kind).named_parameters())
    for name, value in found.parameters[-1].items():
        assert torch.equal(value, before[name]) != before[name].requires_grad, name


def test_adapters_train_under_the_core_as_in_plain_torch():
    # Each kind in one of the ways on two ranks, and every second in another on one.
    ways = [_zero3, _zero2, _by_hand]
    for world_size in (2, 1):
        cases = [(kind, ways[(i + world_size) % 3]) for i, kind in enumerate(KINDS)]
        cases = cases if world_size == 2 else cases[::2]
        each_on_ranks(_train, world_size, [*cases, ("tied", _recomputed)], timeout_s=120)


OPTIONS = {
    "": {},
    "recomputed": {"activation_checkpointing": True},
    "compiled": {"compile": True},
    "summed": {"accumulation": "sum"},
}
# Adapters, how they are trained, and where.
TRAINER_CASES = [
    *(("qwen2", "", strategy) for strategy in SHARDED[1::2]),
    *(("bf16", "", strategy) for strategy in SHARDED[::2]),
    *(("tied", "recomputed", strategy) for strategy in SHARDED[::2]),
    *(("embedding", "", strategy) for strategy in SHARDED[1::2]),
    ("bf16 tied", "recomputed", "fsdp1_zero2"),
    ("dora", "", "fsdp1_zero3"),
    ("ia3", "", "fsdp2_zero2"),
    ("tokens", "summed", "scratch_fsdp_zero2"),
]


def _sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _fit(strategy, kind, folder, optimizer=_sgd, **options):
    model = Adapted(kind, optimizer=optimizer)
    options = {"accumulate_grad_batches": 2, **options}
    make_trainer(strategy, Path(folder), **options).fit(model, adapted_loader())
    return weights_of(model)


@functools.cache
def _under_ddp(kind, folder):
    return _fit("ddp", kind, folder, gradient_clip_val=0.5)


def _as_ddp(rank, world_size, case, folder):
    kind, how, strategy = case
    expected = _under_ddp(kind, folder)
    found = _fit(with_options(strategy, **OPTIONS[how]), kind, folder, gradient_clip_val=0.5)
    tolerance = _tolerance(kind)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert found.keys() == Adapted(kind).state_dict().keys()


def test_adapters_train_under_every_strategy_as_under_ddp(tmp_path):
    each_on_trainer_ranks(_as_ddp, 2, TRAINER_CASES, str(tmp_path), timeout_s=250)


def _compiled(rank, world_size, case, folder):
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # dynamo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        _as_ddp(rank, world_size, case, folder)


@pytest.mark.slow
def test_compiled_units_train_adapters(tmp_path):
    # FSDP2 has hooks on units, as the core, and wraps none of them as FSDP1 does.
    cases = [(FEW_GRAPHS, "compiled", strategy) for strategy in SHARDED[:4:2]]
    each_on_trainer_ranks(_compiled, 2, cases, str(tmp_path), timeout_s=280)


def _muon(rank, world_size, strategy, folder):
    expected = _fit("ddp", "qwen2", folder, torch.optim.Muon)
    found = _fit(strategy, "qwen2", folder, torch.optim.Muon)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_an_optimizer_over_whole_matrices_steps_adapters(tmp_path):
    each_on_trainer_ranks(_muon, 2, SHARDED[::2], str(tmp_path), timeout_s=120)


def _mixed(rank, world_size, kind, folder):
    with pytest.raises(
        NotImplementedError, match=r"FSDP1: expected one dtype .* got torch.bfloat16"
    ):
        _fit("fsdp1_zero3", kind, folder)


def test_fsdp1_refuses_two_dtypes_in_what_cannot_be_gathered_alone(tmp_path):
    each_on_trainer_ranks(_mixed, 2, ["bf16 dora"], str(tmp_path))
