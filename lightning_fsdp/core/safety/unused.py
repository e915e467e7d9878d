"""Parameters that no rank used in a backward have no gradient, as in torch.

A reduction sends zeros for what this rank did not use, and no rank knows by itself whether another
one did. So ranks ask each other while the last reductions land, and a rank waits for the answer
only if it did not use something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from lightning_fsdp.core.engine.communicator import Flags
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.watcher import Watcher
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


class UnusedParameters(Watcher):
    """Sets gradients that no rank had back to ``None``, and calls users' hooks on the others."""

    def __init__(self, any_rank: Callable[[Flags], Callable[[], Flags]]) -> None:
        self._any_rank = any_rank
        # By parameter that was reduced in this backward: whether it had a gradient in it, on this
        # rank, and on any once all have answered; and whether it had one before, on this rank.
        self._is_used: dict[ShardedTensor, bool] = {}
        self._had_gradient: dict[ShardedTensor, bool] = {}
        self._answer: Callable[[], Flags] | None = None

    def on_reduce(self, flat_param: FlatParameter, has_one: Sequence[bool]) -> None:
        """Note what was used here."""
        parameters = cast(Sequence[ShardedTensor], flat_param.parameters)
        for parameter, is_used in zip(parameters, has_one, strict=True):
            self._had_gradient.setdefault(parameter, parameter.grad is not None)
            self._is_used[parameter] = is_used or self._is_used.get(parameter, False)

    def before_landing(self) -> None:
        """Ask the other ranks."""
        if self._is_used:
            # A gradient that was zeroed in place before its reduction is there only on ranks that
            # had one.
            flags = [list(each.values()) for each in (self._is_used, self._had_gradient)]
            self._answer = self._any_rank(flags)

    def on_landed(self) -> None:
        """Act on the answer."""
        answer, self._answer = self._answer, None
        if answer is None or all(self._is_used.values()):
            return
        for parameter, is_used, had_gradient in zip(list(self._is_used), *answer(), strict=True):
            self._is_used[parameter] = is_used
            if not is_used and not had_gradient:
                parameter.grad = None
            elif not is_used and isinstance(parameter.grad, ShardedTensor):
                micro_batch = parameter.spec.flat_param().micro_batch
                parameter.grad.micro_batches.pop(micro_batch, None)

    def on_backward_end(self) -> None:
        """Call what the user registered on the parameters."""
        is_used, self._is_used, self._had_gradient = self._is_used, {}, {}
        for parameter in filter(is_used.get, is_used):
            for hook in tuple((parameter.gradient_hooks or {}).values()):
                hook(parameter)

    def on_failure(self, *_: object, **__: object) -> None:
        """Forget all."""
        self._is_used, self._had_gradient, self._answer = {}, {}, None
