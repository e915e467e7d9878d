"""Imported once by the server that ranks are forked from, so that a rank starts in a tenth of a
second.

A module that is missing or broken is left out: the rank that needs it imports it itself and shows
the error.
"""

import contextlib
import gc
import importlib

MODULES = (
    "pytest",
    "torch",
    "torch._dynamo.testing",
    "torch._inductor.debug",
    "torch._inductor.pattern_matcher",  # which a first compilation imports, also by aot_eager
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.profiler.profiler",
    "torch.testing",
    "torch.utils.checkpoint",
    "transformers.models.gpt2.modeling_gpt2",
    "lightning.pytorch",
    "lightning_fsdp",
    "lightning_fsdp.core.fully_shard",
    "lightning_fsdp.strategies.fsdp1",
    "lightning_fsdp.strategies.fsdp2",
    "lightning_fsdp.strategies.scratch",
)

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# A collection would write into every object, and so copy the pages that ranks share.
gc.collect()
gc.freeze()
