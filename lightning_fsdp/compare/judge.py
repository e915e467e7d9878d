"""Judges values that an engine shows against those that are right. Pure: no ranks, no engine.

Differences are measured in ulps of the largest: the distance between two neighbouring numbers of a
dtype at the largest right value of the tensor. Sums of two terms have one result, so that one and
two ranks allow no difference in fp32; longer ones may be summed in another order.

=====================  =============  ==========================
gradients              W = 1, 2       W > 2
=====================  =============  ==========================
fp32                   equal          4 ulps of fp32
bf16, bf16-fp32        4 ulps of bf16, this rank's own and reduced
=====================  =============  ==========================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Tolerance:
    """How far from right still counts as right.

    Attributes:
        dtype: Whose ulps.
        ulps: How many, at the largest right value of a tensor.
    """

    dtype: torch.dtype = torch.float32
    ulps: float = 0.0

    def ulp_of(self, right: Tensor) -> float:
        """The distance of neighbours at the largest value."""
        largest = float(right.detach().abs().max()) if right.numel() else 0.0
        info = torch.finfo(self.dtype)
        exponent = math.frexp(largest)[1] - 1 if largest else -126
        return math.ldexp(info.eps, exponent)


EXACT = Tolerance()


def tolerance_of(dtype: str, world_size: int) -> Tolerance:
    """For gradients that so many ranks have a part in; see the table above."""
    if dtype != "fp32":
        return Tolerance(torch.bfloat16, 4.0)
    return EXACT if world_size <= 2 else Tolerance(torch.float32, 4.0)


@dataclass(frozen=True)
class Finding:
    """What was found about one item.

    Attributes:
        complaint: What is wrong with it, or ``None``.
        ulps: The largest difference that was seen; ``None``: no values to compare.
    """

    complaint: str | None = None
    ulps: float | None = None


Findings = dict[str, Finding]
"""By parameter name, or by micro-batch."""


def judge(
    found: Mapping[str, object], right: Mapping[str, Tensor], tolerance: Tolerance = EXACT
) -> Findings:
    """Compare tensors by name.

    Args:
        found: What an engine has shown; an exception stands for what it has refused.
        right: Every name that has to be there.
        tolerance: Allowed difference.
    """
    findings = {
        name: _judge_one(found.get(name), value, tolerance) for name, value in right.items()
    }
    for name in found:
        if name not in right:
            findings[name] = Finding("not the name of a parameter")
    return findings


def merge(*several: Findings) -> Findings:
    """Several looks at the same items: the first complaint about each, the largest difference."""
    merged: Findings = {}
    for findings in several:
        for item, finding in findings.items():
            both = [merged.get(item, Finding()), finding]
            merged[item] = Finding(both[0].complaint or both[1].complaint, largest_ulps(both))
    return merged


def summed_up(item: str, findings: Findings) -> Findings:
    """All findings as those of one item, such as a micro-batch."""
    wrong = [f"{name}: {f.complaint}" for name, f in findings.items() if f.complaint is not None]
    return {item: Finding(next(iter(wrong), None), largest_ulps(findings.values()))}


def largest_ulps(findings: Iterable[Finding]) -> float | None:
    """The largest difference; ``None`` where no values were compared."""
    return max((f.ulps for f in findings if f.ulps is not None), default=None)


def _judge_one(found: object, right: Tensor, tolerance: Tolerance) -> Finding:
    complaint = _without_values(found, right)
    if complaint is not None:
        return Finding(complaint)
    assert isinstance(found, Tensor), "anything else has a complaint"
    bad = int((~torch.isfinite(found)).sum())
    if bad:
        return Finding(f"{bad} of {found.numel()} elements are not finite")
    difference = (found.detach().double() - right.double()).abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    ulps = largest / tolerance.ulp_of(right)
    if ulps > tolerance.ulps:
        count = int((difference > 0).sum())
        return Finding(
            f"{count} of {found.numel()} elements differ, by {largest:.3g} at most: {ulps:.3g} "
            f"ulps of {_name(tolerance.dtype)} at the largest, allowed {tolerance.ulps:g}",
            ulps,
        )
    return Finding(None, ulps)


def _without_values(found: object, right: Tensor) -> str | None:
    """What is wrong before there is a value to look at."""
    if found is None:
        return "missing"
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {found}"
    if type(found) not in (Tensor, nn.Parameter):
        return f"a {type(found).__name__}, expected a plain tensor"
    assert isinstance(found, Tensor)
    if found.shape != right.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(right.shape)}"
    if not found.is_floating_point():
        return f"dtype {_name(found.dtype)}, expected a floating-point one"
    if found.is_meta:
        return "on the meta device, where tensors have no values"
    last = found.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(found.shape, found.stride(), strict=True)
    )
    if found.numel() and found.untyped_storage().nbytes() < (last + 1) * found.itemsize:
        return "its storage was freed"
    return None


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype, str(dtype))
