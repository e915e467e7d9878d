"""Blocks that are computed again, and what they had written to: caches, lists and dictionaries."""

import dataclasses
import inspect

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from lightning_fsdp.strategies import unit_calls
from tests.support.adapters import qwen2
from tests.support.pretrained import _gpt2
from tests.support.trainer import (
    SHARDED,
    assert_each_like_ddp,
    make_trainer,
    not_under,
    on_trainer_ranks,
    seeded,
    weights_of,
    with_options,
)


def _t5():
    config = T5Config(vocab_size=61, d_model=24, d_kv=6, d_ff=36, num_layers=2, num_heads=4)
    config.dropout_rate, config.decoder_start_token_id = 0.0, 0
    return T5ForConditionalGeneration(config)


class _Cached(pl.LightningModule):
    """``use_cache`` is left as transformers has it: on."""

    def __init__(self, make):
        super().__init__()
        self.model = make()
        self.cache = None

    def training_step(self, ids, batch_idx):
        mask = torch.ones_like(ids)
        mask[:, -2:] = 0  # without one, attention does not see how many keys there are
        more = {} if self.cache is None else {self._name_of_cache(): self.cache}
        return self.model(input_ids=ids, attention_mask=mask, labels=ids, **more).loss

    def _name_of_cache(self):
        """Of the argument: transformers 5.24 renamed it."""
        parameters = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in parameters else "past_key_values"

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _loader():
    return DataLoader(torch.arange(16 * 8).view(16, 8) % 61, batch_size=4)


def _fit(make, strategy, folder):
    module = seeded(lambda: _Cached(make))
    strategy = with_options(strategy, activation_checkpointing=True)
    make_trainer(strategy, folder).fit(module, _loader())
    return weights_of(module)


def recomputed_gpt2(strategy, folder, rank):
    return _fit(_gpt2, strategy, folder)


def recomputed_qwen2(strategy, folder, rank):
    return _fit(qwen2, strategy, folder)


@not_under("fsdp2", reason="torch warns that a block of T5 returns a view, which is an error here")
def recomputed_t5(strategy, folder, rank):
    return _fit(_t5, strategy, folder)


def test_blocks_that_are_computed_again_append_nothing_to_a_cache(tmp_path):
    assert_each_like_ddp([recomputed_gpt2, recomputed_qwen2, recomputed_t5], tmp_path)


def _refuse(rank, world_size, folder):
    module = seeded(lambda: _Cached(qwen2))
    module.cache = DynamicCache()
    keys = torch.zeros(4, 2, 3, 6)
    for layer in range(2):
        module.cache.update(keys, keys, layer)
    trainer = make_trainer(with_options(SHARDED[0], activation_checkpointing=True), folder)
    with pytest.raises(ValueError, match=r"^activation_checkpointing: expected a cache \(past_"):
        trainer.fit(module, _loader())


def test_a_cache_with_keys_is_refused(tmp_path):
    on_trainer_ranks(_refuse, 2, tmp_path)


@dataclasses.dataclass
class _State:
    hidden: torch.Tensor
    seen: list = dataclasses.field(default_factory=list)


class _Writes(nn.Module):
    """Its caller reads what it has written; it returns nothing."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, state, sums, *, named):
        hidden = state.hidden * (1 + len(sums) + len(state.seen)) + named["bias"][0]
        state.hidden = torch.sigmoid(self.layer(hidden)) * torch.tanh(self.layer(hidden))
        state.seen.append(hidden)
        sums[len(sums)] = hidden.square().sum()
        named["bias"] = (hidden.sum(), None)


class _Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Writes() for _ in range(3))

    def forward(self, inputs):
        state, sums, named = _State(inputs), {}, {"bias": (inputs.sum(), None)}
        for block in self.blocks:
            block(state, sums, named=named)
        assert len(state.seen) == 3
        return state.hidden.sum() + state.seen[1].sum() + sum(sums.values()) + named["bias"][0]


def test_blocks_that_write_to_what_they_are_passed_begin_again_with_what_it_held():
    gradients = []
    for recomputes in (False, True):
        model = seeded(_Written)
        unit_calls.apply(model, ["_Writes"], checkpointing=recomputes, compiles=False)
        loss = model(torch.linspace(-1, 1, 10).view(2, 5))
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class _TakesOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, outputs):
        return self.layer(outputs.last_hidden_state)


def test_a_block_may_be_passed_outputs_of_a_model_of_transformers():
    """Such a mapping refuses ``update``."""
    block = _TakesOutputs()
    unit_calls.apply(block, ["_TakesOutputs"], checkpointing=True, compiles=False)
    block(BaseModelOutput(last_hidden_state=torch.ones(2, 3))).sum().backward()
    assert block.layer.weight.grad.tolist() == [[2.0] * 3] * 3


class _Named(nn.Module):
    """Takes arguments by names that ``torch.utils.checkpoint.checkpoint`` and a hook have, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *, debug=1.0, context_fn=torch.sin, module=0.0):
        return context_fn(debug * self.weight) + module


@pytest.mark.parametrize("compiles", [False, True])
def test_an_argument_with_a_name_of_torchs_checkpoint_reaches_its_block(compiles):
    block = _Named()
    unit_calls.apply(nn.Sequential(block), ["_Named"], checkpointing=True, compiles=False)
    call = torch.compile(block, backend="eager") if compiles else block
    call(debug=3.0, context_fn=torch.square, module=1.0).sum().backward()
    assert block.weight.grad.tolist() == [18.0, 18.0]


@pytest.mark.parametrize(
    "normalize", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm]
)
def test_an_estimate_that_each_call_improves_is_refused(normalize):
    model = nn.Sequential(nn.Linear(5, 5), normalize(nn.Linear(5, 5)))
    with pytest.raises(ValueError, match=r"'1.* would take each batch into its spectral norm's"):
        unit_calls.apply(model, ["Linear"], checkpointing=True, compiles=False)
