"""What a script written for torch's FSDP2 imports is imported from here by the same names.

And what torch's pipelining and its functions for FSDP2's state dicts do with modules that were
sharded here.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lightning_fsdp
from lightning_fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedTensor,
    UnshardHandle,
    fully_shard,
    register_forward_method,
    register_fsdp_forward_method,
)
from tests.support.models import causal_lm, lm_loss, mlp, mlp_batch, mlp_loss, token_batch
from tests.support.parity import assert_same_tensors, whole
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Of tensor parallelism; of a method that is refused (torch 2.15).
NOT_OFFERED = {"DataParallelMeshDims", "GradientReductionHandle"}


def test_public_names_of_fsdp2_are_public_here():
    assert set(_fully_shard.__all__) - set(lightning_fsdp.__all__) <= NOT_OFFERED
    assert register_fsdp_forward_method is register_forward_method
    assert issubclass(CPUOffloadPolicy, OffloadPolicy)


def test_policies_take_their_fields_by_position_as_in_fsdp2():
    fields = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "output_dtype": torch.float16,
        "cast_forward_inputs": False,
    }
    for cls in (MixedPrecisionPolicy, fsdp.MixedPrecisionPolicy):
        policy = cls(*fields.values())
        assert {name: getattr(policy, name) for name in fields} == fields
    for cls in (CPUOffloadPolicy, fsdp.CPUOffloadPolicy):
        assert not cls(False).pin_memory


def _sums_over_ranks(rank, world_size):
    """The loop by which scripts switch the division off, in each module that was sharded."""
    model = causal_lm()
    policy = MixedPrecisionPolicy(torch.float32, torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mp_policy=policy, offload_policy=OffloadPolicy())
    found = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            assert isinstance(module.unshard(async_op=True), UnshardHandle)
            found.append(name)
    lm_loss(model, token_batch(0, 0, rank)).backward()
    return found, {name: whole(p.grad) for name, p in model.named_parameters()}


def test_a_loop_over_sharded_modules_finds_them_and_gives_sums_of_gradients():
    plain = causal_lm()
    for rank in range(2):
        lm_loss(plain, token_batch(0, 0, rank)).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for found, sums in run_on_ranks(_sums_over_ranks, 2):
        assert found == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert_same_tensors(sums, expected, atol=1e-6, what="sums")


WHOLE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _trained(seed, batches):
    """A plain model and its optimizer, after a step on what all ranks have."""
    model = mlp(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in batches:
        (mlp_loss(model, batch) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _load_by_torch(rank, world_size, options):
    """Whole weights and moments of a plain model, given to a sharded one; then both train on."""
    batches = [mlp_batch(0, 0, rank) for rank in range(world_size)]
    plain, optimizer = _trained(1, batches)
    weights = get_model_state_dict(plain, options=WHOLE)
    moments = get_optimizer_state_dict(plain, optimizer, options=WHOLE)
    has_them = rank == 0 or not options.broadcast_from_rank0
    model = fully_shard(mlp(seed=2))
    sharded = torch.optim.AdamW(model.parameters(), lr=0.1)
    set_model_state_dict(model, dict(weights) if has_them else {}, options=options)
    given = copy.deepcopy(moments) if has_them else {}
    set_optimizer_state_dict(model, sharded, given, options=options)
    kept = get_model_state_dict(model, options=WHOLE)
    assert all(isinstance(value, ShardedTensor) for value in kept.values())
    with pytest.raises(TypeError, match=r"Save full_state_dict\(module\)"):
        torch.save(kept, io.BytesIO())
    mlp_loss(model, batches[rank]).backward()
    sharded.step()
    for batch in batches:
        (mlp_loss(plain, batch) / len(batches)).backward()
    optimizer.step()
    return [
        {name: whole(value) for name, value in module.named_parameters()}
        for module in (model, plain)
    ]


@pytest.mark.parametrize("options", [WHOLE, FROM_RANK_0], ids=["on_all", "on_rank_0"])
def test_torch_loads_whole_state_dicts_and_keeps_what_it_reads_sharded(options):
    for ours, theirs in run_on_ranks(_load_by_torch, 2, options):
        assert_same_tensors(ours, theirs, atol=1e-6, what="weights")


def _layers():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(4)])


def _inputs(replica):
    return mlp_batch(0, 0, replica, size=6)["inputs"]


def _in_a_pipeline(rank, world_size):
    """Two stages, each sharded over two ranks; six micro-batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    index, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    part = _layers()[2 * index : 2 * index + 2]
    for module in [*part, part]:
        fully_shard(module, mesh=mesh["data"])
    stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = Schedule1F1B(
        stage, n_microbatches=6, loss_fn=lambda out, _: out.square().sum(), scale_grads=False
    )
    inputs = _inputs(replica)
    schedule.step(*([inputs] if index == 0 else []), target=inputs)
    gradients = [whole(parameter.grad) for parameter in part.parameters()]
    return index, dict(enumerate(gradients))


def test_stages_of_torchs_pipelining_give_the_gradients_of_plain_torch():
    plain = _layers()
    for replica in range(2):
        (plain(_inputs(replica)).square().sum() / 2).backward()
    for index, gradients in run_on_ranks(_in_a_pipeline, 4):
        part = plain[2 * index : 2 * index + 2]
        expected = {i: parameter.grad for i, parameter in enumerate(part.parameters())}
        assert_same_tensors(gradients, expected, atol=1e-5, what=f"stage {index}")
