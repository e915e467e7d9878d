"""Mixed precision against a reference written by hand: what is computed, sent, summed and kept in
which dtype.

main shard (fp32) -> cast -> gather (param_dtype) -> forward, backward (param_dtype)
                  -> local gradient -> cast, sum over ranks (reduce_dtype) -> mean -> gradient of
                  the shard (fp32)
"""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fsdp import fully_shard
from tests.support.counting import CollectiveCounter
from tests.support.models import (
    TASKS,
    causal_lm,
    lm_loss,
    mlp,
    mlp_batch,
    mlp_loss,
    shard_lm_by_hand,
    token_batch,
)
from tests.support.one_exchange import train_on_rank
from tests.support.parity import (
    OPTIMIZERS,
    Trace,
    assert_ranks_agree,
    assert_traces_match,
    make_batches,
)
from tests.support.ranks import PLAIN, run_on_ranks

pytestmark = pytest.mark.usefixtures("kept_ranks")

BF16, FP16 = torch.bfloat16, torch.float16
NUM_STEPS, NUM_MICRO_BATCHES = 2, 3
OF_BF16 = [(BF16, torch.float32), (BF16, BF16), (BF16, None)]  # compute and reduce dtype
OF_FP16 = [(FP16, torch.float32), (FP16, FP16)]
CASES = [
    *itertools.product(["mlp"], OF_BF16, ["sgd"]),
    *itertools.product(["lm"], OF_BF16, ["adamw"]),
    *itertools.product(["mlp", "lm"], OF_FP16, ["sgd"]),
]


def policy_of(reduce_dtype, param_dtype=BF16):
    return MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, output_dtype=torch.float32
    )


def _train(rank, world_size, accumulation, cases):
    traces = {}
    for task_name, dtypes, optimizer_name in cases:
        param_dtype, reduce_dtype = dtypes
        task, policy = TASKS[task_name], policy_of(reduce_dtype, param_dtype)
        model = task.build()
        if task_name == "lm":
            shard_lm_by_hand(model, fully_shard, mp_policy=policy)
        else:
            fully_shard(model, mp_policy=policy)
        traces[task_name, dtypes, optimizer_name] = train_on_rank(
            model,
            _batches(task, world_size),
            task.loss,
            OPTIMIZERS[optimizer_name](model.parameters()),
            rank,
            accumulation=accumulation,
        )
    return traces


def _batches(task, world_size):
    return make_batches(
        task.make_batch,
        num_steps=NUM_STEPS,
        num_micro_batches=NUM_MICRO_BATCHES,
        world_size=world_size,
    )


def train_by_hand(task, dtypes, make_optimizer, world_size, accumulation):
    """All ranks in one process: a copy in the compute dtype per rank, sums in rank order in the
    reduce dtype, fp32 main weights.
    """
    model, trace = task.build(), Trace()
    param_dtype, reduce_dtype = dtypes
    optimizer, reduce_dtype = make_optimizer(model.parameters()), reduce_dtype or param_dtype
    for step in _batches(task, world_size):
        gradients = [
            [local_gradients(model, task, micro[rank], param_dtype) for micro in step]
            for rank in range(world_size)
        ]
        for index, parameter in enumerate(model.parameters()):
            by_rank = [[g[index].to(reduce_dtype) for g in micros] for micros in gradients]
            if accumulation == "local":
                parameter.grad = _mean([_add_up(micros) for micros in by_rank]).float()
            else:
                parameter.grad = _add_up(
                    [_mean(list(ranks)).float() for ranks in zip(*by_rank, strict=True)]
                )
        trace.record(model)
        optimizer.step()
        optimizer.zero_grad()
        trace.record_step(model, 0.0)
    return trace


def local_gradients(model, task, batch, param_dtype, scale=1 / NUM_MICRO_BATCHES):
    """What a rank's backward leaves: gradients of a copy of the model in the compute dtype."""
    low = copy.deepcopy(model).to(param_dtype)
    loss = task.loss(_CastsInputs(low, param_dtype), batch) * scale
    loss.backward()
    return [p.grad for p in low.parameters()]


