"""The ledger of storages, for tensors that have one without memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fsdp.callbacks.storages import Ledger, sent_by
from lightning_fsdp.plan import torch_internals


class FakeLedger(Ledger):  # type: ignore[no-untyped-call]
    """Counts fake tensors' storages; what collectives send belongs to *local gradients*.

    (What a gather sends is known as *gathered* by then: who was told first stays.)
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not all(torch_internals.is_plain_or_fake(cls) for cls in types):
            return NotImplemented  # a subclass first; its own operations come back here
        if torch_internals.asks_for_device(func):
            return func(*args, **kwargs)
        _, sent = sent_by(func, args)
        if sent:
            self.tell("local gradients", sent)
        return self.observe(func, args, kwargs)

    @override
    def counts(self, tensor: Tensor) -> bool:
        return torch_internals.is_plain_or_fake(type(tensor))
