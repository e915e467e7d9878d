"""The cross entropy of a linear layer's outputs, without the outputs.

The logits of a language model are the largest tensor of its step: positions x vocabulary, in
several copies between the forward and the backward. Here they exist for a few positions at a time:

    for each chunk      logits -> losses -> softmax minus one-hot -> parts of both gradients
    backward            both gradients times that of the loss

Both gradients are made in the forward, so the backward reads neither weight nor logits.

Note: dtypes
Products are in the dtype of the operands, what is summed over positions and over chunks in fp32.
Beside operands of lower precision, what is in fp32 exists for a few columns of the vocabulary at a
time. In one chunk the weight's gradient is one product, which sums in fp32 by itself; in several it
is a sum in fp32, of twice the gradient's bytes. So few positions are one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fsdp.core.engine.torch_internals import not_compiled

# Beside lower precision, so many elements are in fp32 at once: at most, and of all of them.
_AT_ONCE, _PARTS = 2**23, 16
CHUNK_SIZE = 256
"""Positions whose logits exist at once, unless chosen otherwise; see :func:`chunk_size_of`."""

_most_chunks: ContextVar[int | None] = ContextVar("most_chunks", default=None)


@not_compiled
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias).float(), labels)`` without whole logits.

    Args:
        hidden: ``(..., width)``, floating point. Cast to autocast's dtype, where that is on.
        weight: ``(vocabulary, width)``. A frozen one has no gradient, and costs none.
        labels: ``(...)``, int64, of the positions of ``hidden``; shifted already.
        bias: ``(vocabulary,)``.
        ignore_index: A label that takes no part.
        reduction: Over the positions that take part.
        chunk_size: Positions whose logits exist at once. More are faster: each chunk reads the
            weight twice, and reads and writes its gradient. By default 256; in bf16 all, where they
            take less memory than a sum of the weight's gradient in fp32.

    Returns:
        0-d, float32. Its backward runs once, and is not differentiable again.

    Raises:
        ValueError: A wrong shape, reduction or size of chunks.
    """
    _check(hidden, weight, labels, bias, reduction, chunk_size)
    if chunk_size is None:
        chunk_size = chunk_size_of(hidden, weight)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as of the linear layer, outside of what follows
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    counts = (labels != ignore_index).flatten()
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2),
            weight,
            bias,
            labels.flatten().where(counts, 0).unsqueeze(1).long(),
            counts.unsqueeze(1),
            _Needs.of(hidden, weight, bias, chunk_size=chunk_size),
        )
    if reduction == "sum":
        return loss
    num = counts.sum()
    # Of no position at all, as torch's: nan, with gradients of 0.
    return torch.where(num > 0, loss / num.clamp(min=1), torch.nan)


def chunk_size_of(hidden: Tensor, weight: Tensor) -> int:
    """Positions whose logits :func:`linear_cross_entropy` has at once, unless chosen otherwise."""
    kind, num = hidden.device.type, hidden.shape[:-1].numel()
    is_autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_autocast else weight.dtype
    trains = weight.requires_grad and torch.is_grad_enabled()
    # Logits of two bytes, or a sum of four; beside the gradient that comes of it.
    is_less = num <= 2 * weight.shape[1]
    if dtype is torch.bfloat16 and trains and is_less:
        return max(num, 1)
    return CHUNK_SIZE


# In configs of Gemma 2, Cohere and Granite.
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def body_and_head(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """The two parts of a language model of transformers, whose loss needs no logits.

    Args:
        model: Of transformers, or of peft around one (LoRA and others).

    Returns:
        What computes the head's input, and the head as one reads it inside :func:`call_with`;
        ``None`` where logits are more than a linear layer of the body's output: adapters on the
        head, prompt learning, logits that are capped or scaled.
    """
    if hasattr(model, "peft_config"):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            return None
        model = model.get_base_model()
    if any(getattr(model.config, name, None) not in (None, 1.0) for name in _AFTER_THE_HEAD):
        return None
    head = model.get_output_embeddings()
    linear = getattr(head, "module", head)  # of FSDP1
    return (model.base_model, head) if isinstance(linear, nn.Linear) else None


@contextmanager
def only_first_chunks(num: int) -> Iterator[None]:
    """Inside, ``num`` chunks are computed at most: for a plan of memory, all are alike."""
    token = _most_chunks.set(num)
    try:
        yield
    finally:
        _most_chunks.reset(token)


@dataclass(frozen=True)
class _Needs:
    """Which gradients are made, and in how large chunks of positions."""

    hidden: bool
    weight: bool
    bias: bool
    chunk_size: int

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, chunk_size: int) -> _Needs:
        # Not ctx.needs_input_grad, which does not know of torch.no_grad().
        is_on = torch.is_grad_enabled()
        return cls(
            hidden=is_on and hidden.requires_grad,
            weight=is_on and weight.requires_grad,
            bias=is_on and bias is not None and bias.requires_grad,
            chunk_size=chunk_size,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made of the sum of the losses; the mean's factor comes with the loss's own."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        counts: Tensor,
        needs: _Needs,
    ) -> Tensor:
        of_hidden = torch.empty_like(hidden) if needs.hidden else None
        of_weight = None
        if needs.weight:
            is_one = len(hidden) <= needs.chunk_size and weight.dtype is torch.bfloat16
            of_weight = torch.zeros_like(weight) if is_one else _zeros(weight)
        of_bias = _zeros(bias) if needs.bias and bias is not None else None
        gradients = of_hidden, of_weight, of_bias
        loss = _sum_over_chunks(hidden, weight, bias, labels, counts, gradients, needs.chunk_size)
        # After the memory of the chunks has been freed, as this is another copy.
        if of_weight is not None and weight.dtype is torch.bfloat16:  # fp16 waits for a scaler
            of_weight = of_weight.to(weight.dtype)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.gradients = of_hidden, of_weight, of_bias
        return loss

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> Any:
        if torch.is_grad_enabled():  # what once_differentiable overlooks where of_loss is constant
            raise RuntimeError(
                "linear_cross_entropy: expected a backward without create_graph=True, as its "
                "gradients are made without a graph. Take the cross entropy of logits."
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: expected one backward, got a second one, after the first "
                "took the gradients. Compute the loss again, or take the cross entropy of logits."
            )
        # In place, and owned by nobody else: a second gradient of the weight would double the peak.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if g is None else g.mul_(of_loss) for g in gradients)
        pairs = zip(scaled, ctx.dtypes, strict=True)
        return *(None if g is None else g.to(dtype) for g, dtype in pairs), None, None, None


