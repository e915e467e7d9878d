"""The core over collectives that end at their worst legal moment (``tests/support/worst_case.py``).

A core that waits for each collective before it uses what that one writes, and leaves what that one
reads as it is until then, computes the same as over gloo. Tests of other files run here again, over
each of the groups; only those that judge by values, since counters do not see collectives of a
group in Python.

Any other test runs so by hand: ``pytest --transport late tests/test_core_graphs.py``.
"""

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from lightning_fsdp import MixedPrecisionPolicy, shard_model
from tests import test_adapters as adapters
from tests import test_core_accumulation as accumulation
from tests import test_core_accumulation_paths as accumulation_paths
from tests import test_core_clip as clip
from tests import test_core_compile as compiled
from tests import test_core_copies as copies
from tests import test_core_freed as freed
from tests import test_core_frozen as frozen
from tests import test_core_grad_scaler as grad_scaler
from tests import test_core_gradients as gradients
from tests import test_core_gradients_of_parts as gradients_of_parts
from tests import test_core_graphs as graphs
from tests import test_core_hosts as hosts
from tests import test_core_hsdp as hsdp
from tests import test_core_interleaving as interleaving
from tests import test_core_local_gradients as local_gradients
from tests import test_core_materialize as materialize
from tests import test_core_methods as methods
from tests import test_core_narrow_reduction as narrow_reduction
from tests import test_core_offload as offload
from tests import test_core_parameters as parameters
from tests import test_core_parity as parity
from tests import test_core_precision as precision
from tests import test_core_recomputation as recomputation
from tests import test_core_recurrent as recurrent
from tests import test_core_state_dicts as state_dicts
from tests import test_core_units as units
from tests import test_core_unused as unused
from tests import test_core_writes as writes
from tests import test_engines_calls as calls
from tests.support import offloaded, ranks
from tests.support import parity as parity_support
from tests.support.cases import each_on_ranks
from tests.support.models import TASKS
from tests.support.one_exchange import train_on_rank
from tests.support.parity import PLANS, adamw, assert_traces_match
from tests.support.ranks import PLAIN, run_on_ranks
from tests.support.worst_case import WORST_CASES

