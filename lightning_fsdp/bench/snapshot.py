"""A snapshot of CUDA's memory: every allocation of a step, with its stack.

It records the last warm-up step: by then everything is compiled and the optimizer has its state,
and the timed steps after it are undisturbed. The first two it records as well, for a run that they
end: what does not fit is found out there.
"""

from __future__ import annotations

from pathlib import Path

from lightning_fsdp.callbacks.torch_internals import dump_memory_snapshot, record_memory_history

_FIRST_STEPS = (0, 1)  # the optimizer has its state from the end of the first one on


class Snapshot:
    """Records one step of a rank; where training fails in the first two, that one.

    Args:
        path: Of the snapshot, for https://pytorch.org/memory_viz.
        step: Optimizer step, from 0; ``None``: nothing is recorded.
    """

    def __init__(self, path: Path, step: int | None = None) -> None:
        self.path = path
        self.step = step
        self._recorded: int | None = None  # the step that is being recorded

    def begin(self, step: int) -> None:
        """A micro-batch begins; with the first one of its step, the record does."""
        is_wanted = self.step is not None and step in (*_FIRST_STEPS, self.step)
        if is_wanted and self._recorded is None:
            self._recorded = step
            record_memory_history(is_on=True)

    def end(self, *, has_failed: bool = False) -> None:
        """A step is over: write it, or drop one of the first, which came through.

        Args:
            has_failed: It did not: of one that ran out of memory, that is the picture to see.
        """
        if self._recorded is None:
            return
        if has_failed or self._recorded == self.step:
            dump_memory_snapshot(str(self.path))
        self._recorded = None
        record_memory_history(is_on=False)
