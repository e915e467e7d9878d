"""Which optimizers step slices, which step whole tensors, and which can do neither."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, optim
from torch.optim import Optimizer

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

# Every element's update depends on that element's history alone: slices train as the whole would.
ELEMENTWISE: set[type[Optimizer]] = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD),
}
# Counts and factors that torch.optim keeps as tensors.
SCALARS = {"step", "eta", "mu", "mu_product"}

ELEMENTWISE_GROUP = "elementwise"
"""An option of a parameter group of an optimizer over whole tensors: this one steps slices."""

_said_to_be: set[type[Optimizer]] = set()

# In lower case: packages spell them differently. What each computes of one tensor depends on others
# (norms and sums over all of them, a search along the whole gradient), or it steps by itself. Found
# in pytorch_optimizer 4.1 by stepping the same tensors with one optimizer and with two.
_NEEDS_ALL_TENSORS = {
    *("lbfgs", "alig", "prodigy", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion"),
    *("dadaptsgd", "adagc", "adai", "adams", "asgd", "avagrad", "sam", "gsam", "wsam", "bsam"),
    *("looksam", "friendlysam", "pcgrad", "lomo", "adalomo", "adammini", "adam_mini", "demo"),
    *("distributedmuon", "adahessian", "sophiah"),
}
# Likewise. Their train() and eval() write to parameters with state that owners alone would have.
_WRITES_OUTSIDE_OF_STEPS = {"schedulefreesgd", "schedulefreeadamw", "schedulefreeradam"}
_OPTIONS_OVER_ALL_TENSORS = ("max_grad_norm", "pre_norm")  # likewise: of LAMB, Adan and others


def elementwise_optimizer(cls: OptimizerClass) -> OptimizerClass:
    """Say that an optimizer updates each element by that element's history alone.

    It then steps slices, as torch's AdamW does: no whole tensor, and no communication. Others that
    nothing is known of step whole tensors, each on one rank.

    Args:
        cls: Of the optimizer; what is derived from it is meant as well. Returned, so that this may
            stand above a class.
    """
    _said_to_be.add(cls)
    return cls


def steps_whole_tensors(optimizer: Optimizer, example: str) -> bool:
    """Whether an optimizer over sharded parameters steps whole tensors, each on one rank.

    Args:
        optimizer: Any.
        example: The name of a sharded parameter.

    Raises:
        NotImplementedError: Neither that nor a step over slices gives what it would give unsharded.
    """
    classes = type(optimizer).__mro__
    why = _why_not(optimizer)
    if why is not None:
        raise NotImplementedError(
            f"{type(optimizer).__name__}: expected an optimizer that updates each tensor by "
            f"itself, got one that computes with all of them at once {why}, but {example!r} is "
            "sharded and ranks step different tensors. Use another one, or leave its parameters "
            "unsharded with ignored_params; one that updates each element by itself may be given "
            "to elementwise_optimizer()."
        )
    return (ELEMENTWISE | _said_to_be).isdisjoint(classes)


def _why_not(optimizer: Optimizer) -> str | None:
    """What an optimizer computes with all tensors at once, if it is known to."""
    classes = type(optimizer).__mro__
    if not _said_to_be.isdisjoint(classes):
        return None
    for cls in classes:
        if cls not in ELEMENTWISE and cls.__name__.lower() in _NEEDS_ALL_TENSORS:
            return f"({cls.__name__})"
        if cls.__name__.lower() in _WRITES_OUTSIDE_OF_STEPS:
            return f"in its train() and eval() ({cls.__name__})"
    for group in optimizer.param_groups:
        for option in _OPTIONS_OVER_ALL_TENSORS:
            if group.get(option):
                return f"({option}={group[option]!r}; without it, it may be used)"
    for name, value in vars(optimizer).items():
        inside = value.values() if isinstance(value, dict) else value
        several = inside if isinstance(value, (dict, list, tuple)) else [value]
        if any(isinstance(each, Optimizer) for each in several):
            return f"(it steps another optimizer, .{name})"
    return None


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Of all its groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
