"""Every private name of torch that checkpoints use, one each, with the reason.

Checked against torch 2.13. A name that goes away is to be replaced here, and nowhere else.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
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
