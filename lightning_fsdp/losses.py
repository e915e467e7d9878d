"""The cross entropy of a linear layer's outputs, without the outputs.

The logits of a language model are the largest tensor of its step: positions x vocabulary, in
several copies between the forward and the backward. Here they exist for a few positions at a time:

    for each chunk          logits, of all blocks
      for each block        sums of exponentials -> losses
      for each block        softmax minus one-hot -> parts of both gradients
    backward                both gradients times that of the loss

A chunk is some of the positions, a block some of the vocabulary. Both gradients are made in the
forward, so the backward reads neither weight nor logits.

Note: dtypes
Products are in the dtype of the operands; sums over positions, chunks and blocks are in fp32, or in
fp64. The weight's gradient over several chunks is such a sum, of twice the bytes of a gradient in
bf16. In one chunk each of its blocks is one product, which sums in fp32 by itself. So some more
positions in bf16 than a chunk has are one chunk, as long as its logits take no more than that sum.

In fp16 the smallest number is 6e-8, and a softmax has many that are smaller. A gradient scaler's
factor comes too late for them. So both gradients are made times a power of two, as large as can
overflow nowhere, and the backward divides by it.
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

# A block has at most so many elements, and at most one of so many parts of the vocabulary.
_AT_ONCE, _PARTS = 2**24, 12
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
            weight twice, and reads and writes its gradient. By default 256; but for a weight in
            bf16 that is trained, more positions, up to twice ``width``, are one chunk, whose logits
            take no more than the sum of the weight's gradient in fp32, which one chunk needs not.

    Returns:
        0-d, float32. Its backward runs once, and is not differentiable again.

    Raises:
        IndexError: A label that is no class; on a GPU an assertion fails there.
        ValueError: A wrong shape, reduction or size of chunks.
    """
    _check(hidden, weight, labels, bias, reduction, chunk_size)
    size = chunk_size if chunk_size is not None else chunk_size_of(hidden, weight)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as of the linear layer, outside of what follows
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    labels = labels.flatten().long()  # first: -100 as a byte is 156
    counts = labels != ignore_index
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(labels.numel(), hidden.shape[-1]),
            weight,
            bias,
            labels.where(counts, 0).unsqueeze(1),
            counts.unsqueeze(1),
            _Needs.of(hidden, weight, bias, size),
        )
    if reduction == "sum":
        return loss
    num = counts.sum()
    # Of no position at all, as torch's: nan, with gradients of 0.
    return torch.where(num > 0, loss / num.clamp(min=1), torch.nan)


def chunk_size_of(hidden: Tensor, weight: Tensor) -> int:
    """Positions of a chunk of :func:`linear_cross_entropy`, unless chosen otherwise."""
    kind, num = hidden.device.type, hidden.shape[:-1].numel()
    is_autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_autocast else weight.dtype
    trains = weight.requires_grad and torch.is_grad_enabled()
    # Where logits of two bytes would take no more than a sum of four.
    is_less = num <= 2 * weight.shape[1]
    if dtype is torch.bfloat16 and trains and is_less:
        return max(num, 1)
    return CHUNK_SIZE


# In configs of Gemma 2, Cohere and Granite.
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def body_and_head(model: Any) -> tuple[nn.Module, nn.Module, nn.Linear] | None:
    """A language model of transformers and its two parts, where its loss needs no logits.

    Args:
        model: Of transformers, or of peft around one (LoRA and others).

    Returns:
        The model itself, without peft's around it; what computes the head's input, to be called
        inside :func:`call_with` of the model, which may be a unit; and the head as one reads it
        inside :func:`call_with`. ``None`` where logits are more than a linear layer of the body's
        output: adapters on the head, prompt learning, logits that are capped or scaled.
    """
    if hasattr(model, "peft_config"):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            return None
        model = model.get_base_model()
    if any(getattr(model.config, name, None) not in (None, 1.0) for name in _AFTER_THE_HEAD):
        return None
    head = model.get_output_embeddings()
    linear = getattr(head, "module", head)  # of FSDP1
    return (model, model.base_model, head) if isinstance(linear, nn.Linear) else None


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
    """Which gradients are made, in how large chunks of positions."""

    hidden: bool
    weight: bool
    bias: bool
    chunk_size: int

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int) -> _Needs:
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
        factor = None
        if hidden.dtype is torch.float16 and any(gradient is not None for gradient in gradients):
            factor = _factor(hidden, weight, counts, needs.chunk_size)
        loss = _sum_over_chunks(hidden, weight, bias, labels, counts, gradients, needs, factor)
        # After the memory of the chunks has been freed, as this is another copy.
        if of_weight is not None and weight.dtype is torch.bfloat16:  # fp16 waits for a scaler
            of_weight = of_weight.to(weight.dtype)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.gradients, ctx.factor = (of_hidden, of_weight, of_bias), factor
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
        by = of_loss if ctx.factor is None else of_loss / ctx.factor
        scaled = (None if g is None else g.mul_(by) for g in gradients)
        pairs = zip(scaled, ctx.dtypes, strict=True)
        return *(None if g is None else g.to(dtype) for g, dtype in pairs), None, None, None


