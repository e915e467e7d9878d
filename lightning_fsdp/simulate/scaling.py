"""From the numbers of ranks of a study to a network for each, and a program among its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_fsdp.simulate.network import Network


def networks_of(world_sizes: Sequence[int], *, num_hosts: int, **links: Any) -> list[Network]:
    """One network per number of ranks, smallest first; a host has as many ranks in each.

    Args:
        world_sizes: Numbers of ranks.
        num_hosts: Of the largest one; smaller numbers fill their hosts, or are all on one.
        **links: Of :class:`Network`.

    Raises:
        ValueError: A number that no network has, ranks that do not fill their hosts, or one rank.
    """
    if min(world_sizes) < 2:
        raise ValueError(
            f"expected 2 or more ranks, got {min(world_sizes)}. One process is measured anyway."
        )
    largest = Network(world_size=max(world_sizes), num_hosts=num_hosts, **links)
    per_host = largest.world_size // num_hosts
    for n in world_sizes:
        if n > per_host and n % per_host:
            raise ValueError(
                f"expected hosts of {per_host} ranks, as many as the largest number has on each of "
                f"its {num_hosts}, got {n} ranks, which leave one of theirs half empty."
            )
    return [
        replace(largest, world_size=n, num_hosts=-(-n // per_host))
        for n in sorted(set(world_sizes))
    ]


def launcher(network: Network, device_type: str) -> tuple[str, ...]:
    """What stands after ``python -m``, and before a module that runs as the first of these ranks.

    Args:
        network: The ranks and their links.
        device_type: Where the module computes: ``cpu`` or ``cuda``.
    """
    description = json.dumps(asdict(network))
    return "lightning_fsdp.simulate.among", description, device_type
