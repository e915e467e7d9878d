"""What other tests train under flat strategies, with two replicas on two ranks each."""

import pytest

from tests.support.trainer import (
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
from tests.test_strategy_unit_calls import _compiled
from tests.test_strategy_whole_tensors import _muon


def _by_hand(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_ByHand), make_loader(64))
    assert trainer.global_step == 2
    return {"weights": weights_of(model), "losses": model.losses}


@pytest.mark.parametrize(
    ("scenario", "atol"),
    [
        (_plain, 5e-3),  # fp16 with a scaler, whose scales are equal
        (_accumulating, 5e-3),
        (_muon, 1e-3),  # beside AdamW, by hand
        (_by_hand, 1e-6),
        (_forgets_half, 1e-6),
        (_evaluate_stream, 1e-6),  # uneven numbers of batches
        (_compiled, 1e-6),
    ],
)
def test_with_replicas_it_is_that_of_ddp(tmp_path, scenario, atol):
    rtol = 5e-3 if atol == 5e-3 else 1e-4
    assert_like_ddp(
        WithReplicas(scenario), tmp_path, world_size=4, atol=atol, rtol=rtol, timeout_s=240.0
    )
