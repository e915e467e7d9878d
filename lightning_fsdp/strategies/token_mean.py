"""The mean over all tokens of an optimizer step, where ``training_step`` says how many there are.

Without it a step's gradient is the mean over ranks and micro-batches of their own means: a token of
a short sequence counts for more than one of a long sequence. With ``n`` tokens in a micro-batch
and ``N`` in the whole step, on ``W`` ranks:

=========  ==========================================================================
weigh      before a backward: the loss, a mean over ``n``, times ``n / unit``
finish     after the last one: this rank's slices of the gradients times ``unit * W / N``
=========  ==========================================================================

The gradients are final when ``on_after_backward`` of the last micro-batch is called, before they
are unscaled, clipped or stepped with. Weights stay near 1 for bf16 and fp16: ``unit`` is what
``N / W`` would be if all micro-batches were like the step's first ones. It is a power of two, by
which multiplying is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fsdp.config import CPUOffloadPolicy
from lightning_fsdp.core.engine.communicator import Pending
from lightning_fsdp.core.engine.home import Home
from lightning_fsdp.core.engine.structures import tensors_in
from lightning_fsdp.core.host_memory import OffloadedHome
from lightning_fsdp.engines.base import Engine
from lightning_fsdp.engines.rank_grid import all_gather_objects

NUM_TOKENS = "num_tokens"
"""The key of ``training_step``'s dictionary that is read by itself."""

_IGNORED = -100  # what torch's cross_entropy leaves out
_NUM_WATCHED = 16  # micro-batches whose labels are counted: on an accelerator the host waits for it

_Labels = list[tuple[int, int]]
"""Of each int64 tensor of a batch: how many elements are not -100, and how many there are."""


