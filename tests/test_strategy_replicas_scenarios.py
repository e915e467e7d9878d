"""What other tests train under flat strategies, with two replicas on two ranks each.

And with optimizer state over all four, under the core.
"""

import pytest

from tests.support.trainer import (
    SHARDED,
    WithReplicas,
    assert_like_ddp,
    fit,
    make_loader,
    seeded,
    weights_of,
)
from tests.test_strategy_batches import _evaluate_stream
from tests.test_strategy_fp16 import _accumulating, _plain
from tests.test_strategy_manual_optimization import _ByHand, _forgets_half
from tests.test_strategy_unit_calls import _compiled, _recomputed_offloaded
from tests.test_strategy_whole_tensors import _muon

pytestmark = pytest.mark.flat("chooses replicas itself")


def _by_hand(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_ByHand), make_loader(64))
    assert trainer.global_step == 2
    return {"weights": weights_of(model), "losses": model.losses}


SCENARIOS = [
    (_plain, 5e-3),  # fp16 with a scaler, whose scales are equal
    (_accumulating, 5e-3),
    (_muon, 1e-3),  # beside AdamW, by hand
    (_by_hand, 1e-6),
    (_forgets_half, 1e-6),
    (_evaluate_stream, 1e-6),  # uneven numbers of batches
    (_compiled, 1e-6),
    (_recomputed_offloaded, 1e-6),
]
# ZeRO-3 of each engine; test_strategy_replicas.py has ZeRO-2 as well.
CHOICES = {"replicas": ("replica", SHARDED[::2]), "state over all": ("all", SHARDED[:1])}
HARDLY_OF_STATE = (_plain, _compiled)  # what takes longest, and reads and writes no shard itself


@pytest.mark.parametrize(
    ("choice", "scenario", "atol"),
    [
        (choice, *scenario)
        for choice in CHOICES
        for scenario in SCENARIOS
        if choice == "replicas" or scenario[0] not in HARDLY_OF_STATE
    ],
)
def test_with_replicas_it_is_that_of_ddp(tmp_path, scenario, atol, choice):
    rtol = 5e-3 if atol == 5e-3 else 1e-4
    state_over, sharded = CHOICES[choice]
    assert_like_ddp(
        WithReplicas(scenario, state_over),
        tmp_path,
        sharded=sharded,
        world_size=4,
        atol=atol,
        rtol=rtol,
        timeout_s=240.0,
    )
