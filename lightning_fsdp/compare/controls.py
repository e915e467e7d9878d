"""Negative controls: values that are wrong in a known way, which the judge has to call wrong.

They run in every comparison, since a table is worth what its judge notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_fsdp.compare.cases import Case
from lightning_fsdp.compare.judge import EXACT, judge
from lightning_fsdp.compare.models import build
from lightning_fsdp.compare.reference import Reference, Values


@dataclass(frozen=True)
class Control:
    """One set of values before the judge.

    Attributes:
        name: What is wrong with them.
        should_pass: Whether nothing is.
        complaint: The judge's first one, or ``None``.
    """

    name: str
    should_pass: bool
    complaint: str | None

    @property
    def is_as_it_should_be(self) -> bool:
        """Whether the judge was right."""
        return self.should_pass == (self.complaint is None)


def run_controls(case: Case) -> list[Control]:
    """Judge the reference's own gradients of two ranks: as they are, and broken."""
    reference = Reference(case, 2, torch.device("cpu"))
    right, other = reference.mean([0]), reference.mean([1])
    name = next(iter(right))
    broken: dict[str, Callable[[Values], object]] = {
        "a model on the meta device": lambda v: v.update(
            build(case.model, case.sizes).to("meta").named_parameters()
        ),
        "a storage that was freed": lambda v: v[name].untyped_storage().resize_(0),
        "one NaN": lambda v: v[name].view(-1)[-1:].fill_(torch.nan),
        "one missing gradient": lambda v: v.pop(name),
        "the gradient of another micro-batch": lambda v: v.update({name: other[name]}),
        "one element off by one ulp": _one_ulp_off(name),
    }
    controls = [Control("nothing", True, _complaint(right, right))]
    for what, breaks in broken.items():
        values = {key: value.clone() for key, value in right.items()}
        breaks(values)
        controls.append(Control(what, False, _complaint(values, right)))
    return controls


def _one_ulp_off(name: str) -> Callable[[Values], object]:
    def change(values: Values) -> None:
        flat = values[name].view(-1)
        largest = int(flat.abs().argmax())
        flat[largest] = torch.nextafter(flat[largest], torch.tensor(torch.inf))

    return change


def _complaint(found: Values, right: Values) -> str | None:
    return next((f.complaint for f in judge(found, right, EXACT).values() if f.complaint), None)
