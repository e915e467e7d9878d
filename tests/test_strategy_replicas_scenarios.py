"""What other tests train under flat strategies, with two replicas on two ranks each.

And with optimizer state over all four, under the core.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_fsdp.core.ranks.groups import StateOver
from lightning_fsdp.engines.rank_grid import GridChoice, RankGrid, open_grid
from lightning_fsdp.strategies import sharded as sharded_module
from lightning_fsdp.strategies.registry import NAMES
from tests.support.trainer import (
    SHARDED,
    Scenario,
    assert_each_like_ddp,
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


_OVER_ALL = " with state over all"
OVER_ALL = SHARDED[0] + _OVER_ALL


@dataclass(frozen=True)
class WithReplicas:
    """A scenario whose sharded strategies hold two replicas, each on half of the ranks."""

    scenario: Scenario

    @property
    def not_under(self) -> tuple[str, ...]:
        hardly_of_state = (OVER_ALL,) if self.scenario in HARDLY_OF_STATE else ()
        of_torch = ("fsdp1", "fsdp2") if self.scenario is _compiled else ()
        return (*getattr(self.scenario, "not_under", ()), *hardly_of_state, *of_torch)

    def __call__(self, strategy: str, folder: Path, rank: int) -> Mapping[str, Any]:
        num_opened = 0
        state_over: StateOver = "all" if strategy == OVER_ALL else "replica"
        strategy = strategy.removesuffix(_OVER_ALL)

        def open_half(choice: GridChoice, **where: Any) -> RankGrid:
            nonlocal num_opened
            num_opened += 1
            assert choice == GridChoice(), "the scenario chooses by itself"
            half = dist.get_world_size() // 2
            return open_grid(GridChoice(half, state_over=state_over), **where)

        with mock.patch.object(sharded_module, "open_grid", open_half):
            found = self.scenario(strategy, folder, rank)
        assert (num_opened > 0) == (strategy in NAMES)
        return found


def _by_hand(strategy, folder, rank):
    trainer, model = fit(strategy, folder, seeded(_ByHand), make_loader(64))
    assert trainer.global_step == 2
    return {"weights": weights_of(model), "losses": model.losses}


# By how near they come to DDP.
SCENARIOS = {
    5e-3: [_plain, _accumulating],  # fp16 with a scaler, whose scales are equal
    1e-3: [_muon],  # beside AdamW, by hand
    1e-6: [
        *(_by_hand, _forgets_half),
        _evaluate_stream,  # uneven numbers of batches
        *(_compiled, _recomputed_offloaded),
    ],
}
# ZeRO-3 of each engine; test_strategy_replicas.py has ZeRO-2 as well.
CHOICES = (*SHARDED[::2], OVER_ALL)
HARDLY_OF_STATE = (_plain, _compiled)  # what takes longest, and reads and writes no shard itself
# Units are compiled alike whatever the ranks; under its engines torch averages what they reduce.


@pytest.mark.parametrize("atol", SCENARIOS)
def test_with_replicas_it_is_that_of_ddp(tmp_path, atol):
    assert_each_like_ddp(
        [WithReplicas(scenario) for scenario in SCENARIOS[atol]],
        tmp_path,
        sharded=CHOICES,
        world_size=4,
        atol=atol,
        rtol=5e-3 if atol == 5e-3 else 1e-4,
        timeout_s=280.0,
    )