def _sum_over_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counts: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    needs: _Needs,
    factor: Tensor | None,
) -> Tensor:
    """The sum of the losses.

    Its gradients, times ``factor`` if there is one, are written to hidden's, added to the others.
    """
    of_hidden, of_weight, of_bias = gradients
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    num, vocabulary = min(needs.chunk_size, len(hidden)), len(weight)
    width = max(1, min(_AT_ONCE // max(num, 1), vocabulary // _PARTS))
    blocks = list(_parts(vocabulary, width))
    # One memory for all chunks: fresh memory of this size costs page faults, and that of the chunk
    # before would still be alive.
    memory = hidden.new_empty(num, vocabulary)
    wide = torch.promote_types(memory.dtype, torch.float32)
    in_place = memory.dtype is wide
    in_wide = memory if in_place else memory.new_empty(num, width, dtype=wide)
    blocks_of_labels, indices = labels // width, labels % width
    weight.new_empty(vocabulary).index_select(0, labels[:, 0])  # fails where one is no class

    def exponentials(product: Tensor, top: Tensor) -> Tensor:
        block = product if in_place else in_wide[: len(product), : product.shape[1]].copy_(product)
        return block.sub_(top).exp_()

    for part in islice(_parts(len(hidden), needs.chunk_size), _most_chunks.get()):
        inputs, counts_here = hidden[part], counts[part]
        rows, index = torch.arange(len(inputs), device=hidden.device), indices[part, 0]
        logits = memory[: len(inputs)]
        if bias is None:
            torch.mm(inputs, weight.T, out=logits)
        else:
            torch.addmm(bias, inputs, weight.T, out=logits)
        of_label, sums = torch.zeros(2, len(inputs), 1, dtype=wide, device=hidden.device)
        top, tops = torch.full_like(sums, torch.finfo(wide).min), []
        for number, columns in enumerate(blocks):
            product = logits[:, columns]
            # Of a label elsewhere, something that is not used.
            found = product[rows, index.clamp(max=product.shape[1] - 1), None]
            of_label = torch.where(blocks_of_labels[part] == number, found.to(wide), of_label)
            before, top = top, torch.maximum(top, product.amax(1, keepdim=True))
            sums *= (before - top).exp()
            sums += exponentials(product, top).sum(1, keepdim=True)
            tops.append(top)
        # Not times 0: what is left out may not be finite.
        loss += torch.where(counts_here, sums.log() + (top - of_label), 0).sum()
        if all(gradient is None for gradient in gradients):
            continue
        for number, (columns, top_then) in enumerate(zip(blocks, tops, strict=True)):
            product = logits[:, columns]
            block = product if in_place else exponentials(product, top_then)
            block *= counts_here * (top_then - top).exp() / sums
            # Minus one-hot, in fp32: the label's is all but 1. Not by scatter_, which on a CPU
            # takes as much memory as the block.
            is_here = (blocks_of_labels[part] == number).logical_and_(counts_here)[:, 0]
            block[rows, index.clamp(max=block.shape[1] - 1)] -= is_here.to(wide)
            if factor is not None:
                block *= factor
            if of_bias is not None:
                of_bias[columns] += block.sum(0)
            if product.dtype is not wide:
                block = product.copy_(block)
            if of_weight is not None:
                _add_product(of_weight[columns], block.T, inputs)
        if of_hidden is not None:
            torch.mm(logits, weight, out=of_hidden[part])
    return loss


def _factor(hidden: Tensor, weight: Tensor, counts: Tensor, chunk_size: int) -> Tensor:
    """A power of two, times which no gradient of a chunk overflows, 0-d.

    Of a position the softmax minus one-hot has absolute values of 1 at most, and of 2 in sum.
    """
    parts = list(_parts(len(hidden), chunk_size))
    sums = [hidden[p].abs().where(counts[p], 0).sum(0, dtype=torch.float32).amax() for p in parts]
    largest = torch.stack([*torch.aminmax(weight)]).float().abs().amax()
    bound = torch.stack([*sums, 2 * largest, torch.ones_like(largest)]).amax()
    return torch.exp2(torch.log2(torch.finfo(torch.float16).max / 2 / bound).floor())


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _parts(num: int, size: int) -> Iterator[slice]:
    for first in range(0, num, size):
        yield slice(first, first + size)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


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
    if labels.is_floating_point() or labels.dtype is torch.bool:
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
