"""Training on a rank whose trace costs two collectives a step, not one for each tensor and rank.

What a trace records is put together of every rank's slices, as ``to_local()`` gives them. That
``full_tensor()`` gives the same is shown elsewhere, of models that are trained for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fsdp.core.tensors.sharded_tensor import ShardedTensor
from tests.support import parity, ranks
from tests.support.parity import Trace


def train_on_rank(model: nn.Module, *args: Any, **how: Any) -> Trace:
    """As that of ``tests/support/parity.py``."""
    return parity.train_on_rank(InOneExchange(model), *args, **how)  # type: ignore[arg-type]


class InOneExchange:
    """A model whose parameters and their gradients are whole when one asks for them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        named = dict(self._model.named_parameters())
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        values = wholes([*named.values(), *gradients.values()])
        wholes_of = dict(zip(gradients, values[len(named) :], strict=True))
        for name, value in zip(named, values, strict=False):
            value.grad = wholes_of.get(name)
            yield name, value


def wholes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A plain copy of each, in its original shape; collective if one is sharded."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensor)]
    joined = iter(_joined(sharded) if sharded else ())
    return [
        next(joined) if isinstance(tensor, ShardedTensor) else parity.whole(tensor)  # type: ignore[misc]
        for tensor in tensors
    ]


def _joined(tensors: Sequence[ShardedTensor]) -> Iterator[Tensor]:
    (group,) = {tensor.spec.communicator.group for tensor in tensors}
    slices = [tensor.to_local().detach().cpu().view(torch.uint8) for tensor in tensors]
    sizes = _rows(torch.tensor([piece.numel() for piece in slices], device="cpu"), group)
    mine = torch.zeros(int(sizes.sum(dim=1).max()), dtype=torch.uint8, device="cpu")
    torch.cat(slices, out=mine[: int(sizes[dist.get_rank(group)].sum())])
    rows = [
        row[: sum(lengths)].split(lengths)
        for row, lengths in zip(_rows(mine, group), sizes.tolist(), strict=True)
    ]
    for tensor, *pieces in zip(tensors, *rows, strict=True):
        layout, slot = tensor.spec.layout, tensor.spec.slot
        starts = [layout.slice_of(slot, rank).start for rank in range(len(pieces))]
        ordered = [pieces[rank] for rank in sorted(range(len(pieces)), key=starts.__getitem__)]
        whole = torch.cat(ordered).view(tensor.dtype).view(tensor.shape)
        yield whole.to(tensor.device)


def _rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What every rank has, on the host."""
    mine = mine.to(ranks.active_device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows).to("cpu")
