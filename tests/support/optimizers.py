"""An optimizer over whole tensors that keeps every kind of state, and what state must be."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Normed(torch.optim.Optimizer):
    """Divides by the norm of a tensor's moment, but in groups that are elementwise.

    Counts in its groups, in itself and in its state, where there are tensors of other shapes than
    the parameter's, lists, and an entry of no parameter.
    """

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        self.state["calls"] = {"number": torch.tensor(self.num_steps), "of": "no parameter"}
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["moment"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros(())
        state["step"] += 1
        state["moment"].lerp_(gradient, 1 - group["beta"])
        if group.get("elementwise"):
            parameter.sub_(state["moment"], alpha=group["lr"])
            return
        if "rows" not in state:
            state["rows"] = torch.zeros(parameter.shape[:1])
            state["pair"] = [torch.zeros(3), 0]
        if parameter.dim():
            state["rows"] += gradient.reshape(len(parameter), -1).norm(dim=1)
        state["pair"] = [state["pair"][0] + gradient.norm(), state["pair"][1] + 1]
        parameter.sub_(state["moment"] / (state["moment"].norm() + 1e-6), alpha=group["lr"])


def assert_same_state(ours: Any, theirs: Any, where: str = "") -> None:
    """Nested state, bit for bit."""
    assert type(ours) is type(theirs) or isinstance(ours, torch.Tensor), where
    if isinstance(theirs, torch.Tensor):
        assert type(ours) is torch.Tensor, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert sorted(ours, key=str) == sorted(theirs, key=str), where
        for key, value in theirs.items():
            assert_same_state(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(theirs):
            assert_same_state(ours[index], value, f"{where}.{index}")
    else:
        assert ours == theirs, where
