import gc

import torch
from torch import nn

from lightning_fsdp.callbacks.storages import Observer, nbytes_of, resting_tensors
from lightning_fsdp.core.torch_internals import all_gather_single
from tests.support.ranks import run_on_ranks

KIB = 1024


def floats(kib):
    return torch.zeros(kib * KIB // 4)


def test_the_peak_counts_what_is_alive_together_and_each_storage_once():
    present = floats(64)
    observer = Observer([present, present.view(2, -1)])
    observer.start()
    first = floats(16) + 1  # two of 16 alive at once
    del first
    second = present[:10].clone()
    observation = observer.stop()
    assert observation.peak_bytes == (64 + 16 + 16) * KIB
    del second
    gc.collect()
    assert observer.live_bytes == 64 * KIB


def test_a_storage_emptied_by_resize_counts_as_freed():
    buffer = floats(32)
    observer = Observer([buffer])
    observer.start()
    buffer.untyped_storage().resize_(0)
    other = floats(8) * 2
    observation = observer.stop()
    assert observation.peak_bytes == 32 * KIB, "the emptied buffer and 16 later never add up"
    assert observer.live_bytes == 8 * KIB
    del other


def test_what_autograd_alone_keeps_is_counted():
    weight = torch.zeros(256, 256, requires_grad=True)  # 256 KiB
    inputs = torch.zeros(64, 256)  # 64 KiB
    observer = Observer([weight, inputs])
    observer.start()
    hidden = (inputs @ weight).exp()  # exp keeps its own result
    loss = hidden.sum()
    del hidden
    live = observer.live_bytes
    observer.stop()
    assert live == (256 + 64 + 64) * KIB + 4
    del loss


def test_resting_tensors_of_adamw_are_three_times_the_parameters():
    module = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight = 64 * 64 * 4
    step_count = 4
    assert nbytes_of(resting_tensors(module, [optimizer])) == 3 * weight + step_count


def _count_all_reduce(rank, world_size):
    tensor = torch.ones(100)
    observer = Observer([tensor])
    observer.start()
    torch.distributed.all_reduce(tensor)
    all_gather_single(torch.empty(100 * world_size), tensor)
    observation = observer.stop()
    return dict(observation.calls), observation.payload_bytes


def test_collectives_are_counted_with_what_this_rank_passes_to_them():
    for calls, payload_bytes in run_on_ranks(_count_all_reduce, 2):
        assert calls == {"all_reduce": 1, "all_gather": 1}
        assert payload_bytes == 2 * 400
