"""Parameters that no rank used in a backward have no gradient, as in torch.

A reduction sends zeros for what this rank did not use, and no rank knows by itself whether another
one did. So ranks ask each other while the last reductions land, and a rank waits for the answer
only if it did not use something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import or_
from typing import cast

from lightning_fsdp.core.engine.communicator import Flags
from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.watcher import Watcher
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor


class UnusedParameters(Watcher):
    """Sets gradients that no rank had back to ``None``, and calls users' hooks on the others."""

    def __init__(self, any_rank: Callable[[Flags], Callable[[], Flags]]) -> None:
        self._any_rank = any_rank
        # By flat parameter that was reduced in this backward, for each of its parameters: whether
        # it had a gradient in it, on this rank, and on any once all have answered; and whether it
        # had one before, on this rank.
        self._flags: dict[FlatParameter, tuple[list[bool], list[bool]]] = {}
        self._answer: Callable[[], Flags] | None = None

    def on_reduce(self, flat_param: FlatParameter, has_one: Sequence[bool]) -> None:
        """Note what was used here."""
        now = [parameter.grad is not None for parameter in flat_param.parameters]
        is_used, had_gradient = self._flags.get(flat_param, (has_one, now))
        self._flags[flat_param] = list(map(or_, is_used, has_one)), had_gradient

    def before_landing(self) -> None:
        """Ask the other ranks."""
        if self._flags:
            # A gradient that was zeroed in place before its reduction is there only on ranks that
            # had one.
            both = zip(*self._flags.values(), strict=True)
            self._answer = self._any_rank([list(chain(*rows)) for rows in both])

    def on_landed(self) -> None:
        """Act on the answer."""
        answer, self._answer = self._answer, None
        if answer is None or all(all(is_used) for is_used, _ in self._flags.values()):
            return
        places = [(f, slot) for f in self._flags for slot in range(len(f.parameters))]
        for (flat_param, slot), is_used, had_gradient in zip(places, *answer(), strict=True):
            self._flags[flat_param][0][slot] = is_used
            parameter = flat_param.parameters[slot]
            if not is_used and not had_gradient:
                parameter.grad = None
            elif not is_used and isinstance(parameter.grad, ShardedTensor):
                parameter.grad.micro_batches.pop(flat_param.micro_batch, None)

    def on_backward_end(self) -> None:
        """Call what the user registered on the parameters."""
        flags, self._flags = self._flags, {}
        for flat_param, (is_used, _) in flags.items():
            parameters = cast(Sequence[ShardedTensor], flat_param.parameters)
            for parameter in compress(parameters, is_used):
                for hook in tuple((parameter.gradient_hooks or {}).values()):
                    hook(parameter)

    def on_failure(self, *_: object, **__: object) -> None:
        """Forget all."""
        self._flags, self._answer = {}, None
