"""Runs a module as the first of many ranks, of which the others are simulated.

::

    python -m lightning_fsdp.simulate.among NETWORK cpu recipes.train fit ...

``NETWORK`` is a :class:`Network` as JSON, what follows is where the model
computes. The group is there before the module asks for one.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from lightning_fsdp.simulate.groups import simulated
from lightning_fsdp.simulate.network import Network


def launcher(network: Network, device_type: str) -> tuple[str, ...]:
    """What stands after ``python -m``, and before a module that runs as the first of these ranks.

    Args:
        network: The ranks and their links.
        device_type: Where the module computes: ``cpu`` or ``cuda``.
    """
    return "lightning_fsdp.simulate.among", json.dumps(asdict(network)), device_type


def main() -> None:
    """Run it."""
    _, description, device_type, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    # For Lightning: somebody else started all processes, and this is the first.
    os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": "0"}
    with simulated(Network(**json.loads(description)), device_type):
        _simulate_every_group()
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _simulate_every_group() -> None:
    """Lightning opens groups of gloo beside the default one; nobody else would come."""
    new_group = dist.new_group

    def new_simulated_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": dist.get_backend()})

    dist.new_group = new_simulated_group


if __name__ == "__main__":
    main()
