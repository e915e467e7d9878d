"""Wrong use at a wrong time, in a wrong order or of a wrong kind: an error that names the cure."""

import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp import (
    ZERO3,
    call_with,
    full_state_dict,
    fully_shard,
    gradients,
    register_forward_method,
    shard_model,
    weights,
)
from tests.support.models import causal_lm, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.wrong_use import AT_ONCE_S

# --- at the wrong time, in the wrong order, of the wrong kind ---


class _Meddling(nn.Module):
    """Its forward calls what a forward must not."""

    def __init__(self, meddle):
        super().__init__()
        self.meddle = meddle
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, inputs):
        self.meddle(self)
        return self.second(self.first(inputs))


class _ReturnsItsWeight(nn.Linear):
    def forward(self, inputs):
        return self.weight


def _reshard_in_forward():
    fully_shard(_Meddling(lambda model: model.reshard()))(torch.ones(2, 7))


def _outer_first():
    model = fully_shard(mlp())
    fully_shard(model.second)


def _tied_with_two_policies():
    model = causal_lm(tied=True)
    fully_shard(model.embedding, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model.head, mp_policy=MixedPrecisionPolicy())


def _shard_around_a_forward():
    inner = fully_shard(_Meddling(lambda _: fully_shard(outer)))
    outer = nn.Sequential(inner)
    outer(torch.ones(2, 7))


