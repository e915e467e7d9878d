"""Every private name of torch that checkpoints use, one each, with the reason.

Checked against torch 2.13. A name that goes away is to be replaced here, and nowhere else.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

# Where in which file a slice lies; a part of torch's format.
StorageInfo = _StorageInfo

# The last part of the name under which a state dict has what ``get_extra_state`` returned.
EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX

# What a ``.metadata`` file of torch's is pickled from, by module. The names of dtypes, which are
# pickled as ``torch.<name>``, are in it; whatever is not must not be looked up.
METADATA_NAMES: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset(
        {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    ),
}


class _LaterStorage:
    """What ``torch.save`` asks of the memory of a tensor, which it writes after all else.

    It asks where a storage is; of one that is not on the host it takes ``cpu()``, when it comes to
    write it. (``skip_data`` would leave places for the bytes, with wrong checksums.)
    """

    device = torch.device("meta")

    def __init__(self, num_bytes: int, make: Callable[[], Tensor]) -> None:
        self._num_bytes = num_bytes
        self._make = make
        self._cdata = id(self)

    def nbytes(self) -> int:
        return self._num_bytes

    def cpu(self) -> torch.UntypedStorage:
        whole = self._make().contiguous()
        storage = whole.untyped_storage()
        return storage if storage.nbytes() == self._num_bytes else whole.clone().untyped_storage()


def reduce_and_make_later(
    shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], Tensor]
) -> Any:
    """What ``torch.save`` pickles of a tensor on the host whose values are made as it writes them.

    Args:
        shape: Of the tensor.
        dtype: Likewise. One that ``torch.save`` writes without a class of storage is made at once.
        make: The tensor.
    """
    if dtype not in torch.storage._dtype_to_storage_type_map():
        return make().__reduce_ex__(2)  # type: ignore[no-untyped-call]
    storage: Any = torch.empty(0, dtype=dtype, device="cpu")
    storage = storage._typed_storage()
    storage._untyped_storage = _LaterStorage(math.prod(shape) * dtype.itemsize, make)
    storage._fake_device = "cpu"  # where ``torch.load`` is told that it was
    stride = torch.empty(shape, device="meta").stride()
    arguments: Any = (storage, 0, tuple(shape), stride, False, OrderedDict())
    return torch._utils._rebuild_tensor_v2, arguments


def default_store() -> Store:
    """Where the ranks of the default process group have found each other. No public accessor."""
    return _get_default_store()
