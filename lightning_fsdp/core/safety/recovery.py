"""After an exception the engine is as between two steps: nothing in flight, nothing whole.

If it ended a backward inside a forward, the forward may go on, and its units stay whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lightning_fsdp.core.engine.unit import Unit
from lightning_fsdp.core.engine.watcher import Watcher

_log = logging.getLogger(__name__)


class Recovery(Watcher):
    """Ends what was running, so that the next call may begin."""

    def on_failure(self, units: Mapping[Unit, bool], *, in_backward: bool) -> None:
        """Log it, and abandon all units.

        As in plain torch, a backward that failed leaves incomplete gradients: what has landed stays
        in ``.grad``, and what waited to be reduced is dropped, as another rank may have sent it.
        """
        _log.warning(
            "a %s ended by an exception%s; the next call starts from the sharded parameters",
            "backward" if in_backward else "forward",
            " (its gradients are incomplete: call zero_grad())" if in_backward else "",
        )
        for unit, goes_on in units.items():
            abandon_unit(unit, drops_gradients=in_backward, stays_whole=goes_on)


def abandon_unit(unit: Unit, *, drops_gradients: bool, stays_whole: bool = False) -> None:
    """Wait for what a unit has in flight, and free its whole copy.

    Args:
        unit: The unit.
        drops_gradients: Whether gradients that wait to be reduced are dropped.
        stays_whole: Whether the copy is kept, as the unit computes in a forward that goes on.
    """
    if not stays_whole:
        unit.install_shards()
        unit.is_held = unit.is_kept_for_graph = False
    for flat_param in unit.flat_params:
        try:
            holder = None if stays_whole else unit.hold
            flat_param.abandon(holder, drops_gradients=drops_gradients)
        except RuntimeError as error:  # the collective that failed may be why this runs
            _log.warning("while recovering: %s", error)
