"""LSTM, GRU and RNN, which keep lists of their weights beside their attributes, train as unsharded
ones do.
"""

import copy
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_fsdp import ZERO3, MixedPrecisionPolicy, ShardedTensor, fully_shard, shard_model
from lightning_fsdp.engines.undo import give_back
from tests.support.memory import StorageTracker
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    PLANS,
    assert_losses_match,
    assert_ranks_agree,
    assert_same_tensors,
    assert_traces_match,
    make_batches,
    train_reference,
    whole,
)
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

LAYERS = {
    "lstm": lambda: nn.LSTM(7, 11, batch_first=True),
    "lstm, all options": lambda: nn.LSTM(
        7, 11, num_layers=2, batch_first=True, bidirectional=True, proj_size=5, dropout=1e-9
    ),
    "lstm without bias": lambda: nn.LSTM(7, 11, bias=False, batch_first=True),
    "gru": lambda: nn.GRU(7, 11, num_layers=2, batch_first=True),
    "rnn": lambda: nn.RNN(7, 11, bidirectional=True, nonlinearity="relu", batch_first=True),
}


class Tagger(nn.Module):
    """A recurrent layer over sequences of 6, 4 and 3 steps, and a head on each step."""

    def __init__(self, kind, is_packed=False):
        super().__init__()
        self.recurrent = LAYERS[kind]()
        self.is_packed = is_packed
        width = 11 if self.recurrent.proj_size == 0 else 5
        self.head = nn.Linear(width * (2 if self.recurrent.bidirectional else 1), 3)

    def forward(self, inputs):
        if not self.is_packed:
            return self.head(self.recurrent(inputs)[0])
        lengths = [6, 4, 3] * (len(inputs) // 3)
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(outputs)


class Stacked(nn.Module):
    """Two taggers' layers one after another, as blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(7, 7, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(7, 3)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + block(inputs)[0]
        return self.head(inputs)


MODELS = {
    **{name: lambda name=name: Tagger(name) for name in LAYERS},
    "lstm on packed sequences": lambda: Tagger("lstm", is_packed=True),
    "blocks": Stacked,
}


def make(name):
    torch.manual_seed(3)
    return MODELS[name]()


def make_batch(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(1 + 100 * step + 10 * micro_batch + rank)
    return {
        "inputs": torch.randn(3, 6, 7, generator=generator),
        "targets": torch.randn(3, 6, 3, generator=generator),
    }


def loss_of(model, batch):
    return 0.25 * nn.functional.mse_loss(model(batch["inputs"]).float(), batch["targets"])


def _batches(world_size):
    return make_batches(make_batch, num_steps=3, num_micro_batches=2, world_size=world_size)


SHARDINGS = {
    "unit": lambda model, plan: shard_model(model, plan, units=lambda m: isinstance(m, nn.RNNBase)),
    "within a unit": lambda model, plan: fully_shard(
        model, reshard_after_forward=plan.reshard_after_forward
    ),
}


def _train(rank, world_size, name, how):
    traces = {}
    for plan in PLANS:
        model = SHARDINGS[how](make(name), PLANS[plan])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        traces[plan] = train_on_rank(model, _batches(world_size), loss_of, optimizer, rank)
    return traces


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_recurrent_layers_train_as_in_one_process(name, how):
    by_rank = run_on_ranks(_train, 2, name, how)
    expected = train_reference(make(name), _batches(2), loss_of, OPTIMIZERS["sgd"])
    for plan in PLANS:
        traces = [traces[plan] for traces in by_rank]
        assert_ranks_agree(traces, plan)
        assert_traces_match(traces[0], expected, atol=1e-6, what=plan)
        assert_losses_match(traces, expected, atol=1e-6)


def _hold_nothing(rank, world_size):
    """Under ZeRO-3, no list of weights keeps a whole copy, and what it lists is sharded."""
    model = SHARDINGS["unit"](make("lstm"), ZERO3)
    with StorageTracker(model) as tracker:
        loss = loss_of(model, make_batch(0, 0, rank))
        assert not any(tracker.whole_sizes())
        loss.backward()
        assert not any(tracker.whole_sizes())
    layer = model.recurrent
    listed = list(layer._flat_weights)
    assert all(ours is p for ours, p in zip(listed, layer.parameters(), strict=True))


def test_a_recurrent_layer_is_freed_with_its_unit():
    run_on_ranks(_hold_nothing, 2)


def _convert_copy_and_give_back(rank, world_size):
    """On CUDA, flattening would move weights out of the unit's whole copy: it must not happen."""
    model, plain = make("lstm"), make("lstm")
    batch = make_batch(0, 0, rank)
    patch = mock.patch.object(nn.RNNBase, "flatten_parameters", side_effect=AssertionError)
    patch.start()
    SHARDINGS["unit"](model, ZERO3)
    model.to("cpu").recurrent.flatten_parameters()  # as scripts do
    copied = copy.deepcopy(model)
    expected = loss_of(plain, batch)
    expected.backward()
    for each in (model, copied):
        loss = loss_of(each, batch)
        assert torch.equal(loss, expected)
        loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(loss_of(copied, batch), expected), "a copy uses the first one's weights"
    patch.stop()
    give_back(copied)
    assert vars(copied.recurrent).keys() == vars(plain.recurrent).keys()
    assert all(type(weight) is nn.Parameter for weight in copied.recurrent._flat_weights)
    copied.recurrent.weight_ih_l0 = nn.Parameter(plain.recurrent.weight_ih_l0.detach().clone())
    assert torch.equal(loss_of(copied.to("cpu"), batch), expected)


def test_a_recurrent_layer_is_converted_copied_and_given_back():
    run_on_ranks(_convert_copy_and_give_back, 2)


def _shard_from_meta(rank, world_size):
    """The same values as the same calls on a real module give."""
    torch.manual_seed(5)
    with torch.device("meta"):
        model = Tagger("lstm, all options")
    SHARDINGS["unit"](model, ZERO3)
    torch.manual_seed(5)
    plain = Tagger("lstm, all options")
    torch.manual_seed(5)
    for module in (plain.recurrent, plain.head):
        module.reset_parameters()
    values = {name: whole(parameter) for name, parameter in model.named_parameters()}
    assert_same_tensors(values, dict(plain.named_parameters()), atol=0)
    loss_of(model, make_batch(0, 0, rank)).backward()


def test_a_recurrent_layer_from_the_meta_device():
    run_on_ranks(_shard_from_meta, 2)


def _train_in_low_precision(rank, world_size):
    bf16 = torch.bfloat16
    model = shard_model(make("gru"), mp_policy=MixedPrecisionPolicy(param_dtype=bf16))
    loss = loss_of(model, make_batch(0, 0, rank))
    loss.backward()
    assert loss.dtype == torch.float32
    low = make("gru").to(bf16)
    expected = low(make_batch(0, 0, rank)["inputs"].to(bf16))
    assert torch.equal(model(make_batch(0, 0, rank)["inputs"]), expected)
    assert model.recurrent.weight_hh_l1.grad.dtype == torch.float32


def test_a_recurrent_layer_in_low_precision():
    run_on_ranks(_train_in_low_precision, 2)


def _train_referred(rank, world_size):
    """What refers weakly to a weight, as a dictionary may, finds the sharded one: the same."""
    model = make("lstm")
    weight = model.recurrent.weight_hh_l0
    reference, known = weakref.ref(weight), WeakTensorKeyDictionary({weight: "known"})
    shard_model(model)
    loss_of(model, make_batch(0, 0, rank)).backward()
    assert reference() is weight
    assert weight is model.recurrent.weight_hh_l0
    assert known[model.recurrent.weight_hh_l0] == "known"
    assert type(weight.grad) is ShardedTensor
    del model, weight
    assert reference() is None


def test_weights_that_others_refer_to_weakly_are_sharded():
    run_on_ranks(_train_referred, 2)
