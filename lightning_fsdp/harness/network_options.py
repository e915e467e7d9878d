"""A network that is modelled, as options: commands that model one take and refuse the same."""

from __future__ import annotations

import argparse
from typing import Any

from lightning_fsdp.harness.command_line import CommandParser, at_least, not_negative, positive

OPTIONS: dict[str, dict[str, Any]] = {
    "--bandwidth": {
        "type": positive,
        "default": 10.0,
        "help": "gigabytes per second of a rank's link",
    },
    "--latency": {
        "type": not_negative,
        "default": 10.0,
        "help": "microseconds that each message takes besides",
    },
    "--hosts": {"type": at_least(1), "default": 1, "help": "hosts that the ranks are spread over"},
    "--host-bandwidth": {
        "type": positive,
        "help": "gigabytes per second of a rank's link out of its host (default: as within one)",
    },
    "--shared-line": {
        "action": "store_true",
        "help": "one line per host, as fast as its ranks' links together, is shared by them",
    },
}
"""What ``add_argument`` takes, by option."""


def refuse_halves(parser: CommandParser, args: argparse.Namespace) -> None:
    """End the process where an option says nothing without another one, and name both."""
    if args.host_bandwidth is not None and args.hosts < 2:
        parser.error("--host-bandwidth: expected --hosts of 2 or more with it")
    if args.shared_line and args.host_bandwidth is None:
        parser.error("--shared-line: expected --host-bandwidth with it")


def links_of(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the fields of :class:`~lightning_fsdp.simulate.network.Network`."""
    return {
        "bandwidth_gb_s": args.bandwidth,
        "latency_us": args.latency,
        "num_hosts": args.hosts,
        "host_bandwidth_gb_s": args.host_bandwidth,
        "shares_line": args.shared_line,
    }
