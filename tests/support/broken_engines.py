"""Engines that are broken in one way each, to see whether the comparison notices; given to it by
place, ``tests.support.broken_engines:Name``.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from lightning_fsdp.engines.scratch import ScratchEngine
from tests.support import faults


class OwnShardRepeated(ScratchEngine):
    """What it shows as whole is this rank's piece, over and over; training is sound."""

    @property
    def gradients(self):
        return _Repeated(super().gradients)

    @property
    def weights(self):
        return _Repeated(super().weights)


class NoDivision(ScratchEngine):
    """Reduced gradients are sums over the ranks."""

    def __init__(self, **options):
        super().__init__(**options)
        faults.inject("no_division_by_world_size")


class StaleGradient(ScratchEngine):
    """Every gradient is shown as it was when it was first looked at."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = {}

    @property
    def gradients(self):
        return _Stale(super().gradients, self.first)


class Trouble(ScratchEngine):
    """Fails in another way in each case; only stage 3 in bf16 is sound."""

    def shard(self, module, *, device, precision):
        kind = (
            2 if not self.plan.reshard_after_forward else 3,
            precision.param_dtype,
            precision.reduce_dtype,
        )
        is_second = dist.get_rank() == 1
        if kind == (2, None, None) and is_second:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == (2, torch.bfloat16, torch.bfloat16) and is_second:
            raise ValueError("only here")
        if kind == (2, torch.bfloat16, torch.float32) and is_second:
            time.sleep(600)
        if kind == (3, None, None):
            raise NotImplementedError("nowhere")
        super().shard(module, device=device, precision=precision)


class _Proxy:
    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)


class _Repeated(_Proxy):
    def __getitem__(self, name):
        return _RepeatedOne(self._real[name])

    def full(self, *args):
        shards = getattr(self._real, "shards", lambda: {n: w.shard for n, w in self._real.items()})
        pieces = shards(*args)
        for name, whole in self._real.full(*args):
            yield name, _repeat(pieces[name], whole)


class _RepeatedOne(_Proxy):
    def full(self, **options):
        return _repeat(self._real.shard, self._real.full(**options))


def _repeat(piece, whole):
    if piece.numel() == 0:
        return torch.zeros_like(whole)
    times = -(-whole.numel() // piece.numel())
    return piece.detach().view(-1).repeat(times)[: whole.numel()].view(whole.shape)


class _Stale(_Proxy):
    def __init__(self, real, first):
        super().__init__(real)
        self._first = first

    def __getitem__(self, name):
        return _StaleOne(self._real[name], self._first)

    def full(self, micro_batch=None):
        for name, whole in self._real.full(micro_batch):
            yield name, self._first.setdefault(("full", name), whole.clone())

    def shards(self, micro_batch=None):
        return {
            name: self._first.setdefault(("shard", name), shard.clone())
            for name, shard in self._real.shards(micro_batch).items()
        }

    def on_local(self, function):
        return self._real.on_local(self._late("on_local", function))

    def on_reduced(self, function):
        return self._real.on_reduced(self._late("on_reduced", function))

    def _late(self, kind, function):
        def call(name, gradient, micro_batch):
            function(name, self._first.setdefault((kind, name), gradient.clone()), micro_batch)

        return call


class _StaleOne(_Proxy):
    def __init__(self, real, first):
        super().__init__(real)
        self._first = first

    def full(self, **options):
        whole = self._real.full(**options)
        return self._first.setdefault(("full", self._real.name), whole.clone())

    def local(self):
        local = self._real.local()
        return self._first.setdefault(("local", self._real.name), local.clone())
