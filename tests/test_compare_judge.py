"""What the judge of the comparison calls right, and what wrong."""

import pytest
import torch

from lightning_fsdp.compare import controls as controls_file
from lightning_fsdp.compare.cases import Case
from lightning_fsdp.compare.controls import run_controls
from lightning_fsdp.compare.judge import (
    EXACT,
    Finding,
    Tolerance,
    judge,
    merge,
    summed_up,
    tolerance_of,
)
from lightning_fsdp.compare.models import MODELS, Sizes, batch_of
from lightning_fsdp.compare.reference import Reference

RIGHT = {"a": torch.tensor([[1.0, -6.0], [0.5, 0.0]]), "b": torch.tensor([3.0])}


def found(**changes):
    return {**{name: value.clone() for name, value in RIGHT.items()}, **changes}


def complaints(values, tolerance=EXACT):
    return {n: f.complaint for n, f in judge(values, RIGHT, tolerance).items() if f.complaint}


def test_equal_values_are_right():
    assert complaints(found()) == {}
    assert judge(found(), RIGHT)["a"].ulps == 0.0


def _freed():
    tensor = RIGHT["a"].clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "missing"),
        (RuntimeError("not now"), "RuntimeError: not now"),
        (RIGHT["a"].flatten(), "shape (4,), expected (2, 2)"),
        (RIGHT["a"].to(torch.int64), "dtype torch.int64"),
        (RIGHT["a"].to("meta"), "on the meta device"),
        (_freed(), "its storage was freed"),
        (torch.tensor([[1.0, torch.nan], [0.5, 0.0]]), "1 of 4 elements are not finite"),
        (torch.tensor([[1.0, -6.0], [torch.inf, 0.0]]), "1 of 4 elements are not finite"),
        (torch.zeros(2, 2), "3 of 4 elements differ, by 6 at most"),
        (-RIGHT["a"], "3 of 4 elements differ, by 12 at most"),
        ([[1.0, -6.0], [0.5, 0.0]], "a list, expected a plain tensor"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(value, complaint):
    given = complaints(found(a=value), Tolerance(torch.bfloat16, 4.0))
    assert list(given) == ["a"]
    assert complaint in given["a"]


def test_an_unknown_name_is_wrong():
    assert complaints(found(c=RIGHT["b"])) == {"c": "not the name of a parameter"}


def test_differences_count_in_ulps_of_the_largest():
    ulp = 4 * torch.finfo(torch.float32).eps  # between 4 and 8
    for steps in (1, 4, 5):
        off = RIGHT["a"].clone()
        off[0, 1] -= steps * ulp
        assert judge(found(a=off), RIGHT)["a"].ulps == steps
        assert bool(complaints(found(a=off), Tolerance(torch.float32, 4.0))) == (steps > 4)
        assert complaints(found(a=off))


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_and_two_ranks_allow_no_difference_in_fp32(world_size):
    assert tolerance_of("fp32", world_size).ulps == 0


def test_a_later_look_hides_no_complaint():
    first = {"a": Finding("wrong", 2.0), "b": Finding(None, 1.0)}
    second = {"a": Finding(None, 3.0), "b": Finding("late", 5.0)}
    assert merge(first, second) == {"a": Finding("wrong", 3.0), "b": Finding("late", 5.0)}
    assert summed_up("x", merge(first, second)) == {"x": Finding("a: wrong", 5.0)}


def _mlp():
    return Case(engine="none", zero_stage=3, dtype="fp32", model="mlp", sizes=Sizes(6, 1))


def test_every_negative_control_is_called_wrong_and_the_right_values_are_not():
    controls = run_controls(_mlp())
    assert [c.name for c in controls if c.complaint is None] == ["nothing"]
    assert len(controls) == 7
    assert all(control.is_as_it_should_be for control in controls)


def test_a_judge_that_sees_nothing_fails_its_controls(monkeypatch):
    monkeypatch.setattr(controls_file, "judge", lambda *_: {"a": Finding(None)})
    assert sum(not control.is_as_it_should_be for control in run_controls(_mlp())) == 6


def test_no_two_batches_are_alike():
    for model in MODELS:
        batches = [batch_of(model, rank, i)[0] for rank in range(4) for i in range(3)]
        assert len({tuple(batch.flatten().tolist()) for batch in batches}) == 12


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_the_reference_is_the_gradient_of_the_mean_loss(model, dtype):
    case = Case(engine="none", zero_stage=3, dtype=dtype, model=model)
    reference = Reference(case, 2, torch.device("cpu"))
    mean = reference.mean([0, 1])
    for name, value in mean.items():
        locals_ = [reference.local(rank, i)[name].double() for rank in (0, 1) for i in (0, 1)]
        torch.testing.assert_close(value, (sum(locals_) / 2).float(), rtol=1e-5, atol=1e-6)
        assert value.dtype == torch.float32
        assert reference.local(0, 0)[name].dtype == (case.policy.param_dtype or torch.float32)