class TokenMean:
    """Of one fit.

    Args:
        engine: Whose gradients are scaled.
        device: Of the loss, and of the process group.
        key: Of ``training_step``'s dictionary or else of the batch; ``None``: ``num_tokens`` of the
            former, where it is there.

    Attributes:
        loss: The mean over the tokens of the last optimizer step, 0-d fp32, equal on every rank;
            ``None`` before there is one.
        weight: What the last backward's mean loss was multiplied by, 0-d; ``None``: by nothing.
        factor: What the step's gradients were multiplied by since they were reduced, 0-d.
    """

    def __init__(self, engine: Engine, device: torch.device, key: str | None) -> None:
        self._engine = engine
        self._device = device
        self._looks_at_once = device.type == "cpu"
        self._key = key
        self.loss: Tensor | None = None
        self.weight: Tensor | None = None
        self.factor = torch.ones((), dtype=torch.float64, device=device)
        self._is_weighed: bool | None = None  # not known before the first micro-batch
        self._problem: str | None = None  # of this rank, in a step that not all have heard of yet
        self._num_wrong = torch.zeros_like(self.factor)  # numbers of this rank in this step
        # Over all ranks, in the last step that is over. It is copied to the host meanwhile: to read
        # it on a device would be to wait for all that is queued there.
        self._num_problems: Pending | None = None
        on_host = self._looks_at_once
        self._home = Home(device) if on_host else OffloadedHome(device, CPUOffloadPolicy())
        self._tokens: Tensor | None = None  # of the coming backward
        self._unit = torch.ones((), dtype=torch.float64, device=device)
        self._earlier: dict[str, Tensor] = {}  # gradients that were there when the step began
        self._labels: list[_Labels] | None = None  # of this rank's micro-batches, until warned
        self._sums: Tensor | None = None  # tokens, and tokens times loss, of this rank in this step

    def begin(self) -> None:
        """The first micro-batch of an optimizer step comes.

        Nothing stays of one that was left before its last: gradients were cleared as well.
        """
        self._sums = self._tokens = None
        self._num_wrong = torch.zeros_like(self._num_wrong)
        self._earlier.clear()

    def note(self, output: Any, batch: Any, *, num_micro_batches: int) -> None:
        """Take from a micro-batch how many tokens its loss is the mean of. Collective, once a fit.

        Args:
            output: What ``training_step`` returned.
            batch: What it was given.
            num_micro_batches: Of an optimizer step.

        Raises:
            ValueError: There is no number where one is expected, or one where none is; of the
                first micro-batch on every rank, and later by :meth:`raise_problems`.
        """
        if output is None:
            return  # no backward follows
        self._tokens, problem = None, None
        try:
            self._tokens = self._find(output, batch)
        except ValueError as error:
            problem = str(error)
        is_weighed = self._tokens is not None
        if self._is_weighed is None:
            self._agree(problem, batch, num_micro_batches)
        elif problem is None and is_weighed != self._is_weighed:
            had, has = ("a number", "none") if self._is_weighed else ("none", "one")
            problem = (
                f"{self._key or NUM_TOKENS}: expected {had}, as of the first micro-batch, got "
                f"{has}. Return it for every micro-batch on every rank, or for none."
            )
        elif self._labels is not None:
            self._labels.append(_count_labels(batch))
            has_warned = _warn_of_labels("Micro-batches of rank 0 have", self._labels)
            if has_warned or len(self._labels) == _NUM_WATCHED:
                self._labels = None
        if problem is not None and self._is_weighed:
            # Not raised here, by this rank alone: others would wait for it.
            self._problem, self._tokens = problem, torch.zeros_like(self._unit)
        elif problem is not None:
            raise ValueError(problem)

    def weigh(self, loss: Tensor, num_micro_batches: int) -> Tensor:
        """The loss to take gradients of.

        Args:
            loss: 0-d, a mean over tokens, divided by the number of micro-batches already.
            num_micro_batches: By which it was divided.
        """
        if self._tokens is None:
            return loss
        tokens, self._tokens = self._tokens, None
        # A mean over no token is NaN; so would be its gradients, times zero.
        loss = torch.where(tokens > 0, loss, loss.nan_to_num(0.0, 0.0, 0.0))
        if self._sums is None:
            self._put_aside()
            per_rank = _all_gathered(tokens).mean() * num_micro_batches
            self._unit = torch.where(per_rank > 0, _power_of_two(per_rank), self._unit)
        mean = loss.detach().double() * num_micro_batches
        sums = torch.stack([tokens, tokens * mean])
        self._sums = sums if self._sums is None else self._sums + sums
        self.weight, self.factor = tokens / self._unit, torch.ones_like(tokens)
        return loss * (self.weight * num_micro_batches).to(loss.dtype)

    def finish(self) -> None:
        """After an optimizer step's last backward: make the gradients those of the mean.

        Collective; nothing happens where no loss was weighed.

        Raises:
            ValueError: As :meth:`raise_problems`: on CPU of this step, elsewhere of the one before,
                for which the host need not wait.
        """
        if self._sums is None:
            return
        self.raise_problems()
        num_problems = self._num_wrong + float(self._problem is not None)
        every = _all_gathered(torch.stack([*self._sums, num_problems]))
        num_tokens, loss, num_problems_of_all = every.sum(0).unbind()
        self._num_problems = self._home.to_host(num_problems_of_all)
        self._sums, self._num_wrong = None, torch.zeros_like(num_problems)
        if self._looks_at_once:
            self.raise_problems()
        has_any = num_tokens > 0
        per_rank = num_tokens / len(every)
        self.factor = torch.where(has_any, self._unit / per_rank, 0.0)
        self._engine.scale_gradients(self.factor)
        for name, shard in self._engine.gradients.shards().items() if self._earlier else ():
            if name in self._earlier:
                shard.add_(self._earlier[name])
        self._earlier.clear()
        self.loss = torch.where(has_any, loss / num_tokens, 0.0).float()

    def raise_problems(self) -> None:
        """Raise what was wrong with a number since this was called before. Collective.

        Raises:
            ValueError: A number was missing on a rank, or was none; on every rank.
        """
        num_problems, self._num_problems = self._num_problems, None
        if num_problems is not None and num_problems.wait() > 0:
            _raise_first(all_gather_objects(self._problem))
            raise ValueError(
                f"{self._key or NUM_TOKENS}: expected numbers of tokens, got a negative, NaN or "
                "infinite one."
            )

    def _put_aside(self) -> None:
        # There are some where an overridden optimizer_zero_grad adds up steps. They are finished.
        for name, shard in self._engine.gradients.shards().items():
            self._earlier[name] = shard.clone()
            shard.zero_()

    def _find(self, output: Any, batch: Any) -> Tensor | None:
        if self._key is None:
            value = output.get(NUM_TOKENS) if isinstance(output, Mapping) else None
            return None if value is None else self._checked_sum(value)
        for place in (output, batch):
            if isinstance(place, Mapping) and self._key in place:
                return self._checked_sum(place[self._key])
        known = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"weigh_by={self._key!r}: expected a key of training_step's dictionary or of the "
            f"batch, got neither (the batch: {known})."
        )

    def _checked_sum(self, value: Any) -> Tensor:
        """The sum of a number or tensor, 0-d fp64."""
        key = self._key or NUM_TOKENS
        is_number = isinstance(value, (Real, Tensor)) and not isinstance(value, bool)
        if not is_number:
            raise ValueError(
                f"{key}: expected a number of tokens or a tensor of such numbers, got {value!r}."
            )
        is_tensor = isinstance(value, Tensor)
        given = value.detach() if is_tensor else torch.as_tensor(value, device="cpu")
        tokens = given.sum(dtype=torch.float64)
        is_right = (given >= 0).all() & tokens.isfinite()
        tokens, is_right = self._on_device(tokens), self._on_device(is_right)
        # Looking at a number on another device would wait for it: once, at the beginning.
        if (self._looks_at_once or self._is_weighed is None) and not is_right:
            least = float(given.min())
            raise ValueError(
                f"{key}: expected numbers of tokens, got {least}. Of labels, give "
                f"(labels != {_IGNORED}).sum()."
            )
        self._num_wrong += ~is_right
        return torch.where(is_right, tokens, 0.0)

    def _on_device(self, value: Tensor) -> Tensor:
        """``value``, 0-d, where losses are; for one of the host a copy would wait there."""
        if value.device.type != "cpu":
            return value.to(self._device)
        return torch.full((), value.item(), dtype=value.dtype, device=self._device)

    def _agree(self, problem: str | None, batch: Any, num_micro_batches: int) -> None:
        """See that all ranks weigh, or none.

        Raises:
            ValueError: On every rank, where one has a problem or they differ.
        """
        has_number = self._tokens is not None
        labels = [] if has_number else _count_labels(batch)
        every = all_gather_objects((problem, has_number, labels))
        _raise_first([theirs for theirs, _, _ in every])
        having = [rank for rank, (_, has_number, _) in enumerate(every) if has_number]
        if 0 < len(having) < len(every):
            raise ValueError(
                f"{self._key or NUM_TOKENS}: expected it on every rank or on none, got it on ranks "
                f"{having} of {len(every)}."
            )
        self._is_weighed = bool(having)
        if not having and not _warn_of_labels("Ranks have", [theirs for _, _, theirs in every]):
            self._labels = [labels] if len(every) * num_micro_batches > 1 else None


