import itertools

import pytest

from lightning_fsdp.core.engine.lifecycle import ParameterState as P
from lightning_fsdp.core.engine.lifecycle import transition

LEGAL = {(P.SHARDED, P.GATHERING), (P.GATHERING, P.UNSHARDED), (P.UNSHARDED, P.SHARDED)}


def test_a_transition_is_taken_exactly_if_the_table_has_it():
    for current, following in itertools.product(P, P):
        if (current, following) in LEGAL:
            assert transition("h.0", 1, current, following) is following
        else:
            with pytest.raises(RuntimeError, match=r"unit 'h\.0' \(rank 1\): expected to go from"):
                transition("h.0", 1, current, following)


def test_resharding_before_the_wait_is_refused():
    with pytest.raises(RuntimeError, match="wait before use"):
        transition("h.0", 0, P.GATHERING, P.SHARDED)
