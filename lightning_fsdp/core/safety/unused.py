"""Parameters that no rank used in a backward have no gradient, as in torch.

A reduction sends zeros for what this rank did not use, and no rank knows by itself whether another
one did. So ranks ask each other while the last reductions land, and a rank waits for the answer
only if it did not use something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from lightning_fsdp.core.engine.communicator import Flags
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.watcher import Watcher
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


@dataclass
class _Usage:
    """Whether a reduced parameter has been used.

    Attributes:
        is_used: Whether it had a gradient in this backward, on this rank; on any rank, once all
            have answered.
        had_gradient: Whether it had one before this backward, on this rank.
        micro_batch: See :class:`FlatParameter`.
    """

    is_used: bool
    had_gradient: bool
    micro_batch: int


class UnusedParameters(Watcher):
    """Sets gradients that no rank had back to ``None``, and calls users' hooks on the others."""

    def __init__(self, any_rank: Callable[[Flags], Callable[[], Flags]]) -> None:
        self._any_rank = any_rank
        self._usage: dict[ShardedTensor, _Usage] = {}
        self._answer: Callable[[], Flags] | None = None

    def on_reduce(self, flat_param: FlatParameter, has_one: Sequence[bool]) -> None:
        """Note what was used here."""
        parameters = cast(Sequence[ShardedTensor], flat_param.parameters)
        for parameter, is_used in zip(parameters, has_one, strict=True):
            usage = self._usage.setdefault(
                parameter, _Usage(False, parameter.grad is not None, flat_param.micro_batch)
            )
            usage.is_used |= is_used

    def before_landing(self) -> None:
        """Ask the other ranks."""
        if self._usage:
            are_used = [usage.is_used for usage in self._usage.values()]
            # A gradient that was zeroed in place before its reduction is there only on ranks that
            # had one.
            had_gradients = [usage.had_gradient for usage in self._usage.values()]
            self._answer = self._any_rank([are_used, had_gradients])

    def on_landed(self) -> None:
        """Act on the answer."""
        answer, self._answer = self._answer, None
        if answer is None or all(each.is_used for each in self._usage.values()):
            return
        usage = self._usage.items()
        for (parameter, each), is_used, had_gradient in zip(usage, *answer(), strict=True):
            each.is_used = is_used
            if not is_used and not had_gradient:
                parameter.grad = None
            elif not is_used and isinstance(parameter.grad, ShardedTensor):
                parameter.grad.micro_batches.pop(each.micro_batch, None)

    def on_backward_end(self) -> None:
        """Call what the user registered on the parameters."""
        usage, self._usage = self._usage, {}
        for parameter in (parameter for parameter, each in usage.items() if each.is_used):
            for hook in tuple((parameter.gradient_hooks or {}).values()):
                hook(parameter)

    def on_failure(self, *_: object, **__: object) -> None:
        """Forget all."""
        self._usage, self._answer = {}, None
