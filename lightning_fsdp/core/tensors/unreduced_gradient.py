"""What stands in ``.grad`` while a gradient waits to be reduced: this rank's own, or a replica's.

It can be dropped or zeroed, as ``zero_grad`` does. Everything else is refused: an optimizer's step,
a norm or a value taken from it would differ between the ranks.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Self, cast

import torch

from lightning_fsdp.core.engine.sharded import Sharded, WaitingGradient
from lightning_fsdp.core.engine.structures import tensors_in
from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor, unreduced, zero_gradient

aten = torch.ops.aten

UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default  # a gradient scaler's operation


class UnreducedGradient(ShardedTensor, WaitingGradient):
    """Owns the gradients of a parameter that wait, which are dropped with it."""

    _parameter: weakref.ref[Sharded]

    @staticmethod
    def __new__(cls, parameter: Sharded) -> Self:  # noqa: D102
        stand_in = super().__new__(cls, parameter._local.new_empty(0), parameter.spec)
        stand_in.prior = cast(Sharded | None, parameter.grad)
        stand_in._parameter = weakref.ref(parameter)
        return stand_in

    def clear(self) -> None:
        """Drop the gradient, for ``zero_``: ``.grad`` is then a reduced gradient of zeros.

        Other ranks may have had none; they get zeros with the next reduction, or before a step.
        """
        if self.prior is not None:
            self.prior.zero_()
        parameter = self._parameter()
        if parameter is not None and parameter.grad is self:
            parameter.grad = zero_gradient(parameter) if self.prior is None else self.prior

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.zero_.default, aten._foreach_zero_.default):
            for tensor in tensors_in(args[0]):  # one, or a list of them
                if isinstance(tensor, UnreducedGradient):
                    tensor.clear()
                else:
                    tensor.zero_()
            return args[0] if func is aten.zero_.default else None
        if func in (aten.detach.default, aten.alias.default):
            return args[0]
        if func is UNSCALE:  # its handler raises, and lets the other ranks raise
            return super().__torch_dispatch__(func, types, args, kwargs)
        stand_in = next(t for t in tensors_in((args, kwargs)) if isinstance(t, UnreducedGradient))
        raise stand_in.refusal(str(func))

    def to_local(self) -> NoReturn:
        """Refused: there is no reduced slice yet."""
        raise self.refusal("to_local")

    def full_tensor(self, *, rank0_only: bool = False) -> NoReturn:
        """Refused: there is no reduced gradient yet."""
        raise self.refusal("full_tensor")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self.refusal("deepcopy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rank = self.spec.communicator.mesh_rank
        return (
            f"UnreducedGradient({self.spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"rank {rank}'s {'own' if self.of_replica is None else 'replica'}, not reduced over "
            "the ranks)"
        )

    def refusal(self, what: str) -> RuntimeError:
        """The error for an attempt to use the gradient for ``what``."""
        return unreduced(self.spec, what, is_of_replica=self.own is None)
