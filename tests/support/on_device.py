"""Run code that names no device on another one, with the values that it has on the host.

New tensors are made on the device; what is drawn, new or in place, is drawn on the host. So a seed
gives the same model and the same data on every device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FILLED = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.zeros,
}
_DRAWN = {torch.rand, torch.randint, torch.randn, torch.randperm}
_GIVEN = {torch.tensor}
_DRAWN_IN_PLACE = {Tensor.bernoulli_, Tensor.normal_, Tensor.random_, Tensor.uniform_}


class OnDevice(TorchFunctionMode):
    """While entered, new tensors of this thread are on ``device``, unless their place is named."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_free = kwargs.get("device") is None and kwargs.get("out") is None
        # torch.utils.checkpoint compares what it made itself with what it makes in the backward,
        # whose thread has no mode.
        is_free = is_free and not (func is torch.empty and args == ((0,),))
        if is_free and func in _FILLED | _GIVEN:
            return func(*args, **{**kwargs, "device": self._device})
        if is_free and func in _DRAWN:
            trains = kwargs.pop("requires_grad", False)
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made.to(self._device).requires_grad_(trains)
        # torch.nn.init asks for itself, before it calls the methods of tensors.
        if func in _DRAWN_IN_PLACE or getattr(func, "__module__", None) == "torch.nn.init":
            return _as_on_the_host(func, args, kwargs)
        return func(*args, **kwargs)


def _as_on_the_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args = args or (kwargs.pop("tensor"),)
    target = args[0]
    if target.device.type in ("cpu", "meta"):
        return func(*args, **kwargs)
    with torch.no_grad():
        drawn = target.detach().cpu()
        func(drawn, *args[1:], **kwargs)
        return target.copy_(drawn)
