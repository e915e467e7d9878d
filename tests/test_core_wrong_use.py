"""Wrong use: a named error at once, on every rank, and nothing half-sharded behind it.

Messages are checked for what a user needs to act: the place, what was found, what to do. Ranks that
disagree get the error before any data moves; a test that hangs fails.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fsdp import (
    ShardingPlan,
    fully_shard,
    shard_model,
    share_comm_ctx,
)
from tests.support.models import causal_lm, mlp, mlp_batch, mlp_loss
from tests.support.parity import adamw
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.wrong_use import with_integer_parameter

# --- at the door, one rank is enough ---


def test_no_process_group():
    for shard in (fully_shard, shard_model):
        model = mlp()
        with pytest.raises(RuntimeError, match="init_process_group"):
            shard(model)
        assert all(type(p) is nn.Parameter for p in model.parameters())


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
        shard_model(with_integer_parameter())
    elif what == "integer parameter by hand":
        fully_shard(with_integer_parameter())
    elif what == "not a module":
        fully_shard(model.bonus)
    elif what == "ModuleList":
        fully_shard(causal_lm().blocks)
    elif what == "sharded by torch":
        shard_model(torch.distributed.fsdp.fully_shard(causal_lm()))
    elif what == "ignored by name":
        shard_model(model, ignored_params={"second.weight"})
    elif what == "a size as mesh":
        shard_model(model, mesh=1)
    elif what == "a dtype as policy":
        shard_model(model, mp_policy=torch.bfloat16)
    elif what == "built in inference mode":
        with torch.inference_mode():
            model = mlp()
        shard_model(model)
    elif what == "in a list":
        fully_shard([model, with_integer_parameter()])


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
        ("ignored by name", "TypeError", ["ignored_params", "'second.weight'"]),
        ("a size as mesh", "TypeError", ["DeviceMesh for mesh, got 1"]),
        ("a dtype as policy", "TypeError", ["for mp_policy, got torch.bfloat16"]),
        ("built in inference mode", "ValueError", ["'mix'", "outside of torch.inference_mode()"]),
        ("in a list", "ValueError", ["int64 for 'modules[1].second.table'"]),
    ],
)
def test_wrong_arguments_are_named(what, types, words):
    assert_errors(errors_on_ranks(_door, 1, what), types, *words)


class _Placement:
    """Shown with an address, as functions are; another one on every rank."""

    def __init__(self, rank):
        self.rank = rank

    def __repr__(self):
        return f"<function at 0x7f{self.rank:010x}>"


def _unsupported(rank, world_size, name):
    model = mlp()
    if name == "shard_placement_fn":
        fully_shard(model, shard_placement_fn=_Placement(rank))
    elif name == "mesh":
        names = ("pipe", "replicate", "shard")
        shape = torch.distributed.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=names)
        fully_shard(model, mesh=shape)


@pytest.mark.parametrize("name", ["shard_placement_fn", "mesh"])
def test_arguments_of_fsdp2_that_do_not_exist_here_are_refused_by_name(name):
    assert_errors(
        errors_on_ranks(_unsupported, 2, name), "NotImplementedError ValueError TypeError", name
    )


def _a_number_of_ranks(rank, world_size, what):
    """What torch takes for the size of a smaller group, and Python for ``True``."""
    model = mlp()
    if what == "argument":
        fully_shard(model, reshard_after_forward=2)
    elif what == "plan":
        shard_model(model, ShardingPlan(reshard_after_forward=1, reshard_after_backward=True))
    elif what == "method":
        fully_shard(model).set_reshard_after_forward(2)


@pytest.mark.parametrize("what", ["argument", "plan", "method"])
def test_a_group_to_reshard_to_is_refused_with_what_keeps_a_copy_in_a_host(what):
    words = ["reshard_after_forward: expected True, False or None", "state_over='all'"]
    assert_errors(errors_on_ranks(_a_number_of_ranks, 2, what), "NotImplementedError", *words)


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


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "GSAM", "Adam_mini", "SophiaH"])
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
    elif how == "no bias":
        model.second.bias = None
    elif how == "tied":
        model.second.bias = model.first.bias
    elif how == "functional_call":
        wholes = {name: p.full_tensor() for name, p in model.named_parameters()}
        torch.func.functional_call(model, wholes, (mlp_batch(0, 0, rank)["inputs"],))
    elif how == "data of another shape":
        model.second.weight.data = torch.zeros(3)
    optimizer = adamw(model.parameters())
    mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("half to bfloat16", ["bfloat16"]),
        ("to meta", ["stays on cpu"]),
        ("another parameter", ["second.weight", "got another or none", "copy_"]),
        ("no bias", ["'second.bias', got another or none", "Remove or tie it before"]),
        ("tied", ["'second.bias', got another or none", "Remove or tie it before"]),
        ("functional_call", ["'mix', got another or none", "Instead of functional_call, compute"]),
        (
            "data of another shape",
            ["'second.weight'", "got (3,)", "change shapes, and move it, before"],
        ),
    ],
)
def test_a_model_changed_after_sharding(how, words):
    errors = errors_on_ranks(_change_after_sharding, 2, how)
    assert_errors(errors, "RuntimeError TypeError ValueError NotImplementedError", *words)


# --- what FSDP2 has beside ---


def _beside_fsdp2(rank, world_size):
    model = fully_shard(mlp(), shard_placement_fn=None)
    share_comm_ctx([model, fully_shard(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match="expected a sharded module, got Linear"):
        share_comm_ctx([model, nn.Linear(2, 2)])
    model.unshard()
    with pytest.raises(RuntimeError, match=r"'mix'.*full_tensor.*unshard\(\) gathers ahead"):
        torch.zeros(2, 3) @ model.mix
    model.reshard()


def test_names_of_fsdp2_are_taken_or_refused_by_name():
    run_on_ranks(_beside_fsdp2, 2)