def _raise_first(problems: list[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ValueError(f"rank {rank}: {problem}")


def _all_gathered(mine: Tensor) -> Tensor:
    """Stacked in rank order: an all-reduce need not give every rank the same bits. Collective."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every)


def _power_of_two(number: Tensor) -> Tensor:
    return torch.exp2(torch.log2(number).round())


def _count_labels(batch: Any) -> _Labels:
    return [
        (int((tensor != _IGNORED).sum()), tensor.numel())
        for tensor in tensors_in(batch)
        if tensor.dtype == torch.int64 and tensor.layout == torch.strided and not tensor.is_nested
    ]


def _warn_of_labels(who: str, batches: list[_Labels]) -> bool:
    """Whether there was a reason: the labels are the first that one of the batches leaves out."""
    for same in zip(*batches, strict=False):
        counts = [count for count, _ in same]
        if any(count < numel for count, numel in same):
            break
    else:
        return False
    if min(counts) == max(counts):
        return False
    rank_zero_warn(
        f"{who} {min(counts)} to {max(counts)} labels that are not {_IGNORED} in a micro-batch, "
        "and each micro-batch's mean loss counts alike: a token in one weighs "
        f"{max(counts) / max(min(counts), 1):.1f} times one in another. Return "
        '{"loss": loss, "num_tokens": number of labels that count} from training_step for the '
        "mean over all tokens."
    )
    return True