class _CastsInputs(nn.Module):
    def __init__(self, module, dtype):
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, inputs):
        return self.module(inputs.to(self.dtype) if inputs.is_floating_point() else inputs).float()


def _mean(tensors):
    return _add_up(tensors) / len(tensors)


def _add_up(tensors):
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@pytest.mark.parametrize("accumulation", ["local", "sum"])
@pytest.mark.parametrize(
    ("world_size", "backend"), [(1, "gloo"), (2, "gloo"), (3, "gloo"), (2, PLAIN)]
)
def test_training_in_16_bits_equals_the_same_arithmetic_by_hand(world_size, backend, accumulation):
    """At W=1 and 2 the order of the sums is the same: bit for bit. At W=3 the division may round
    differently.
    """
    # Two ranks have all cases; others have a third each way.
    first = 0 if accumulation == "local" else 1
    cases = CASES if (world_size, backend) == (2, "gloo") else CASES[first::3]
    assert_equal_to_arithmetic_by_hand(world_size, backend, accumulation, cases)


def assert_equal_to_arithmetic_by_hand(world_size, backend, accumulation, cases):
    by_rank = run_on_ranks(_train, world_size, accumulation, cases, backend=backend)
    for case in cases:
        task_name, dtypes, optimizer_name = case
        expected = train_by_hand(
            TASKS[task_name], dtypes, OPTIMIZERS[optimizer_name], world_size, accumulation
        )
        traces = [traces[case] for traces in by_rank]
        assert_ranks_agree(traces, str(case))
        if world_size < 3:
            assert_traces_match(traces[0], expected, atol=0, what=str(case))
        else:
            first = Trace(gradients=traces[0].gradients[:1], parameters=traces[0].parameters[:1])
            by_hand = Trace(gradients=expected.gradients[:1], parameters=expected.parameters[:1])
            atol = 1e-6 if dtypes[1] == torch.float32 else 1e-2
            assert_traces_match(first, by_hand, atol=atol, what=str(case))


def _look_at_dtypes(rank, world_size):
    model = fully_shard(mlp(), mp_policy=policy_of(torch.float32))
    seen = {}
    model.second.register_forward_pre_hook(
        lambda module, args: seen.update(weight=module.weight.dtype, inputs=args[0].dtype)
    )
    with CollectiveCounter() as counter:
        seen["outputs"] = model(mlp_batch(0, 0, rank)["inputs"]).dtype
        mlp_loss(model, mlp_batch(0, 0, rank)).backward()
    seen["main"] = {p.dtype for p in model.parameters()}
    seen["gradient"] = {p.grad.dtype for p in model.parameters()}
    seen["locals"] = {p.to_local().dtype for p in model.parameters()}
    seen["gathered"] = {call.dtype for call in counter.gathers()}
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    seen["state"] = {s["exp_avg"].dtype for s in optimizer.state.values()}
    return seen


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_main_weights_gradients_and_state_are_fp32_and_the_gather_is_bf16(backend):
    for seen in run_on_ranks(_look_at_dtypes, 2, backend=backend):
        assert seen["weight"] == seen["inputs"] == BF16
        assert seen["outputs"] == torch.float32
        assert seen["gathered"] == {BF16}
        for name in ("main", "gradient", "locals", "state"):
            assert seen[name] == {torch.float32}, name


def _count_bytes(rank, world_size):
    counted = {}
    for param_dtype in (None, BF16):
        policy = MixedPrecisionPolicy(param_dtype=param_dtype)
        model = shard_lm_by_hand(causal_lm(), fully_shard, mp_policy=policy)
        with CollectiveCounter() as counter:
            lm_loss(model, token_batch(0, 0, rank)).backward()
        counted[param_dtype] = counter.gathered_bytes(world_size), counter.reduced_bytes(world_size)
    return counted


@pytest.mark.parametrize("backend", ["gloo", PLAIN])
def test_bf16_halves_the_bytes(backend):
    for counted in run_on_ranks(_count_bytes, 2, backend=backend):
        for full, half in zip(counted[None], counted[BF16], strict=True):
            assert 0.48 * full <= half <= 0.55 * full


