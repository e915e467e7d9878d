"""Wrong use: a named error at once, on every rank, and nothing half-sharded behind it.

Messages are checked for what a user needs to act: the place, what was found, what to do. Ranks that
disagree get the error before any data moves; a test that hangs fails.
"""

import io
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lightning_fsdp import (
    ZERO2,
    ZERO3,
    full_state_dict,
    fully_shard,
    gradients,
    register_forward_method,
    shard_model,
    share_comm_ctx,
)
from tests.support.models import MLP, causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.parity import adamw
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks

# An answer within this many seconds is "at once"; runs of two ranks take well under one.
AT_ONCE_S = 15.0


# --- at the door, one rank is enough ---


def test_no_process_group():
    for shard in (fully_shard, shard_model):
        model = mlp()
        with pytest.raises(RuntimeError, match="init_process_group"):
            shard(model)
        assert all(type(p) is nn.Parameter for p in model.parameters())


def _with_integer_parameter():
    model = mlp()
    model.second.table = nn.Parameter(torch.arange(5), requires_grad=False)
    return model


def _door(rank, world_size, what):
    """Do something wrong, with a process group of one."""
    model = mlp()
    if what == "sharded twice by hand":
        fully_shard(model)
        fully_shard(model)
    elif what == "sharded twice":
        shard_model(model)
        shard_model(model)
    elif what == "integer parameter":
        shard_model(_with_integer_parameter())
    elif what == "integer parameter by hand":
        fully_shard(_with_integer_parameter())
    elif what == "not a module":
        fully_shard(model.bonus)
    elif what == "ModuleList":
        fully_shard(causal_lm().blocks)
    elif what == "sharded by torch":
        shard_model(torch.distributed.fsdp.fully_shard(causal_lm()))


@pytest.mark.parametrize(
    ("what", "types", "words"),
    [
        ("sharded twice by hand", "RuntimeError ValueError", ["already"]),
        ("sharded twice", "RuntimeError ValueError", ["already"]),
        ("integer parameter", "TypeError ValueError", ["second.table", "int64", "ignored_params"]),
        (
            "integer parameter by hand",
            "TypeError ValueError",
            ["second.table", "int64", "ignored_params"],
        ),
        ("not a module", "TypeError ValueError", ["Parameter"]),
        ("ModuleList", "TypeError ValueError", ["ModuleList"]),
        ("sharded by torch", "TypeError ValueError RuntimeError", ["DTensor"]),
    ],
)
def test_wrong_arguments_are_named(what, types, words):
    assert_errors(errors_on_ranks(_door, 1, what), types, *words)


def _unsupported(rank, world_size, name):
    model = mlp()
    if name == "reshard_after_forward":
        fully_shard(model, reshard_after_forward=2)
    elif name == "shard_placement_fn":
        fully_shard(model, shard_placement_fn=lambda parameter: None)
    elif name == "mesh":
        names = ("pipe", "replicate", "shard")
        shape = torch.distributed.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=names)
        fully_shard(model, mesh=shape)


@pytest.mark.parametrize("name", ["reshard_after_forward", "shard_placement_fn", "mesh"])
def test_arguments_of_fsdp2_that_do_not_exist_here_are_refused_by_name(name):
    assert_errors(
        errors_on_ranks(_unsupported, 2, name), "NotImplementedError ValueError TypeError", name
    )


def _names_of_fsdp2(rank, world_size):
    """Public names of torch's FSDP2 modules that are simply missing here."""
    model = fully_shard(mlp())
    return [name for name in vars(FSDPModule) if name[0] != "_" and not hasattr(model, name)]


def test_methods_of_fsdp2_are_offered_or_refused_by_name():
    assert run_on_ranks(_names_of_fsdp2, 1) == [[]]


def _refused_method(rank, world_size):
    fully_shard(mlp()).set_all_reduce_hook(None)


def test_a_refused_method_names_itself():
    errors = errors_on_ranks(_refused_method, 1)
    assert_errors(errors, "NotImplementedError", "set_all_reduce_hook")


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
    "loading during the forward": (_load_in_forward, "Call it after the forward"),
    "sparse gradient": (_sparse_gradient, "sparse=False"),
    "two slices": (_other_slice, "full_tensor()"),
    "hook of a parameter": (
        lambda: fully_shard(mlp()).bonus.register_hook(print),
        "gradients(module).on_local",
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
    "random values": (lambda: torch.randn_like(fully_shard(mlp()).bonus), "bonus"),
    "values that depend on places": (lambda: nn.init.eye_(fully_shard(mlp()).mix), "copy_()"),
    "copy of another shape": (
        lambda: fully_shard(mlp()).mix.data.copy_(torch.ones(3)),
        "original shape",
    ),
    "norm of no p": (
        lambda: fully_shard(mlp()).clip_grad_norm_(1.0, norm_type=float("nan")),
        "norm_type",
    ),
    "method of a plain module": (
        lambda: register_forward_method(mlp(), "forward"),
        "Call fully_shard first",
    ),
    "unknown name": (lambda: gradients(fully_shard(mlp()))["second.weigth"], "second.weight"),
}


