"""The tests notice what they are for: each fault of ``tests/support/faults.py`` makes some fail.

Every fault gets a pytest of its own that runs the tests named here. All of them must fail, and by a
comparison that came out wrong: a crash or a hang would be noticed by any test.
"""

import os
import re
from pathlib import Path

import pytest

from tests.support import processes, ranks
from tests.support.faults import FAULTS
from tests.support.junit import Case, cases_in

_PARITY = "test_core_parity.py::test_training_equals_one_process_on_the_joined_batch[2-2-mlp]"
_PLAIN_BACKEND = "test_core_parity.py::test_training_over_plain_collectives_equals_one_process[2]"
_COUNTS = "test_core_collectives.py::test_zero3_gathers_a_unit_twice_and_reduces_it_once[2-1-gloo]"
_BOUNDARIES = "test_core_memory.py::test_zero3_holds_nothing_whole_at_unit_boundaries"
_TWO_UNITS = "test_core_memory.py::test_at_most_two_units_are_whole_at_any_operation[2]"
_GATHERS_AGAIN = "test_core_memory.py::test_backward_gathers_the_shards_again[2]"
_VALUES = "test_core_parameters.py::test_parameters_keep_identity_shape_and_value[2-zero3]"
_SLICES = "test_core_parameters.py::test_the_slices_of_all_ranks_are_the_tensor[2]"
_PADDING = "test_core_parameters.py::test_padding_is_zero[2]"
_LOAD = (
    "test_core_state_dicts.py::test_load_state_dict_takes_whole_tensors_and_keeps_its_slice[zero3]"
)
_CONTINUES = (
    "test_core_state_dicts.py::"
    "test_full_states_of_model_and_optimizer_continue_as_if_nothing_had_happened"
)
_CLEARING = "test_core_accumulation.py::test_clearing_gradients_drops_what_was_not_synced"
_STORED = (
    "test_core_recomputation.py::"
    "test_blocks_are_computed_again_and_only_what_goes_into_them_is_stored"
)
_SWITCH = (
    "test_core_recomputation.py::test_the_switch_of_transformers_computes_again_and_changes_no_loss"
)
_LATE, _EARLY, _MIXED = (
    f"test_core_worst_case.py::test_values_do_not_depend_on_when_collectives_end[parity-{when}]"
    for when in ("late", "early", "mixed")
)
_REPLICAS_LATE, _REPLICAS_EARLY = (
    _LATE.replace("parity", "HSDP"),
    _EARLY.replace("parity", "HSDP"),
)
_DROPPED = _LATE.replace("parity", "units left out")
_LATE_COPIES = "test_core_offload.py::test_copies_that_run_late_change_no_bit[late-None]"
_LATE_READS = "test_core_offload.py::test_a_write_to_weights_leaves_a_copy_on_its_way_alone"

NOTICED_BY = {
    "no_division_by_world_size": [_PARITY, _PLAIN_BACKEND],
    "gradients_times_3": [_PARITY],
    "reduction_without_communication": [_PARITY, _COUNTS],
    "gradient_padding_of_ones": [_PADDING],
    "gather_repeats_the_own_shard": [_PARITY],
    "every_rank_keeps_shard_0": [_VALUES, _SLICES],
    "padding_of_ones": [_PADDING],
    "backward_without_gather": [_PARITY, _GATHERS_AGAIN],
    "backward_on_the_copy_of_forward": [_GATHERS_AGAIN],
    "gathers_are_not_waited_for": [_LATE, _EARLY, _MIXED],
    "reductions_are_used_on_arrival": [_MIXED],
    "gradients_are_freed_while_they_travel": [_MIXED],
    "gradients_are_written_while_they_travel": [_LATE],
    "arrivals_on_the_host_are_not_waited_for": [_LATE_COPIES],
    "shards_travel_without_staging": [f"{_LATE_READS}[zero2]", f"{_LATE_READS}[zero3]"],
    "means_over_replicas_are_used_on_arrival": [_REPLICAS_LATE, _REPLICAS_EARLY],
    "dropped_gathers_are_not_waited_for": [_DROPPED],
    "nothing_is_freed": [_BOUNDARIES, _TWO_UNITS],
    "checkpoint_does_nothing": [f"{_STORED}[around]", f"{_STORED}[inside]", _SWITCH],
    "optimizer_steps_once": [_PARITY],
    "zero_grad_does_nothing": [_PARITY, f"{_CLEARING}[model]", f"{_CLEARING}[optimizer]"],
    "loading_does_nothing": [_LOAD, f"{_CONTINUES}[sgd]"],
    "loading_an_optimizer_does_nothing": [f"{_CONTINUES}[sgd]", f"{_CONTINUES}[adamw]"],
}