def _cast_choices(rank, world_size):
    inputs = mlp_batch(0, 0, rank)["inputs"]
    results = {}
    for cast in (True, False):
        model = fully_shard(
            mlp(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=cast)
        )
        for name, given in {"fp32": inputs, "bf16": inputs.to(BF16)}.items():
            try:
                results[cast, name] = str(model(given).dtype)
            except RuntimeError as error:
                results[cast, name] = f"refused: {error}"
    return results


def test_cast_forward_inputs_and_no_output_dtype():
    for results in run_on_ranks(_cast_choices, 2):
        assert (
            results[True, "fp32"]
            == results[True, "bf16"]
            == results[False, "bf16"]
            == "torch.bfloat16"
        )
        assert results[False, "fp32"].startswith("refused: ")


class _LowLinear(nn.Linear):
    """Computes in bf16 with fp32 weights, as a unit with such a policy does."""

    def forward(self, inputs):
        return F.linear(inputs.to(BF16), self.weight.to(BF16), self.bias.to(BF16))


class _Upcast(nn.LayerNorm):
    def forward(self, inputs):
        return super().forward(inputs.float())


def _norm_between_linears(low=nn.Linear, norm=nn.LayerNorm):
    torch.manual_seed(5)
    return nn.Sequential(low(7, 20), norm(20), low(20, 3))


def _each_unit_its_policy(rank, world_size, plan):
    model = _norm_between_linears()
    reference = _norm_between_linears(_LowLinear, _Upcast)
    for module, dtype in zip(model, (BF16, torch.float32, BF16), strict=True):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(module, mp_policy=policy, reshard_after_forward=plan == "zero3")
    fully_shard(model)
    for each, ranks in ((model, [rank]), (reference, range(world_size))):
        for r in ranks:
            batch = mlp_batch(0, 0, r)
            outputs = each(batch["inputs"])
            assert outputs.dtype == BF16
            F.mse_loss(outputs.float(), batch["targets"]).backward()
    for name, expected in reference.named_parameters():
        ours = model.get_parameter(name).grad
        assert ours.dtype == torch.float32
        assert torch.equal(ours.full_tensor(), expected.grad / world_size), name


@pytest.mark.parametrize("plan", ["zero2", "zero3"])
def test_units_may_have_policies_of_their_own(plan):
    """A norm in fp32 between linear layers in bf16; two ranks, bit for bit."""
    run_on_ranks(_each_unit_its_policy, 2, plan)


class _Structured(nn.Module):
    """Takes and gives nested values, some of which must not be cast."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, pair, *, extra, index, note):
        inside = {
            "pair": pair[0].dtype,
            "extra": extra["x"].dtype,
            "index": index.dtype,
            "note": note,
        }
        return {"outputs": [self.layer(pair[0] + extra["x"])], "index": index, "inside": inside}


def _structured(rank, world_size):
    torch.manual_seed(0)
    model = fully_shard(_Structured(), mp_policy=policy_of(None))
    results = model(
        (torch.ones(2, 5), None), extra={"x": torch.ones(2, 5)}, index=torch.arange(2), note="n"
    )
    results["outputs"][0].sum().backward()
    assert model.layer.weight.grad is not None
    return results["inside"], results["outputs"][0].dtype, results["index"].dtype


def test_structured_inputs_and_outputs_are_cast_where_they_are_floating_point():
    for inside, outputs, index in run_on_ranks(_structured, 2):
        assert inside == {"pair": BF16, "extra": BF16, "index": torch.int64, "note": "n"}
        assert (outputs, index) == (torch.float32, torch.int64)


def _pure_bf16(rank, world_size):
    model = fully_shard(mlp().to(BF16))
    batch = mlp_batch(0, 0, rank)
    mlp_loss(model, {**batch, "inputs": batch["inputs"].to(BF16)}).backward()
    return {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}


def test_a_bf16_model_stays_bf16():
    assert run_on_ranks(_pure_bf16, 2) == [{BF16}, {BF16}]
