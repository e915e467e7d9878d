"""Which parameters decay, and how the learning rate moves: warm-up and cosine.

The optimizer is AdamW, or Muon for the matrices of blocks with AdamW for everything else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from recipes.errors import RecipeError, require_in_range


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer, linear warm-up, cosine decay.

    Attributes:
        name: ``muon``: for the matrices of blocks, with steps as large as AdamW's; embeddings, the
            head and vectors stay AdamW's.
        lr: The highest learning rate, reached at the end of the warm-up.
        weight_decay: Decay of parameters with two or more dimensions; biases and norms have none.
        betas: Decay of the two moments, per optimizer step.
        eps: Added to the root of the second moment.
        warmup_ratio: Share of the run's optimizer steps in which the learning rate rises.
        final_lr_ratio: Learning rate at the end of the run, as a share of ``lr``.
        fused: Use torch's fused kernel of AdamW.
        momentum: Momentum of Muon.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    warmup_ratio: float = 0.02
    final_lr_ratio: float = 0.1
    fused: bool = True
    momentum: float = 0.95

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise RecipeError(f"optimizer.lr: expected more than 0, got {self.lr}. Raise it.")
        for name in ("weight_decay", "eps"):
            require_in_range(f"optimizer.{name}", getattr(self, name), "Raise it.", 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise RecipeError(
                f"optimizer.betas: expected two of 0 or more and less than 1, got "
                f"{list(self.betas)}. Correct them."
            )
        require_in_range("optimizer.momentum", self.momentum, "Correct it.", 0, 1)
        for name in ("warmup_ratio", "final_lr_ratio"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise RecipeError(f"optimizer.{name}: expected 0 to 1, got {value}. Correct it.")


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: matrices and embeddings decay, biases and norms do not.

    Args:
        parameters: In their original shapes; frozen ones are left out.
        weight_decay: Of the first group.

    Returns:
        Two groups, fewer where one would be empty.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable ``parameters``, in decay groups."""
    return torch.optim.AdamW(
        decay_groups(parameters, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=config.fused,
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as the one optimizer that the Trainer wants.

    Args:
        matrices: Parameters ``(m, n)``.
        others: Groups of all others.
        config: Its options.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[dict[str, Any]],
        config: OptimizerConfig,
    ) -> None:
        none: list[dict[str, Any]] = [{"params": []}]  # adapters may be matrices alone
        muon = torch.optim.Muon(
            [{"params": list(matrices)}],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = torch.optim.AdamW(
            [*others, *none], lr=config.lr, betas=config.betas, eps=config.eps, fused=config.fused
        )
        # Under sharding AdamW's groups are stepped by slices, and Muon's matrices whole.
        slices = [{**group, "elementwise": True} for group in adamw.param_groups]
        groups = [group for group in (*muon.param_groups, *slices) if group["params"]]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for cls, is_elementwise in ((torch.optim.Muon, False), (torch.optim.AdamW, True)):
            part = object.__new__(cls)  # over some of the groups, and the same state
            vars(part).update(vars(self))
            part.param_groups = [
                group
                for group in self.param_groups
                if group.get("elementwise", False) == is_elementwise
            ]
            inspect.unwrap(cls.step)(part)  # without the hooks, which this one calls
        return loss


def build_muon(model: nn.Module, config: OptimizerConfig) -> MuonAndAdamW:
    """Muon over the matrices of a model, AdamW over embeddings, the head and vectors.

    Args:
        model: Of transformers; frozen parameters are left out.
        config: The options of both.
    """
    find_head: Callable[[], nn.Module | None] = getattr(
        model, "get_output_embeddings", lambda: None
    )
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {id(module.weight) for module in (find_head(), *tables) if module is not None}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trainable if p.ndim == 2 and id(p) not in left_out]
    chosen = set(map(id, matrices))
    others = [p for p in trainable if id(p) not in chosen]
    return MuonAndAdamW(matrices, decay_groups(others, config.weight_decay), config)


def kinds_of(param_groups: Iterable[Mapping[str, Any]]) -> str:
    """Which optimizer steps how many parameters, group by group: "muon 26, adamw 4".

    Args:
        param_groups: Of an optimizer, or of its state in a checkpoint.
    """
    kinds = (("muon" if "momentum" in g else "adamw", len(g["params"])) for g in param_groups)
    return ", ".join(f"{name} {num}" for name, num in kinds)


def lr_factor(step: int, *, num_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of one optimizer step, as a share of ``config.lr``.

    With w warm-up steps of n: ``(step + 1) / (w + 1)`` before step w, 1 at step w, and half a
    cosine down to ``final_lr_ratio`` at step n, which is the first one after the run.

    Args:
        step: 0 for the first optimizer step.
        num_steps: Optimizer steps of the run.
        config: Its ratios are used.
    """
    num_warmup = min(math.ceil(config.warmup_ratio * num_steps), num_steps)
    if step < num_warmup:
        return (step + 1) / (num_warmup + 1)
    progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    low = config.final_lr_ratio
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
