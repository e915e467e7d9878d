import itertools
import re

import pytest

from lightning_fsdp.core.lifecycle import GradientState as G
from lightning_fsdp.core.lifecycle import ParameterState as P
from lightning_fsdp.core.lifecycle import take_step

LEGAL = {
    (P.SHARDED, P.GATHERING), (P.GATHERING, P.UNSHARDED), (P.UNSHARDED, P.SHARDED),
    (G.NONE, G.LOCAL), (G.LOCAL, G.REDUCING), (G.LOCAL, G.NONE), (G.REDUCING, G.REDUCED),
    (G.REDUCED, G.LOCAL), (G.REDUCED, G.NONE), (G.REDUCING, G.AVERAGING), (G.AVERAGING, G.REDUCED),
    (G.REDUCING, G.RETURNING), (G.AVERAGING, G.RETURNING), (G.RETURNING, G.REDUCED),
}  # fmt: skip


@pytest.mark.parametrize("states", [P, G], ids=["parameters", "gradients"])
def test_a_step_is_taken_exactly_if_the_table_has_it(states):
    for current, following in itertools.product(states, states):
        if (current, following) in LEGAL:
            assert take_step("h.0", 1, current, following) is following
        else:
            expected = re.escape("unit 'h.0' (rank 1): expected a step from")
            with pytest.raises(RuntimeError, match=expected):
                pytest.fail(f"taken: {take_step('h.0', 1, current, following)} after {current}")


def test_resharding_before_the_wait_is_refused():
    with pytest.raises(RuntimeError, match="wait before use"):
        take_step("h.0", 0, P.GATHERING, P.SHARDED)
