"""The core's own tests with another device: parity with plain torch there, and the like.

One rank runs over NCCL, two and three on the one device over staged copies.
"""

from functools import partial

import pytest
import torch

from lightning_fsdp import CPUOffloadPolicy
from tests import test_core_clip as clip
from tests import test_core_compile as compiled
from tests import test_core_grad_scaler as grad_scaler
from tests import test_core_gradients as gradients
from tests import test_core_offload as offload
from tests import test_core_parity as parity
from tests import test_core_precision as precision
from tests.support import offloaded, ranks
from tests.support import parity as support
from tests.support.parity import assert_traces_match, on_host
from tests.support.ranks import run_on_ranks
from tests.test_core_worst_case import CASES as SEVERAL_RANKS

ONE_RANK = {
    "one rank, parity": partial(
        parity.test_training_equals_one_process_on_the_joined_batch, "lm", 1, 2
    ),
    "one rank, 16 bits": partial(
        precision.test_training_in_16_bits_equals_the_same_arithmetic_by_hand, *(1, "", "local")
    ),
    "one rank, a gradient scaler": partial(
        grad_scaler.test_training_with_a_scaler_equals_one_process, *(1, "", "zero3")
    ),
    "one rank, gradients at any time": partial(
        gradients.test_gradients_are_there_in_every_state_with_the_values_of_plain_torch,
        *(1, "tied_lm", "zero3"),
    ),
    "one rank, clipping": partial(
        clip.test_norm_and_clipping_equal_those_of_an_unsharded_model, 1, "mlp"
    ),
}
# These name their devices themselves.
_ELSEWHERE = {"compiled blocks", "offloaded"}
CASES = {
    **ONE_RANK,
    **{name: case for name, case in SEVERAL_RANKS.items() if name not in _ELSEWHERE},
}
ON_CPU = {"parity", "bf16 summed in fp32"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        on_device = CASES if metafunc.config.getoption("--device") == "cuda" else ON_CPU
        metafunc.parametrize("case", sorted(on_device))


IN_16_BITS = {name for name in CASES if any(word in name for word in ("16", "scaler", "sum"))}


def test_the_values_are_those_of_plain_torch(case, monkeypatch):
    if case in IN_16_BITS:
        monkeypatch.setattr(support, "ATOL_ON_CUDA", 2e-3)
    CASES[case]()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_blocks_train_as_compiled_plain_ones_do(world_size, backend):
    arguments = ("zero3", "after", "module", backend)
    for compilations, breaks in run_on_ranks(
        compiled._train_compiled, world_size, *arguments, timeout_s=110.0
    ):
        assert compilations == 1
        assert breaks == {}


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_offloaded_gives_the_values_of_training_on_the_device(world_size, pin_memory):
    """The optimizer steps on another processor: last bits may differ."""
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    found, resident = (
        run_on_ranks(offload.train_each_way, world_size, "mlp", each, None, offloaded.CLIP)[0]
        for each in (policy, None)
    )
    for combination, expected in resident.items():
        atol = 1e-6 if combination[1] == "fp32" else 1e-3
        assert_traces_match(
            on_host(found[combination]), on_host(expected), atol=atol, what=str(combination)
        )


@pytest.mark.parametrize("optimizer", ["sgd", "fused adamw"])
def test_a_scaler_over_an_offloaded_model_steps_and_skips_as_on_the_device(optimizer):
    """The host must not read scale and answer before torch's copies of them are there."""
    case = "mlp", torch.float32, optimizer, None
    policy = CPUOffloadPolicy(pin_memory=ranks.active_device == "cuda")
    (trace, scales, _), (expected, expected_scales, _) = (
        run_on_ranks(grad_scaler.train_scaled, 1, "zero3", [case], each)[0][case]
        for each in (policy, None)
    )
    assert scales == expected_scales
    assert len(set(scales)) > 1, "no step was skipped"
    assert_traces_match(on_host(trace), on_host(expected), atol=1e-3)
