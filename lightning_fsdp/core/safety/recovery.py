"""After an exception the engine is as between two steps: nothing in flight, nothing whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watcher

_log = logging.getLogger(__name__)


class Recovery(Watcher):
    """Ends what was running, so that the next call may begin."""

    def on_failure(self, units: Sequence[Unit], what: str, *, in_backward: bool) -> None:
        """Say so in the log; gradients of a backward that failed are of no use."""
        _log.warning(
            "%s ended by an exception%s; the next call starts from the sharded parameters",
            what,
            " (gradients of this step are dropped)" if in_backward else "",
        )
        for unit in units:
            abandon(unit, drops_gradients=in_backward)


def abandon(unit: Unit, *, drops_gradients: bool) -> None:
    """Wait for what a unit has in flight, and free what is whole."""
    unit.install_shards()
    unit.is_kept_for_graph = False
    for flat_param in unit.flat_params:
        try:
            flat_param.abandon(drops_gradients=drops_gradients)
        except RuntimeError as error:  # that a collective never ended may be what happened
            _log.warning("while recovering: %s", error)
