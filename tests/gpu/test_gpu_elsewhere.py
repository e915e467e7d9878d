"""Tests of other files that need a GPU, so that those of this folder are all."""

import pytest

pytest.importorskip("lightning", reason="callbacks need Lightning")

from tests.test_callbacks_memory import (  # noqa: F401
    test_on_cuda_the_allocator_agrees_and_a_snapshot_is_written,
)
from tests.test_core_offload_use import (  # noqa: F401
    test_shards_are_on_the_host_and_values_are_those_of_the_device,
)
from tests.test_simulate_transfers_on_cuda import (  # noqa: F401
    test_on_a_device_a_transfer_takes_its_time,
    test_on_a_device_every_engine_trains_among_simulated_ranks,
    test_on_a_device_other_ranks_hold_what_this_one_holds,
)
