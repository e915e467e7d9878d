"""A model that is sharded by torch's FSDP2 or this core, and batches for it."""

from torch.distributed import fsdp

import lightning_fsdp

SHARDERS = {"fsdp2": fsdp.fully_shard, "core": lightning_fsdp.fully_shard}


def shard(model, engine, **options):
    """As a script does: blocks, then the rest, in which tied weights meet."""
    fully_shard = SHARDERS[engine]
    for block in model.transformer.h if hasattr(model, "transformer") else model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def params(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]