def _misuse(rank, world_size, name):
    MISUSES[name][0]()


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_that_names_the_cure(name):
    types = "RuntimeError ValueError TypeError NotImplementedError KeyError"
    assert_errors(errors_on_ranks(_misuse, 2, name, timeout_s=AT_ONCE_S), types, MISUSES[name][1])


# --- a sharded parameter where the whole one is needed ---

WHOLE_USES = {
    "linear": lambda model, p: F.linear(torch.zeros(2, p.shape[1]), p),
    "matmul": lambda model, p: torch.zeros(2, p.shape[1]) @ p.t(),
    "submodule's weight": lambda model, p: torch.zeros(2, 7).matmul(model.first.weight.T),
    "norm": lambda model, p: p.detach().norm(),
    "vector_norm": lambda model, p: torch.linalg.vector_norm(p.detach()),
    "sum": lambda model, p: p.detach().sum(),
    "view": lambda model, p: p.detach().view(-1),
    "index": lambda model, p: p.detach()[0],
    "clip": lambda model, p: nn.utils.clip_grad_norm_([p], 1.0),
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
    else:
        model = fully_shard(causal_lm())
        model.head(torch.zeros(1, 2, 20))


@pytest.mark.parametrize("how", ["weight of another unit", "submodule called alone"])
def test_a_forward_on_a_sharded_parameter_outside_its_unit(how):
    errors = errors_on_ranks(_forward_outside_unit, 2, how)
    assert_errors(errors, "RuntimeError TypeError NotImplementedError", "register_forward_method")


# --- ranks that disagree ---


class _Wider(MLP):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(15, 15, bias=False)


def _other_shape():
    model = mlp()
    model.first = nn.Linear(7, 16)
    return model


def _other_order():
    model = mlp()
    model.first, first = nn.Identity(), model.first
    del model.first
    model.first = first
    return model


def _frozen():
    model = mlp()
    model.second.requires_grad_(False)
    return model


OTHER_MODELS = {
    "another shape": _other_shape,
    "a missing parameter": _Wider,
    "another order": _other_order,
    "another dtype": lambda: mlp().double(),
    "frozen elsewhere": _frozen,
    "an integer parameter": _with_integer_parameter,
}


def _ranks_differ(rank, world_size, what, shard):
    """The last rank has another model. Whatever happens, the model must be what it was."""
    model = OTHER_MODELS[what]() if rank == world_size - 1 else mlp()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    try:
        (shard_model if shard == "shard_model" else fully_shard)(model)
    finally:
        for name, parameter in model.named_parameters():
            same, value = before[name]
            assert parameter is same, f"half-sharded: {name} is another object"
            assert type(parameter) is nn.Parameter, f"half-sharded: {name} is a {type(parameter)}"
            assert torch.equal(parameter, value), f"half-sharded: {name} has another value"
        if what == "another shape" and rank == 0:
            mlp_loss(model, mlp_batch(0, 0, rank)).backward()  # no hook is left


@pytest.mark.parametrize("shard", ["shard_model", "fully_shard"])
@pytest.mark.parametrize("what", OTHER_MODELS)
def test_ranks_with_different_models(what, shard):
    errors = errors_on_ranks(_ranks_differ, 3, what, shard, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError ValueError TypeError", "rank")
    if what == "an integer parameter":
        assert_errors(errors, "RuntimeError ValueError TypeError", "second.table")


def _ranks_differ_in_policy(rank, world_size, what):
    model = mlp()
    if what == "precision":
        dtype = torch.bfloat16 if rank else torch.float16
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    elif what == "stage":
        shard_model(model, ZERO2 if rank else ZERO3)
    elif rank:
        fully_shard(model)
    else:
        fully_shard(model.first)


@pytest.mark.parametrize("what", ["precision", "stage", "units"])
def test_ranks_with_different_plans(what):
    errors = errors_on_ranks(_ranks_differ_in_policy, 2, what, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError ValueError", "rank")


class _Branches(nn.Module):
    """Two layers whose order a rank may choose."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, inputs, swapped=False):
        first, second = (self.right, self.left) if swapped else (self.left, self.right)
        return second(torch.tanh(first(inputs)))


def _disagree_in_order(rank, world_size, num_agreed_steps, how):
    torch.manual_seed(0)
    model = _Branches()
    fully_shard(model.left)
    fully_shard(model.right)
    fully_shard(model)
    values = {name: p.full_tensor() for name, p in model.named_parameters()}
    inputs = torch.ones(2, 32) * (rank + 1)
    for _ in range(num_agreed_steps):
        model(inputs).sum().backward()
        model.zero_grad()
    try:
        if how == "skips one":
            (model(inputs) if rank != 1 else model.left(inputs)).sum().backward()
        else:
            model(inputs, swapped=rank == 1).sum().backward()
    finally:
        if num_agreed_steps == 0:
            # Nothing moved: what a rank holds is still a slice of the old values.
            for name, parameter in model.named_parameters():
                local = parameter.to_local()
                flat = values[name].flatten()
                start = 0 if rank == 0 else flat.numel() - local.numel()
                assert torch.equal(local, flat[start : start + local.numel()]), name


@pytest.mark.parametrize("how", ["swaps", "skips one"])
def test_ranks_that_disagree_in_the_first_step(how):
    errors = errors_on_ranks(_disagree_in_order, 2, 0, how, timeout_s=AT_ONCE_S)
    assert_errors(errors, "RuntimeError", "rank", "right")


@pytest.mark.parametrize("how", ["swaps", "skips one"])
def test_a_rank_that_leaves_the_order_later_is_named_within_the_groups_timeout(how):
    errors = errors_on_ranks(
        _disagree_in_order, 2, 2, how, timeout_s=AT_ONCE_S + 5, group_timeout_s=5.0
    )
    assert_errors(errors, "RuntimeError", "rank 1")


COLLECTIVES = {
    "norm of gradients": lambda model: model.clip_grad_norm_(1.0),
    "dot of gradients": lambda model: gradients(model).dot(None),
    "full_tensor of 'head.weight'": lambda model: model.head.weight.full_tensor(),
    "GradScaler's search for inf": lambda model: _unscale(model),
    "end of a backward": lambda model: _ask_who_used(model),
}


def _unscale(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters()))


def _ask_who_used(model):
    model.head.weight.spec.communicator.any_rank([False])()


def _enter_alone(rank, world_size, what):
    model = shard_model(causal_lm())
    lm_loss(model, token_batch(0, 0, rank)).backward()
    if rank == 1:
        time.sleep(4)  # past the group's timeout
        return
    with pytest.raises(RuntimeError, match=rf"^{what} \(rank 0 of 2\): expected every rank"):
        COLLECTIVES[what](model)


@pytest.mark.parametrize("what", COLLECTIVES)
def test_a_collective_that_another_rank_does_not_enter_names_itself(what):
    run_on_ranks(_enter_alone, 2, what, group_timeout_s=2.0)


# --- optimizers ---


def _step_with_other(rank, world_size, name):
    # Of another package, which is not needed for this: the name is what is known of them.
    made = type(name, (PlainDescent,), {"__module__": "pytorch_optimizer"})
    model = shard_model(mlp())
    optimizer = made(model.parameters(), lr=0.1)
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    before = {n: p.to_local().detach().clone() for n, p in model.named_parameters()}
    try:
        optimizer.step()
    finally:
        for n, p in model.named_parameters():
            assert torch.equal(p.to_local(), before[n]), f"{n} was changed"


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "GSAM", "Adam_mini"])
def test_optimizers_of_other_packages_that_sum_over_tensors_are_refused_by_name(name):
    errors = errors_on_ranks(_step_with_other, 2, name)
    assert_errors(errors, "NotImplementedError", f"{name}: expected an optimizer that updates each")


class PlainDescent(torch.optim.Optimizer):
    """An optimizer that nobody has heard of."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


# --- a model changed after sharding ---


def _change_after_sharding(rank, world_size, how):
    model = shard_model(mlp())
    if how == "half to bfloat16":
        model.second.to(torch.bfloat16)
    elif how == "to meta":
        model.to("meta")
    elif how == "another parameter":
        model.second.weight = nn.Parameter(torch.zeros(15, 15))
    optimizer = adamw(model.parameters())
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("half to bfloat16", "bfloat16"),
        ("to meta", "mix"),
        ("another parameter", "second.weight"),
    ],
)
def test_a_model_changed_after_sharding(how, word):
    errors = errors_on_ranks(_change_after_sharding, 2, how)
    assert_errors(errors, "RuntimeError TypeError ValueError NotImplementedError", word)


# --- what FSDP2 has beside ---


def _beside_fsdp2(rank, world_size):
    model = fully_shard(mlp(), shard_placement_fn=None)
    share_comm_ctx([model, fully_shard(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match="expected sharded modules, got Linear"):
        share_comm_ctx([model, nn.Linear(2, 2)])
    model.unshard()
    with pytest.raises(RuntimeError, match=r"'mix'.*full_tensor.*unshard\(\) gathers ahead"):
        torch.zeros(2, 3) @ model.mix
    model.reshard()


def test_names_of_fsdp2_are_taken_or_refused_by_name():
    run_on_ranks(_beside_fsdp2, 2)
