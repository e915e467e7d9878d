"""Imported once by the server that ranks are forked from, so that a rank starts in a tenth of a
second.

A module that is missing or broken is left out: the rank that needs it imports it itself and shows
the error.
"""

import contextlib
import importlib

MODULES = (
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.profiler",
    "torch.testing",
    "torch.utils.checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
    "lightning.pytorch",
    "lightning_fsdp",
    "lightning_fsdp.core.fully_shard",
)

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
