"""Run code that names no device on another one, with the values that it has on the host.

New tensors are made on the host and moved, and what is drawn in place is drawn on the host. So a
seed gives the same model and the same data on every device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NEW = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.tensor,
    torch.zeros,
}
_DRAWN = {Tensor.bernoulli_, Tensor.normal_, Tensor.random_, Tensor.uniform_}


class OnDevice(TorchFunctionMode):
    """While entered, new tensors of this thread are on ``device``, unless their place is named."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _NEW and kwargs.get("device") is None and not _is_with_tensors(kwargs):
            trains = kwargs.pop("requires_grad", False)
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made.to(self._device).requires_grad_(trains)
        if func in _DRAWN and args[0].device.type == self._device.type != "cpu":
            drawn = func(torch.empty_like(args[0], device="cpu"), *args[1:], **kwargs)
            return args[0].copy_(drawn)
        return func(*args, **kwargs)


def _is_with_tensors(options: dict[str, Any]) -> bool:
    """Whether an output is given, which says where it is."""
    return options.get("out") is not None
