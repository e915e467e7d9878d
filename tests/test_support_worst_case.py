"""The groups of ``worst_case.py`` show what they are for, and give gloo's values otherwise."""

import pytest
import torch

from lightning_fsdp.core.torch_internals import all_gather_single
from tests.support.ranks import assert_errors, errors_on_ranks, run_on_ranks
from tests.support.worst_case import WORST_CASES


def _gather(rank, whole, share):
    share.fill_(rank + 1.0)
    return all_gather_single(whole, share, async_op=True)


def _values(rank, world_size):
    """What is seen before and after a wait; and if the input is written to in between."""
    whole, share = torch.zeros(4), torch.zeros(2)
    work = _gather(rank, whole, share)
    before = whole.clone()
    share.fill_(7.0)
    work.wait()
    return before, whole


@pytest.mark.parametrize(("backend", "expected"), [("late", [7.0] * 4), ("early", [1, 1, 2, 2])])
def test_outputs_are_poison_until_the_wait_and_inputs_are_read_when_it_says(backend, expected):
    for before, after in run_on_ranks(_values, 2, backend=backend):
        assert before.isnan().all()
        assert after.tolist() == expected


def _misuse(rank, world_size, how):
    whole, share = torch.zeros(4), torch.zeros(2)
    work = _gather(rank, whole, share)
    if how == "never waited for":
        return
    whole.untyped_storage().resize_(0)
    if how == "freed and allocated again":
        kept = [torch.zeros(4) for _ in range(64)]  # the memory goes to others
        whole.untyped_storage().resize_(16)
        del kept
    work.wait()


@pytest.mark.parametrize("how", ["freed before", "freed and allocated again", "never waited for"])
@pytest.mark.parametrize("backend", WORST_CASES)
def test_memory_that_travels_must_stay_and_be_waited_for(backend, how):
    assert_errors(errors_on_ranks(_misuse, 2, how, backend=backend), "AssertionError", how)
