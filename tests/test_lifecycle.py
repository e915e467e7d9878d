import itertools

import pytest

from lightning_fsdp.core.engine.lifecycle import ParameterState as P
from lightning_fsdp.core.engine.lifecycle import take_step

LEGAL = {(P.SHARDED, P.GATHERING), (P.GATHERING, P.UNSHARDED), (P.UNSHARDED, P.SHARDED)}


def test_a_step_is_taken_exactly_if_the_table_has_it():
    for current, following in itertools.product(P, P):
        if (current, following) in LEGAL:
            assert take_step("h.0", 1, current, following) is following
        else:
            with pytest.raises(RuntimeError, match=r"unit 'h\.0' \(rank 1\): expected a step from"):
                take_step("h.0", 1, current, following)


def test_resharding_before_the_wait_is_refused():
    with pytest.raises(RuntimeError, match="wait before use"):
        take_step("h.0", 0, P.GATHERING, P.SHARDED)