def test_every_fault_is_tried():
    assert {*NOTICED_BY, "none"} == set(FAULTS)
    assert all(inject.__doc__ for inject in FAULTS.values())


@pytest.mark.parametrize("fault", NOTICED_BY)
def test_a_fault_is_noticed(fault, tmp_path):
    tests = NOTICED_BY[fault]
    exit_status, cases, output = run_tests(tests, fault, tmp_path)
    assert exit_status == 1, output
    assert [case.kind for case in cases] == ["failure"] * len(tests), output
    for case in cases:
        assert is_wrong_comparison(case.text), f"{case.name}: {case.text}"


def test_a_test_passes_that_is_told_of_no_fault(tmp_path):
    """All of them do without ``--fault``, wherever the suite runs."""
    exit_status, cases, output = run_tests([_PADDING], "none", tmp_path)
    assert exit_status == 0, output
    assert [case.kind for case in cases] == ["passed"], output


def test_what_goes_wrong_in_a_fault_itself_is_no_wrong_comparison(monkeypatch):
    monkeypatch.setattr(ranks, "active_fault", "no such fault")
    with pytest.raises(ranks.RanksFailed, match="KeyError: 'no such fault'") as caught:
        ranks.run_on_ranks(_return_nothing, 1)
    assert not is_wrong_comparison(_as_reported(str(caught.value)))
    died = "RanksFailed\n--- rank 0: died ---\nSIGSEGV\n--- rank 1: error ---\nAssertionError: 1"
    assert not is_wrong_comparison(_as_reported(died))
    assert is_wrong_comparison(_as_reported(died.replace("died", "hung")))


def _return_nothing(rank, world_size):
    pass


def _as_reported(message):
    return "\n".join(f"E   {line}" for line in message.splitlines())


_UNUSED_PLUGINS = ("cacheprovider", "hypothesispytest", "xdist")


def run_tests(tests: list[str], fault: str, folder: Path) -> tuple[int, list[Case], str]:
    """Exit status of a pytest with ``--fault``, its cases, and what it printed."""
    report = folder / "report.xml"
    arguments = [
        *("--fault", fault, "--junitxml", str(report)),
        *("-q", "--tb=short", "--assert=plain"),  # whose rewriting takes longer than most tests
        *(word for plugin in _UNUSED_PLUGINS for word in ("-p", f"no:{plugin}")),
        *(f"tests/{test}" for test in tests),
    ]
    log = folder / "log.txt"
    exit_status = processes.run_forked(_pytest, arguments, log=log, timeout_s=270.0)
    output = log.read_text()[-8000:]
    assert report.exists(), output
    return exit_status, cases_in(report), output


def _pytest(arguments: list[str]) -> int:
    os.environ["PYTEST_ADDOPTS"] = ""
    os.chdir(processes.REPOSITORY)
    return int(pytest.main(arguments))


def is_wrong_comparison(text: str) -> bool:
    """Whether nothing but ``AssertionError`` was raised, here or on any rank, and no rank died."""
    lines = re.findall(r"^E {3}(.*)$", text, re.MULTILINE)
    starts = [re.match(r"(?:as rank \d+: )?([\w.]+)(?=:|$)", line) for line in lines]
    raised = {start[1] for start in starts if start}
    raised = {name for name in raised if name.endswith(("Error", "Exception", "Warning"))}
    is_bare = lines[:1] != [] and lines[0].startswith("assert ")  # pytest leaves out the type
    has_died = any(re.fullmatch(r"--- rank \d+: died ---", line) for line in lines)
    return (raised == {"AssertionError"} or (is_bare and not raised)) and not has_died
