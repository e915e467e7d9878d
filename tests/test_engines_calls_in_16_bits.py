"""A function that runs as a forward reads parameters in 16 bits, where its module does."""

import itertools

import torch

from lightning_fsdp import MixedPrecisionPolicy, linear_cross_entropy
from lightning_fsdp.strategies import unit_calls
from tests.support.cases import each_on_ranks
from tests.support.engine_runs import ENGINES
from tests.test_engines_calls import _batch, _model, chunked_loss, cross_entropy, plainly

LOSSES = {"untied": chunked_loss, "tied": linear_cross_entropy}  # several chunks, and one


def _in_bf16(rank, world_size, case):
    """Against plain torch that runs the whole model in bf16; sums over ranks are in fp32."""
    engine_name, kind = case
    plain, model = _model(kind).bfloat16(), _model(kind)
    tokens, labels = _batch(0, 0, rank)
    expected = plainly(plain, cross_entropy, tokens, labels)
    expected.backward()
    seen = []

    def loss_of(hidden, weight, labels):
        seen.append((hidden.dtype, weight.dtype))
        return LOSSES[kind](hidden, weight, labels)

    unit_calls.apply(model, None, checkpointing=None, compiles=False)
    engine = ENGINES[engine_name](zero_stage=3, units=None, cpu_offload=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    engine.shard(model, device=torch.device("cpu"), precision=policy)
    loss = engine.run(plainly, model, loss_of, tokens, labels)
    engine.before_backward()
    loss.backward()
    engine.after_backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    torch.testing.assert_close(loss.float(), expected.float(), atol=1e-2, rtol=1e-2)
    for name, found in engine.gradients.full():
        mean = plain.get_parameter(name).grad.float()
        torch.distributed.all_reduce(mean)
        mean /= world_size
        assert found.dtype == torch.float32
        assert (found - mean).abs().max() <= 2e-2 * mean.abs().max(), name


def test_a_function_reads_parameters_in_16_bits_under_every_engine():
    cases = itertools.product(["scratch", "fsdp1", "fsdp2"], LOSSES)
    each_on_ranks(_in_bf16, 2, list(cases))
