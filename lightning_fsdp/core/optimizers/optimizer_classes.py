"""Which optimizers step slices, which step whole tensors, and which can do neither."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, optim
from torch.optim import Optimizer

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

# The update of an element depends on its own history alone, so slices train as the whole would.
ELEMENTWISE: set[type[Optimizer]] = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.Rprop, optim.Adagrad, optim.Adadelta, optim.ASGD),
}
# Names of counts and factors that torch.optim keeps as tensors in a parameter's state.
SCALARS = {"step", "eta", "mu", "mu_product"}

ELEMENTWISE_GROUP = "elementwise"
"""Option of a parameter group of an optimizer over whole tensors: step this group's slices."""

_declared: set[type[Optimizer]] = set()  # with elementwise_optimizer()

# In lower case, as packages spell them differently. What these compute for one tensor depends on
# others (norms and sums over all of them, a search along the whole gradient), or they step by
# themselves. Found in pytorch_optimizer 4.1 by stepping tensors with one optimizer and with two.
_NEEDS_ALL_TENSORS = {
    *("lbfgs", "alig", "prodigy", "dadaptadagrad", "dadaptadam", "dadaptadan", "dadaptlion"),
    *("dadaptsgd", "adagc", "adai", "adams", "asgd", "avagrad", "sam", "gsam", "wsam", "bsam"),
    *("looksam", "friendlysam", "pcgrad", "lomo", "adalomo", "adammini", "adam_mini", "demo"),
    *("distributedmuon", "adahessian", "sophiah"),
}
# Their train() and eval() write to parameters, from state that only owners would have.
_WRITES_OUTSIDE_OF_STEPS = {"schedulefreesgd", "schedulefreeadamw", "schedulefreeradam"}
_OPTIONS_OVER_ALL_TENSORS = ("max_grad_norm", "pre_norm")  # of LAMB, Adan and others


def elementwise_optimizer(cls: OptimizerClass) -> OptimizerClass:
    """Declare that an optimizer updates each element from that element's own history.

    It then steps slices, as torch's AdamW does: no whole tensor, and no communication. Optimizers
    that nothing is known about step whole tensors, each on one rank.

    Args:
        cls: The optimizer's class; classes derived from it are meant as well.

    Returns:
        ``cls``, so that this can be used as a decorator.
    """
    _declared.add(cls)
    return cls


def steps_whole_tensors(optimizer: Optimizer, example: str) -> bool:
    """Whether an optimizer over sharded parameters steps whole tensors, each on one rank.

    Args:
        optimizer: Any optimizer.
        example: Name of a sharded parameter of its, for the message.

    Raises:
        NotImplementedError: Neither this nor a step over slices gives what it gives unsharded.
    """
    classes = type(optimizer).__mro__
    if (why := _why_not(optimizer)) is not None:
        raise NotImplementedError(
            f"{type(optimizer).__name__}: expected an optimizer that updates each tensor by "
            f"itself, got one that computes with all of them at once {why}, but {example!r} is "
            "sharded and ranks step different tensors. Use another one, or leave its parameters "
            "unsharded with ignored_params; one that updates each element by itself may be given "
            "to elementwise_optimizer()."
        )
    return (ELEMENTWISE | _declared).isdisjoint(classes)


def _why_not(optimizer: Optimizer) -> str | None:
    """Why an optimizer needs all tensors at once, in words; ``None`` if it is not known to."""
    classes = type(optimizer).__mro__
    if not _declared.isdisjoint(classes):
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
    """The parameters of all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
