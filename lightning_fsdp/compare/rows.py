"""The tests: what is done with a subject, and what is looked at.

A test repeats what it looks at with other data, or a value kept from before would pass for the
present one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from lightning_fsdp.compare.judge import Finding, Findings, judge, merge, summed_up
from lightning_fsdp.compare.reference import Values, total
from lightning_fsdp.compare.subject import Subject, join, shown

Kind = Literal["parameters", "gradients", "micro-batches"]


@dataclass(frozen=True)
class Row:
    """One test.

    Attributes:
        name: In the table.
        kind: Which ratio it counts for.
        run: Does it, on every rank.
    """

    name: str
    kind: Kind
    run: Callable[[Subject], Findings]


MICRO_BATCHES = (0, 1, 2)
PARTS = (*(f"micro-batch {i}" for i in MICRO_BATCHES), "their sum")
"""What the tests of kind ``micro-batches`` count."""


# -- parameters ------------------------------------------------------------------------------------


def initial_parameters(subject: Subject) -> Findings:
    """As they were before sharding."""
    return subject.look_at_weights(subject.reference.weights)


def parameters_after_forward(subject: Subject) -> Findings:
    """Between forward and backward, which must still find what it needs."""
    loss = subject.forward(0)
    before = subject.look_at_weights(subject.reference.weights)
    subject.backward(loss)
    reduced = subject.look_at_reduced(subject.reference.mean([0]))
    return merge(before, reduced)


def parameters_after_backward(subject: Subject) -> Findings:
    """With gradients there."""
    subject.train(0)
    return subject.look_at_weights(subject.reference.weights)


def parameters_after_step(subject: Subject) -> Findings:
    """Two steps; the second starts from what the first has given."""
    findings = []
    for index in (0, 1):
        before = {name: weight.clone() for name, weight in subject.reference.weights.items()}
        subject.train(index)
        right = subject.step(index)
        findings.append(subject.look_at_weights(right, subject.tolerance, since=before))
        subject.follow(right)
    return merge(*findings)


# -- gradients -------------------------------------------------------------------------------------


def gradients_synced(subject: Subject) -> Findings:
    """After a backward that communicates: the mean over ranks."""
    findings = []
    for index in (0, 1):
        subject.train(index)
        findings.append(subject.look_at_reduced(subject.reference.mean([index])))
        subject.optimizer.zero_grad()
        findings.append(subject.states_are("none"))
    return merge(*findings)


def gradients_unsynced(subject: Subject) -> Findings:
    """Without communication: each rank's own; then all of them reduced; nothing left over."""
    reference, findings = subject.reference, []
    with subject.engine.no_sync():
        for index in (0, 1):
            subject.train(index)
            right = reference.local_sum(subject.rank, range(index + 1))
            findings.append(subject.look_at_local(right))
    subject.train(2)
    findings.append(subject.look_at_reduced(reference.mean([0, 1, 2])))
    subject.optimizer.zero_grad()
    with subject.engine.no_sync():
        subject.train(0)
    subject.optimizer.zero_grad()
    findings.append(subject.states_are("none"))
    subject.train(1)
    findings.append(subject.look_at_reduced(reference.mean([1])))
    return merge(*findings)


def gradients_before_step(subject: Subject) -> Findings:
    """In a hook of the optimizer's step, with the parameters; two steps."""
    findings: list[Findings] = []

    def look(*_: Any) -> None:
        findings.append(subject.look_at_reduced(subject.reference.mean([index])))
        findings.append(subject.look_at_weights(subject.reference.weights))

    handle = subject.optimizer.register_step_pre_hook(look)
    for index in (0, 1):
        subject.train(index)
        subject.follow(subject.step(index))
    handle.remove()
    called = Finding(None if len(findings) == 4 else "the hook was not called at every step")
    return merge(*findings, dict.fromkeys(subject.names, called))


def hook_on_local(subject: Subject) -> Findings:
    """``on_local`` sees each of this rank's own gradients, once per backward."""
    findings, seen = [], _Seen()
    handle = subject.engine.gradients.on_local(seen)
    for index in (0, 1):
        subject.train(index)
        right = subject.reference.local(subject.rank, index)
        findings.append(seen.once(index, subject.names))
        findings.append(judge(seen.values, right, subject.local_tolerance))
        seen.clear()
    handle.remove()
    subject.train(2)
    return merge(*findings, seen.never(subject.names))