def _sum_over_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counts: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    chunk_size: int,
) -> Tensor:
    """The sum of the losses; its gradients are written to hidden's, added to the others."""
    of_hidden, of_weight, of_bias = gradients
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    # One memory for the logits of all chunks: fresh memory of this size costs page faults, and
    # that of the chunk before would still be alive.
    num, vocabulary = min(chunk_size, len(hidden)), len(weight)
    products = hidden.new_empty(num, vocabulary)
    width = _num_at_once(vocabulary, num)
    in_fp32 = None  # a few columns of those, where they are not themselves
    if products.dtype is not torch.float32:
        in_fp32 = torch.empty(num, width, dtype=torch.float32, device=hidden.device)
    for part in islice(_parts(len(hidden), chunk_size), _most_chunks.get()):
        product, label, counts_here = products[: len(labels[part])], labels[part], counts[part]
        _linear(hidden[part], weight, bias, out=product)
        top = product.amax(1, keepdim=True).float()
        of_label = product.gather(1, label) - top
        sums = torch.zeros_like(of_label)
        for columns in _parts(vocabulary, width):
            sums += _exponentials(product[:, columns], top, in_fp32).sum(1, keepdim=True)
        # Not times 0: what is left out may not be finite.
        loss += torch.where(counts_here, sums.log() - of_label, 0).sum()
        if all(gradient is None for gradient in gradients):
            continue
        factor = counts_here / sums
        for columns in _parts(vocabulary, width):
            block = product[:, columns]
            softmax = block if in_fp32 is None else _exponentials(block, top, in_fp32)
            softmax *= factor
            if of_bias is not None:
                of_bias[columns] += softmax.sum(0)
            block.copy_(softmax)  # nothing to do where both are one memory
        # Their own logits' in fp32, of which the largest is all but 1. Not by scatter_, which on a
        # CPU takes as much memory as all logits in fp32.
        of_own = of_label.exp() * factor - counts_here.float()
        rows = torch.arange(len(label), device=label.device)
        product[rows, label[:, 0]] = of_own[:, 0].to(product.dtype)
        if of_bias is not None:
            of_bias.index_add_(0, label[:, 0], -counts_here[:, 0].to(of_bias.dtype))
        if of_hidden is not None:
            torch.mm(product, weight, out=of_hidden[part])
        if of_weight is not None:
            _add_product(of_weight, product.T, hidden[part])
    return loss


def _num_at_once(num: int, size: int) -> int:
    """How many of ``num`` columns or rows of a size there are at once in fp32."""
    return max(1, min(_AT_ONCE // max(size, 1), num // _PARTS))


def _exponentials(logits: Tensor, top: Tensor, in_fp32: Tensor | None) -> Tensor:
    """Of logits beside the largest of each position; in place, or in the memory that is given."""
    if in_fp32 is None:
        return logits.sub_(top).exp_()
    return in_fp32[: len(logits), : logits.shape[1]].copy_(logits).sub_(top).exp_()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> None:
    if bias is None:
        torch.mm(hidden, weight.T, out=out)
    else:
        torch.addmm(bias, hidden, weight.T, out=out)


def _parts(num: int, size: int) -> Iterator[slice]:
    for first in range(0, num, size):
        yield slice(first, first + size)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    for rows in _parts(len(total), _num_at_once(*total.shape)):
        total[rows] += left[rows] @ right


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str,
    chunk_size: int | None,
) -> None:
    shapes = {
        "weight": (weight.shape, (weight.shape[0], hidden.shape[-1])),
        "labels": (labels.shape, hidden.shape[:-1]),
        "bias": (weight.shape[:1] if bias is None else bias.shape, weight.shape[:1]),
    }
    for name, (found, expected) in shapes.items():
        if tuple(found) != tuple(expected):
            raise ValueError(
                f"linear_cross_entropy: expected {name} of shape {tuple(expected)} beside hidden "
                f"of {tuple(hidden.shape)} and weight of {tuple(weight.shape)}, got "
                f"{tuple(found)}. Labels are one for each position, weight is that of nn.Linear."
            )
    if labels.is_floating_point():
        raise ValueError(
            f"linear_cross_entropy: expected labels of int64, one class for each position, got "
            f"{labels.dtype}. For probabilities of all classes take the cross entropy of logits."
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"linear_cross_entropy: expected 'mean' or 'sum' for reduction, got {reduction!r}. The "
            "losses of positions are not kept; take the cross entropy of logits for them."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"linear_cross_entropy: expected a chunk_size of at least 1, got {chunk_size}. "
            "Raise it."
        )
