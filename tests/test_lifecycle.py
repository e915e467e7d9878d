import itertools
from types import SimpleNamespace

import pytest

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.lifecycle import ParameterState as P

LEGAL = {(P.SHARDED, P.GATHERING), (P.GATHERING, P.UNSHARDED), (P.UNSHARDED, P.SHARDED)}


def _in(state):
    flat_param = FlatParameter.__new__(FlatParameter)
    flat_param.name, flat_param.copy = "h.0", state
    flat_param.communicator = SimpleNamespace(mesh_rank=1)
    return flat_param


def test_a_state_is_entered_exactly_if_the_table_has_it():
    for current, following in itertools.product(P, P):
        flat_param = _in(current)
        if (current, following) in LEGAL:
            flat_param._enter(following)
            assert flat_param.copy is following
        else:
            with pytest.raises(RuntimeError, match=r"unit 'h\.0' \(rank 1\): expected to go from"):
                flat_param._enter(following)
            assert flat_param.copy is current


def test_resharding_before_the_wait_is_refused():
    with pytest.raises(RuntimeError, match="Wait before use"):
        _in(P.GATHERING)._enter(P.SHARDED)
