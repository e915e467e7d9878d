"""torch's writer of safetensors writes all boxes of a slice, as for a tensor that is cut by rows.

A safetensors file has one entry per name. ``HuggingFaceStorageWriter`` writes what a rank has into
one file, where the last box of a name would replace those before it, without an error. Here the
first box of each name goes to that file, the second one to another, and so on:

    shard-00002-model-00001-of-00001.safetensors     first boxes of what rank 1 has
    shard-200002-model-00001-of-00001.safetensors    its third ones

Its reader, and what makes whole tensors of such files, take any number of them.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from torch.futures import Future

_RANKS = 100_000
"""More ranks than there are: torch numbers the file of a rank by the rank, from 1 on."""


@functools.cache
def spread_over_files() -> None:
    """Let torch's writer do so from now on. It changes nothing where names have one box each."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    write = HuggingFaceStorageWriter.write_data

    @functools.wraps(write)
    def write_data(self: Any, plan: Any, planner: Any) -> Future[list[Any]]:
        files, num_boxes = defaultdict(list), Counter[str]()
        for item in plan.items:
            files[num_boxes[item.index.fqn]].append(item)
            num_boxes[item.index.fqn] += 1
        if len(files) <= 1:
            return write(self, plan, planner)
        if "shard_index" not in plan.storage_data:  # one file for all ranks
            raise ValueError(
                "HuggingFaceStorageWriter: expected save_distributed=True for sharded tensors, got "
                "False, which takes whole ones. Pass True; or save full_state_dict(module)."
            )
        results = []
        for number, items in files.items():
            data = {**plan.storage_data}
            data["shard_index"] += number * _RANKS
            results += write(self, replace(plan, items=items, storage_data=data), planner).wait()
        written = Future[list[Any]]()
        written.set_result(results)
        return written

    HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]