class _SparseTable(nn.Module):
    """Not an embedding that the door could know."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(11, 3))

    def forward(self, index):
        return F.embedding(index, self.table, sparse=True)


def _load_in_forward():
    model = fully_shard(mlp())
    state = full_state_dict(model)
    model.first.register_forward_hook(lambda *_: model.load_state_dict(state))
    model(torch.zeros(2, 7))


def _sparse_gradient():
    fully_shard(_SparseTable())(torch.arange(4)).sum().backward()


def _hook_before(register="register_hook"):
    model = mlp()
    getattr(model.mix, register)(print)
    fully_shard(model)


def _other_slice():
    model = fully_shard(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)))
    model[0].weight.data + model[1].weight.data


def _convert_unreduced():
    model = shard_model(mlp())
    with model.no_sync():
        mlp_loss(model, mlp_batch(0, 0, 0)).backward()
    model.double()


def _convert_in_forward():
    model = shard_model(mlp())
    model.first.register_forward_hook(lambda *_: model.double() and None)
    model(mlp_batch(0, 0, 0)["inputs"])


def _registered_later(read, is_others=False):
    model, other = fully_shard(mlp()), fully_shard(mlp())
    model.later = other.mix if is_others else nn.Parameter(model.mix.detach())
    assert (weights(model)["later"].full() == full_state_dict(model)["mix"]).all()
    list(read(model))


def _train_with_a_later_layer():
    model = mlp()
    model.own = nn.Linear(7, 7)
    fully_shard(model, ignored_params=set(model.own.parameters()))
    model.adapter = nn.Linear(7, 7)
    with torch.no_grad():
        model(torch.ones(2, 7))
    model(torch.ones(2, 7))


def _differentiate(model):
    torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 7))


def _call_with_a_parameter(model):
    call_with(model, lambda x, weight: x @ weight, torch.ones(2, 7), model.weight)


def _with_other_gradients():
    model = mlp().to(torch.bfloat16)
    model.second.weight.grad_dtype = torch.float32
    fully_shard(model)


def _scripted():
    with warnings.catch_warnings(action="ignore"):  # torch advises against it
        fully_shard(torch.jit.script(nn.Linear(2, 2)))


MISUSES = {
    "outer module first": (_outer_first, "bottom-up"),
    "DDP": (
        lambda: fully_shard(nn.parallel.DistributedDataParallel(mlp())),
        "Shard the module inside it",
    ),
    "sharding during a forward": (_shard_around_a_forward, "between steps"),
    "reshard during the forward": (_reshard_in_forward, "Call it after the forward"),
    "two policies of one weight": (_tied_with_two_policies, "Pass the same policy"),
    "sparse embedding": (lambda: fully_shard(nn.Embedding(11, 3, sparse=True)), "Build it dense"),
    "renormalised embedding": (
        lambda: fully_shard(nn.Embedding(11, 3, max_norm=1.0)),
        "Renormalise after",
    ),
    "gradient of another dtype": (_with_other_gradients, "Leave grad_dtype alone"),
    "sparse bag of embeddings": (
        lambda: fully_shard(nn.EmbeddingBag(11, 3, sparse=True)),
        "Build it dense",
    ),
    "renormalised bag of embeddings": (
        lambda: fully_shard(nn.EmbeddingBag(11, 3, max_norm=1.0)),
        "Renormalise after",
    ),
    "scripted module": (_scripted, "Take the one that was scripted"),
    "hook before sharding": (_hook_before, "on_local or on_reduced"),
    "hook after accumulation before sharding": (
        lambda: _hook_before("register_post_accumulate_grad_hook"),
        "on_local or on_reduced",
    ),
    "loading during the forward": (_load_in_forward, "Call it after the forward"),
    "sparse gradient": (_sparse_gradient, "sparse=False"),
    "two slices": (_other_slice, "full_tensor()"),
    "hook of a parameter": (
        lambda: fully_shard(mlp()).bonus.register_hook(print),
        "gradients(module).on_local",
    ),
    "parameter beside a batch": (
        lambda: torch.ones(2, 3) * fully_shard(mlp()).bonus,
        "register_forward_method",
    ),
    "part of a unit to another dtype": (
        lambda: fully_shard(mlp()).second.to(torch.bfloat16),
        "convert the module that was sharded",
    ),
    "to another dtype while gradients wait": (_convert_unreduced, "zero_grad()"),
    "to another dtype during the forward": (_convert_in_forward, "Call it after the forward"),
    "to integers": (lambda: fully_shard(mlp())._apply(lambda t: t.int()), "floating-point"),
    "assigning another dtype": (
        lambda: fully_shard(mlp()).load_state_dict(mlp().double().state_dict(), assign=True),
        "Convert the module first",
    ),
    "random values": (lambda: torch.randint_like(fully_shard(mlp()).bonus, 4), "bonus"),
    "values that depend on places": (lambda: nn.init.eye_(fully_shard(mlp()).mix), "copy_()"),
    "copy of another shape": (
        lambda: fully_shard(mlp()).mix.data.copy_(torch.ones(3)),
        "original shape",
    ),
    "torch's DDP around it": (
        lambda: nn.parallel.DistributedDataParallel(fully_shard(mlp())),
        "A wrapper (DDP, torch's FSDP) is left out",
    ),
    "torch's FSDP2 around a part": (
        lambda: torch_fsdp.fully_shard(nn.Sequential(fully_shard(nn.Linear(7, 7)))),
        "A wrapper (DDP, torch's FSDP) is left out",
    ),
    "method of a plain module": (
        lambda: register_forward_method(mlp(), "forward"),
        "Call fully_shard first",
    ),
    "weights of a parameter that came after sharding": (
        lambda: _registered_later(lambda model: weights(model).full()),
        "'later': expected a parameter of the module's units",
    ),
    "training of a parameter that came after sharding": (
        _train_with_a_later_layer,
        "'adapter.weight' after it: each rank would train its own. Add adapters and heads before",
    ),
    "hook of gradients of another model's parameter": (
        lambda: _registered_later(lambda model: gradients(model).on_local(print), is_others=True),
        "Register it before fully_shard",
    ),
    "transform of torch.func": (
        lambda: _differentiate(fully_shard(mlp())),
        "Use torch.autograd.grad",
    ),
    "map of torch.func": (
        lambda: torch.func.vmap(fully_shard(mlp()))(torch.ones(2, 7)),
        "vmap under torch.no_grad()",
    ),
    "parameter as an argument": (
        lambda: _call_with_a_parameter(fully_shard(nn.Linear(7, 7))),
        "from the module (self.weight), not from an argument",
    ),
    "weight that a forward returned": (
        lambda: shard_model(_ReturnsItsWeight(3, 3))(torch.ones(3)).exp(),
        "Let the forward return weight.clone()",
    ),
    "unknown name": (lambda: gradients(fully_shard(mlp()))["second.weigth"], "second.weight"),
}


def _misuse(rank, world_size, name):
    MISUSES[name][0]()


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_that_names_the_cure(name):
    types = "RuntimeError ValueError TypeError NotImplementedError KeyError"
    assert_errors(errors_on_ranks(_misuse, 2, name, timeout_s=AT_ONCE_S), types, MISUSES[name][1])


def _map(rank, world_size):
    plain, inputs = mlp(), torch.ones(3, 2, 7)
    with torch.no_grad():  # also the first forward
        torch.testing.assert_close(torch.func.vmap(shard_model(mlp()))(inputs), plain(inputs))


def test_without_gradients_a_sharded_module_may_be_mapped():
    run_on_ranks(_map, 2)


# --- a sharded parameter where the whole one is needed ---

WHOLE_USES = {
    "linear": lambda model, p: F.linear(torch.zeros(2, p.shape[1]), p),
    "matmul": lambda model, p: torch.zeros(2, p.shape[1]) @ p.t(),
    "submodule's weight": lambda model, p: torch.zeros(2, 7).matmul(model.first.weight.T),
    "norms of rows": lambda model, p: p.detach().norm(dim=1),
    "sum with a graph": lambda model, p: p.sum(),
    "median": lambda model, p: p.detach().median(),
    "view": lambda model, p: p.detach().view(-1),
    "index": lambda model, p: p.detach()[0],
    "torch.save": lambda model, p: torch.save(model.state_dict(), io.BytesIO()),
    "torch.save of the parameter": lambda model, p: torch.save(p, io.BytesIO()),
    "numpy": lambda model, p: p.detach().numpy(),
    "item": lambda model, p: model.scale.item(),
}
CURES = {
    "torch.save": "full_state_dict",
    "torch.save of the parameter": "full_state_dict",
    "numpy": "numpy",  # torch's own words
}


def _use_whole(rank, world_size):
    """The error of each use; None where it gave a result."""
    model = shard_model(mlp(), ZERO3)
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    errors = {}
    for name, use in WHOLE_USES.items():
        try:
            use(model, model.second.weight)
            errors[name] = None
        except Exception as error:  # noqa: BLE001
            errors[name] = type(error).__name__, str(error)
    return errors


def test_an_operation_on_a_whole_tensor_raises_on_a_sharded_one_and_names_the_cure():
    for errors in run_on_ranks(_use_whole, 2):
        assert [name for name, error in errors.items() if error is None] == [], (
            "ran silently on slices"
        )
        wordless = {
            name: error
            for name, error in errors.items()
            if CURES.get(name, "full_tensor") not in error[1]
        }
        assert wordless == {}


class _Peeks(nn.Module):
    """Uses a block's weight outside the block."""

    def __init__(self):
        super().__init__()
        self.lm = causal_lm()

    def forward(self, tokens):
        return self.lm(tokens) + self.lm.blocks[1].up.weight.sum()


def _forward_outside_unit(rank, world_size, how):
    if how == "weight of another unit":
        model = shard_model(_Peeks())
        model(token_batch(0, 0, rank)["tokens"][:, :-1])
    elif how == "forward called by its name":
        shard_model(causal_lm()).blocks[0].forward(torch.zeros(1, 2, 20))
    else:
        model = fully_shard(causal_lm())
        model.head(torch.zeros(1, 2, 20))


@pytest.mark.parametrize(
    "how", ["weight of another unit", "submodule called alone", "forward called by its name"]
)
def test_a_forward_on_a_sharded_parameter_outside_its_unit(how):
    errors = errors_on_ranks(_forward_outside_unit, 2, how)
    cure = "not module.forward" if "by its name" in how else "register_forward_method"
    assert_errors(errors, "RuntimeError TypeError NotImplementedError", cure)