def hook_on_reduced(subject: Subject) -> Findings:
    """``on_reduced`` sees each micro-batch's mean, before it is added to earlier ones."""
    findings, seen = [], _Seen()
    handle = subject.engine.gradients.on_reduced(seen)
    for index in (0, 1):
        subject.train(index)
        right = subject.reference.mean([index])
        findings.append(seen.once(index, subject.names))
        findings.append(judge(join(seen.values, right), right, subject.tolerance))
        seen.clear()
    handle.remove()
    subject.train(2)
    means = [subject.reference.mean([index]) for index in MICRO_BATCHES]
    return merge(*findings, seen.never(subject.names), subject.look_at_reduced(total(means)))


class _Seen:
    """What a hook was called with."""

    def __init__(self) -> None:
        self.values: Values = {}
        self._calls: list[tuple[str, int]] = []

    def __call__(self, name: str, gradient: Tensor, micro_batch: int) -> None:
        self.values[name] = gradient.detach().clone()
        self._calls.append((name, micro_batch))

    def once(self, micro_batch: int, names: Sequence[str]) -> Findings:
        """Called once per name, with the right number of the micro-batch."""
        of_name = {name: [i for called, i in self._calls if called == name] for name in names}
        return {
            name: Finding(
                None if calls == [micro_batch] else f"called for {calls}, expected [{micro_batch}]"
            )
            for name, calls in of_name.items()
        }

    def never(self, names: Sequence[str]) -> Findings:
        """Not called since the last clear."""
        called = {name for name, _ in self._calls}
        return {
            name: Finding("called after it was removed" if name in called else None)
            for name in names
        }

    def clear(self) -> None:
        """Forget."""
        self.values.clear()
        self._calls.clear()


# -- micro-batches ---------------------------------------------------------------------------------


def micro_batches_apart(subject: Subject) -> Findings:
    """Three micro-batches of one step, each readable after all have run, and their sum."""
    gradients, parts = subject.engine.gradients, []
    with gradients.micro_batches("separate"):
        for index in MICRO_BATCHES:
            subject.train(index)
    means = [subject.reference.mean([index]) for index in MICRO_BATCHES]
    for index, right in enumerate(means):
        found = {
            name: shown(functools.partial(gradients[name].full, micro_batch=index))
            for name in subject.names
        }
        parts.append(summed_up(PARTS[index], judge(found, right, subject.tolerance)))
    return merge(*parts, summed_up(PARTS[-1], subject.look_at_reduced(total(means))))


def micro_batches_reduced_once(subject: Subject) -> Findings:
    """Three micro-batches without communication, each readable; one reduction, at the end."""
    parts, rank = [], subject.rank
    with subject.engine.gradients.micro_batches("local"):
        for index in MICRO_BATCHES:
            subject.train(index)
            right = subject.reference.local_sum(rank, range(index + 1))
            parts.append(summed_up(PARTS[index], subject.look_at_local(right)))
    reduced = subject.look_at_reduced(subject.reference.mean(MICRO_BATCHES))
    return merge(*parts, summed_up(PARTS[-1], reduced))


ROWS = {
    "initial": Row("initial parameters", "parameters", initial_parameters),
    "after-forward": Row("parameters after forward", "parameters", parameters_after_forward),
    "after-backward": Row("parameters after backward", "parameters", parameters_after_backward),
    "after-step": Row("parameters after the step", "parameters", parameters_after_step),
    "synced": Row("gradients with sync", "gradients", gradients_synced),
    "unsynced": Row("gradients without sync", "gradients", gradients_unsynced),
    "before-step": Row("gradients before the step", "gradients", gradients_before_step),
    "on-local": Row("hook on_local", "gradients", hook_on_local),
    "on-reduced": Row("hook on_reduced", "gradients", hook_on_reduced),
    "apart": Row("micro-batches apart", "micro-batches", micro_batches_apart),
    "reduced-once": Row("micro-batches reduced once", "micro-batches", micro_batches_reduced_once),
}
