"""Models built on the meta device: values, buffers and memory.

Where a model draws all its values in ``reset_parameters``, sharding it from the meta device must
give the very numbers that building it on the host gives under the same seed. Models of transformers
draw twice when built on the host, so there the buffers, the constants and the spread are compared.
"""

import gc
import itertools
import math

import pytest
import torch
from torch import nn

from lightning_fsdp import ZERO2, ZERO3, full_state_dict, fully_shard, shard_model
from tests.support.memory import StorageTracker, bytes_of
from tests.support.meta_models import Layer, on_meta
from tests.support.models import (
    LMShape,
    causal_lm,
    lm_loss,
    shard_lm_by_hand,
    tiny_gpt2,
    token_batch,
)
from tests.support.parity import (
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    sgd,
    train_on_rank,
    train_reference,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")


class Net(nn.Module):
    def __init__(self, width=10, num_layers=3):
        super().__init__()
        self.table = nn.Embedding(13, width, padding_idx=2)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.final = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3, bias=False))


class Scaling(nn.Module):
    """A model that initialises what is below it, as nn.Transformer and nanoGPT do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(9, 2)
        self.apply(self._init_weights)
        self.reset_parameters()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=5.0)

    def reset_parameters(self):
        for block in self.blocks:
            nn.init.constant_(block[0].bias, 0.25)


def tiny_qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        initializer_range=0.05,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config)


MODELS = {"net": Net, "scaling": Scaling, "gpt2": tiny_gpt2, "qwen2": tiny_qwen2}


def values_of(model):
    whole = {n: p.full_tensor() for n, p in model.named_parameters()}
    return {**whole, **{n: b.clone() for n, b in model.named_buffers()}}


def eager(name, seed=7):
    torch.manual_seed(seed)
    model = MODELS[name]()
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _shard(rank, world_size, name, plan, seeds):
    torch.manual_seed(seeds[rank])
    model = on_meta(MODELS[name]) if name != "gpt2" else on_meta(tiny_gpt2, seeds[rank])
    before = dict(model.named_parameters())
    shard_model(model, plan)
    assert all(p is before[n] for n, p in model.named_parameters())
    return values_of(model), torch.rand(3)


@pytest.mark.parametrize(("name", "plan"), list(zip(MODELS, itertools.cycle([ZERO2, ZERO3]))))
def test_values_are_the_same_for_every_number_of_ranks(name, plan):
    alone = run_on_ranks(_shard, 1, name, plan, [7])[0]
    for world_size in (2, 3):
        for values, _ in run_on_ranks(_shard, world_size, name, plan, [7] * world_size):
            assert_same_tensors(values, alone[0], atol=0, what=f"{name} on {world_size} ranks")


def test_values_and_generator_are_those_of_building_on_the_host():
    torch.manual_seed(7)
    Net()
    next_numbers = torch.rand(3)
    for values, numbers in run_on_ranks(_shard, 2, "net", ZERO3, [7, 7]):
        assert_same_tensors(values, eager("net"), atol=0)
        assert torch.equal(numbers, next_numbers)


def test_ranks_seeded_differently_get_the_model_of_rank_0_and_keep_their_generator():
    (first, _), (second, numbers) = run_on_ranks(_shard, 2, "net", ZERO3, [7, 8])
    assert_same_tensors(first, eager("net"), atol=0)
    assert_same_tensors(second, first, atol=0)
    assert torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(8)))


def test_an_initialiser_that_reaches_below_its_module_is_the_last_word():
    values = run_on_ranks(_shard, 2, "scaling", ZERO3, [7, 7])[0][0]
    weights = [values[f"blocks.{i}.0.weight"] for i in range(3)]
    assert all(3.5 < weight.std() < 6.5 for weight in [*weights, values["head.weight"]])
    assert not torch.equal(weights[0], weights[1])
    for i in range(3):
        assert torch.equal(values[f"blocks.{i}.0.bias"], torch.full((9,), 0.25))
    assert values["head.bias"].abs().max() < 1 / math.sqrt(9)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_transformers_models_are_initialised_as_transformers_does(name):
    values, expected = run_on_ranks(_shard, 2, name, ZERO3, [7, 7])[0][0], eager(name)
    assert values.keys() == expected.keys()
    assert name != "qwen2" or "model.rotary_emb.inv_freq" in values
    for key, value in values.items():
        reference = expected[key]
        assert value.dtype == reference.dtype, key
        if value.numel() < 500 or reference.std() == 0:  # norms, biases, frequencies
            assert torch.equal(value, reference), key
        else:  # five standard errors of the spread of either
            tolerance = 5 / math.sqrt(value.numel())
            assert value.std() / reference.std() == pytest.approx(1, abs=tolerance), key
            assert abs(value.mean() / reference.std()) < tolerance, key


def _shard_bottom_up(rank, world_size):
    torch.manual_seed(7)
    model = on_meta(Net)
    fully_shard(model.table)
    for layer in model.layers:
        fully_shard(layer)
    with torch.device("meta"):  # still inside, as a script may be
        fully_shard(model)
    return values_of(model)


def test_calls_bottom_up_give_the_same_values_as_one_call():
    for values in run_on_ranks(_shard_bottom_up, 2):
        assert_same_tensors(values, eager("net"), atol=0)


# --- what must survive ---


def _mix(rank, world_size):
    torch.manual_seed(7)
    model = on_meta(Net)
    with torch.device("cpu"):
        real = nn.Linear(10, 11)
        model.layers[1].up = real
        model.layers[1].scale = nn.Parameter(torch.full((10, 3), 6.0))  # its initialiser runs
        model.layers[0].norm.running_mean = torch.full((10,), 3.0)
        model.layers[2].rope.cos = torch.full((5, 10), 4.0)
    model.layers[2].norm.bfloat16()
    model.layers[0].requires_grad_(False)
    weight = real.weight.detach().clone()
    shard_model(model)
    values = values_of(model)
    assert torch.equal(values["layers.1.up.weight"], weight)
    assert torch.equal(values["layers.1.scale"], torch.full((10, 3), 6.0))
    assert torch.equal(values["layers.0.norm.running_mean"], torch.full((10,), 3.0))
    assert torch.equal(values["layers.0.norm.running_var"], torch.ones(10))
    assert torch.equal(values["layers.2.rope.cos"], torch.full((5, 10), 4.0))
    assert values["layers.2.norm.weight"].dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (not name.startswith("layers.0")), name


def test_what_is_real_is_kept_and_so_are_dtypes_and_frozen_parameters():
    run_on_ranks(_mix, 2)


def _only_buffers(rank, world_size):
    model = Net()
    expected = {n: t.detach().clone() for n, t in model.state_dict().items()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to("meta")
    shard_model(model)
    values = values_of(model)
    assert_same_tensors({n: values[n] for n in expected}, expected, atol=0)
    assert torch.equal(values["layers.0.rope.mask"], torch.ones(5, 5, dtype=torch.bool).tril())


def test_meta_buffers_of_a_real_model_are_computed():
    run_on_ranks(_only_buffers, 1)


def _tie(rank, world_size, by_hand):
    shape = LMShape(tied=True)
    model = on_meta(causal_lm, shape)
    assert model.head.weight is model.embedding.weight
    torch.manual_seed(7)
    shard_lm_by_hand(model, fully_shard) if by_hand else shard_model(model)
    assert model.head.weight is model.embedding.weight
    torch.manual_seed(7)
    first = torch.empty(shape.vocabulary, shape.width).normal_()
    assert torch.equal(model.embedding.weight.full_tensor(), first)  # an embedding's, not a head's
    lm_loss(model, token_batch(0, 0, rank)).backward()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_tied_weight_is_initialised_once_and_stays_tied(by_hand):
    run_on_ranks(_tie, 2, by_hand)


def _train(rank, world_size, name):
    build = tiny_gpt2 if name == "gpt2" else causal_lm
    model = on_meta(build)
    optimizer = sgd(model.parameters())  # before sharding
    shard_model(model)
    state = full_state_dict(model, rank0_only=False)
    batches = make_batches(token_batch, num_steps=3, num_micro_batches=1, world_size=world_size)
    trace = train_on_rank(model, batches, lm_loss, optimizer, rank)
    reference = build()
    reference.load_state_dict(state)
    expected = train_reference(reference, batches, lm_loss, sgd)
    assert_traces_match(trace, expected, atol=5e-6)


@pytest.mark.parametrize(("name", "world_size"), [("lm", 1), ("gpt2", 2), ("lm", 3)])
def test_training_goes_on_as_that_of_a_plain_model_with_these_values(name, world_size):
    run_on_ranks(_train, world_size, name)


# --- memory ---


def _peak(rank, world_size, plan):
    torch.manual_seed(7)
    model = on_meta(tiny_gpt2, 1)
    gc.collect()
    peak = 0

    def measure():
        nonlocal peak
        peak = max(peak, tracker.live_bytes())

    tracker = StorageTracker(at_each_operation=measure)
    with tracker:
        shard_model(model, plan)
    blocks = [sum(p.numel() for p in b.parameters()) for b in model.transformer.h]
    units = [*blocks, model.transformer.wte.weight.numel()]
    whole = sum(p.numel() for p in model.parameters())
    return peak, 4 * whole, 4 * max(units), bytes_of(model.buffers())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("plan", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_only_the_shard_and_one_unit_are_ever_real(world_size, plan):
    for peak, whole, unit, buffers in run_on_ranks(_peak, world_size, plan):
        bound = whole / world_size + unit + buffers
        # Padding of a few slots, and the generator's two states of 5 KB.
        assert bound - unit / 4 <= peak <= bound + 16_384, (peak, whole, unit, buffers)