pytestmark = pytest.mark.usefixtures("kept_ranks")
POLICIES = {"fp32": None, "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
# Reduced in a wider dtype, and in the same.
IN_16_BITS = [("lm", dtypes, "adamw") for dtypes in precision.OF_BF16[:2]]


# Not "compiled", which takes seconds for what calls no other collective.
NESTED = ("computed again", "computed again, reentrant", "nested", "around a forward", "of a part")
CALLS = [
    *((2, "tied", way) for way in ("beside a forward", "nested")),  # where a unit stays whole
    *((3, "tied", way) for way in ("beside a forward", *NESTED)),
    (3, "frozen", "plainly"),
]


def _call_functions(rank, world_size):
    for stage, kind, way in CALLS:
        torch.testing.assert_close(
            calls._found("scratch", kind, way, stage, rank),
            calls._expected(kind, way, world_size),
            atol=1e-6,
            rtol=1e-5,
            msg=lambda text, case=(stage, kind, way): f"{case}: {text}",
        )


CASES: dict[str, Callable[[], object]] = {
    "parity": partial(parity.test_training_over_plain_collectives_equals_one_process, 2),
    "parity on 3 ranks": partial(parity.test_training_over_plain_collectives_equals_one_process, 3),
    "any units": partial(units.test_any_choice_of_units_trains_the_same, 2),
    "a weight of two units": partial(
        units.test_a_tied_weight_has_one_gradient_of_both_uses_and_one_state,
        *("zero3", "across units"),
    ),
    "two models in one graph": units.test_two_sharded_models_in_one_graph,
    "part of a model": units.test_part_of_a_model_may_stay_unsharded,
    "unused parameters": partial(unused.test_a_parameter_may_be_unused_by_some_ranks_or_by_all, 2),
    "evaluation": partial(parity.test_evaluation_between_steps_changes_nothing, "zero3"),
    "edited weights": partial(
        parity.test_parameters_edited_in_place_are_used_by_the_next_forward, "zero2"
    ),
    # How a write is noticed is not a question of collectives: every second is enough.
    "weights edited among micro-batches": partial(
        run_on_ranks,
        writes._write_between_micro_batches,
        *(2, "zero3", "local", dict(list(writes.WRITES.items())[1::2])),
    ),
    "accumulation": partial(accumulation.test_micro_batches_add_up, 2),
    "synced and unsynced": accumulation.test_synced_and_unsynced_micro_batches_mix,
    "cleared gradients": partial(
        accumulation.test_clearing_gradients_drops_what_was_not_synced, "model"
    ),
    "unused in a micro-batch": partial(
        accumulation_paths.test_a_parameter_may_be_used_by_some_micro_batches_of_some_ranks
    ),
    "units left out": accumulation_paths.test_a_unit_may_be_left_out_of_some_micro_batches,
    "micro-batches in flight": partial(
        interleaving.test_micro_batches_in_flight_do_not_mix, *("zero3", "crossed", "sum")
    ),
    "chunks of a loss": partial(
        interleaving.test_a_loss_may_be_computed_in_chunks_that_have_backwards_of_their_own,
        *("zero3", False),
    ),
    "every cut": partial(local_gradients.test_every_cut_trains_alike, 2, "tied_lm"),
    "16 bits": partial(
        precision.assert_equal_to_arithmetic_by_hand, *(2, PLAIN, "local", IN_16_BITS)
    ),
    "16 bits, added up": partial(
        precision.assert_equal_to_arithmetic_by_hand, *(2, PLAIN, "sum", IN_16_BITS)
    ),
    "bf16 summed in fp32": partial(
        narrow_reduction.test_gradients_are_the_fp32_mean_of_the_ranks_bf16_gradients,
        *(2, PLAIN, "zero3"),
    ),
    "a sum over backwards": partial(
        narrow_reduction.test_a_sum_over_backwards_loses_no_bits_on_the_way, *(PLAIN, "zero2")
    ),
    "a gradient scaler": partial(
        grad_scaler.test_training_with_a_scaler_equals_one_process, *(2, PLAIN, "zero3")
    ),
    "clipping": clip.test_training_with_clipping_equals_one_process,
    "HSDP": partial(
        hsdp.test_training_equals_one_process_on_the_joined_batch, *("tied_lm", (2, 2), PLAIN)
    ),
    "HSDP, unused parameters": partial(
        hsdp.test_a_parameter_may_be_unused_in_a_replica_or_by_all, (2, 2)
    ),
    "hosts": partial(
        hosts.test_training_equals_one_process_on_the_joined_batch, *("tied_lm", (2, 2), PLAIN)
    ),
    "recomputation": partial(
        recomputation.test_recomputed_blocks_have_the_gradients_of_plain_ones, *("both", "zero3")
    ),
    "recomputed units": units.test_units_that_are_recomputed_in_the_backward_train_the_same,
    "compiled blocks": partial(
        run_on_ranks, compiled._train_compiled, 2, *("zero3", "after", "module", "aot_eager")
    ),
    "a recurrent layer": partial(
        recurrent.test_recurrent_layers_train_as_in_one_process, *("lstm", "unit")
    ),
    "gradients at any time": partial(
        gradients.test_gradients_are_there_in_every_state_with_the_values_of_plain_torch,
        *(2, "tied_lm", "zero3"),
    ),
    "edited gradients": gradients.test_gradients_can_be_edited_on_their_way,
    "micro-batches kept apart": partial(
        gradients.test_micro_batches_are_kept_apart_and_change_nothing, *(2, "adamw")
    ),
    "weights by name": partial(
        gradients_of_parts.test_weights_are_there_by_name_at_any_time, "zero3"
    ),
    "generation": methods.test_generate_of_gpt2_gives_the_same_tokens,
    "full states": partial(
        state_dicts.test_full_states_of_model_and_optimizer_continue_as_if_nothing_had_happened,
        "adamw",
    ),
    "copies": partial(
        copies.test_a_copy_and_its_copy_train_apart_as_plain_ones_do,
        *("tied_lm", "zero3", "local gradients"),
    ),
    "averaged weights": partial(
        copies.test_torchs_averaged_model_averages_a_sharded_one, *("zero2", "ema")
    ),
    "frozen parameters": parameters.test_frozen_parameters_stay_frozen,
    "frozen and unfrozen": partial(
        frozen.test_parameters_may_be_frozen_and_unfrozen_between_steps, "zero3"
    ),
    "hard graphs": partial(graphs.test_hard_graphs_train_as_unsharded_models_do, *(2, "zero3")),
    "several graphs": partial(
        graphs.test_several_graphs_may_be_alive, *("zero3", "two forwards, one backward")
    ),
    "an auxiliary loss": partial(
        freed.test_an_auxiliary_loss_kept_on_a_module_is_right, *("of_a_weight", False, "zero3")
    ),
    **{
        f"an exception: {where}": partial(run_on_ranks, frozen.fail_once, 2, where, "zero3")
        for where in ("forward", "backward", "reduced gradient")
    },
    "from the meta device": partial(
        materialize.test_training_goes_on_as_that_of_a_plain_model_with_these_values,
        *("gpt2", 2),
    ),
    "functions as forwards": partial(run_on_ranks, _call_functions, 2),
    "adapters": partial(
        each_on_ranks,
        adapters._train,
        2,
        [("qwen2", adapters._zero2), ("bf16", adapters._by_hand), ("tied", adapters._recomputed)],
    ),
    "offloaded": partial(
        offload.test_training_offloaded_gives_the_same_bits,
        *("mlp", 2, PLAIN, None, offloaded.CLIP, offload.SUMMED),
    ),
}


# The others draw for each collective and rank whether it is late or early: what happens in each
# step meets both. These show the faults of tests/test_faults.py.
TRANSPORTS_OF: dict[str, Sequence[str]] = {
    "parity": ("late", "early", "mixed"),
    "units left out": ("late", "mixed"),
    "HSDP": ("late", "early"),
    # Each happens once.
    **{case: ("late", "early") for case in CASES if case.startswith("an exception: ")},
}


@pytest.mark.parametrize(
    ("case", "transport"),
    [(case, how) for case in CASES for how in TRANSPORTS_OF.get(case, ("mixed",))],
)
def test_values_do_not_depend_on_when_collectives_end(case, transport, monkeypatch):
    monkeypatch.setattr(ranks, "active_transport", transport)
    monkeypatch.setattr(ranks, "active_seed", zlib.crc32(case.encode()))
    CASES[case]()


def _train(rank, world_size):
    """Traces of both stages, with and without 16 bits, clipping on."""
    traces = {}
    for plan, policy in itertools.product(PLANS, POLICIES):
        task = TASKS["tied_lm"]
        model = shard_model(task.build(), PLANS[plan], mp_policy=POLICIES[policy])
        batches = parity_support.batches_for("tied_lm", world_size)
        traces[plan, policy] = train_on_rank(
            model, batches, task.loss, adamw(model.parameters()), rank, clip=(0.1, 2.0)
        )
    return traces


@functools.cache
def _traces_over_gloo():
    return run_on_ranks(_train, 2, backend=PLAIN)


@pytest.mark.parametrize("transport", WORST_CASES)
def test_the_bits_are_those_of_gloo(transport):
    expected = _traces_over_gloo()
    for rank, traces in enumerate(run_on_ranks(_train, 2, backend=transport)):
        for how, trace in traces.items():
            assert_traces_match(trace, expected[rank][how], atol=0, what=str(how))
