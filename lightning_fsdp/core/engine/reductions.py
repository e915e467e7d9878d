"""Reductions of gradients, from their start until they are in ``.grad``.

A reduction is a chain of stages (over the shards, over the replicas, to the host). Each stage
starts in the same order on all ranks: when the next reduction does, or at the backward's end.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fsdp.core.engine.flat_parameter import FlatParameter
from lightning_fsdp.core.engine.lifecycle import Gradients
from lightning_fsdp.core.engine.watcher import Watchers


class Reductions:
    """Those of one schedule that are in flight."""

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._in_flight: list[FlatParameter] = []  # the last started at the end

    def start(self, flat_params: Sequence[FlatParameter]) -> None:
        """Start those of flat parameters whose gradients are complete."""
        if not flat_params:
            return
        for flat_param in flat_params:
            for call in self._watchers.before_collective:
                call(f"reduce {flat_param.sent_dtype} gradients of", flat_param.name)
        self._advance()  # what they read is freed before more is started
        for flat_param in flat_params:
            if has_one := flat_param.reduce():
                for note in self._watchers.on_reduce:
                    note(flat_param, has_one)
        self._in_flight += flat_params

    def land(self) -> None:
        """Let all end: ``.grad`` holds what they gave."""
        for call in self._watchers.before_landing:
            call()
        landing, self._in_flight = self._in_flight, []
        advanced = landing
        while advanced:  # all are under way before one is waited for
            advanced = [flat_param for flat_param in advanced if flat_param.advance()]
        for flat_param in landing:
            flat_param.land()
        for call in self._watchers.on_landed:
            call()

    def _advance(self) -> None:
        """Let each go one stage on; after its last it lands."""
        for flat_param in self._in_flight:
            if not flat_param.advance():
                flat_param.land()
        self._in_flight = [f for f in self._in_flight if f.gradients is Gradients.REDUCING]
