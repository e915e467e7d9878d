"""What a collective costs on a network that is not there: arithmetic, and its assumptions in words.

Every rank has a link of its own to its neighbours. In a ring of ``W`` ranks the tensor travels in
``W`` equal parts, and every rank passes one part on in each of ``W - 1`` steps:

==================================  =============  ===============================
collective of ``n`` bytes as whole  steps          bytes that each rank sends
==================================  =============  ===============================
all-gather, reduce-scatter          ``W - 1``      ``n (W - 1) / W``
all-to-all (a message to each)      ``W - 1``      ``n (W - 1) / W``
all-reduce                          ``2 (W - 1)``  ``2 n (W - 1) / W``
broadcast (a pipelined tree)        ``log2 W``     ``n``
send (to one rank)                  1              ``n``
==================================  =============  ===============================

    time = steps * latency + sent bytes / bandwidth

On several hosts a ring is as fast as its slowest link. Each rank has a link out of its host, and a
ring of neighbours uses that of one rank of each host; or a host has one line, which is as fast as
these links together, and its ranks share it:

    rings of             links of their own        a shared line
    all ranks            one link                  the whole line
    a rank of each host  one link                  its share: as many such rings run at a time
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Network:
    """The ranks and the links between them.

    Attributes:
        world_size: Ranks of the whole job.
        bandwidth_gb_s: Of a rank's link in one direction, in 10^9 bytes per second.
        latency_us: Of one step, in microseconds.
        num_hosts: Neighbouring ranks share a host, as many on each.
        host_bandwidth_gb_s: Of a link that leaves a host; ``None``: as within one.
        shares_line: Whether these links of a host are one line, whose bandwidth is their sum.
        host_share: Part of a transfer's time for which it also occupies a core of this process: 0
            where the network moves data by itself, up to 1 where the processor does, as gloo. The
            copies into this process's memory count towards it, and are made in any case.

    Raises:
        ValueError: A number that no network has.
    """

    world_size: int
    bandwidth_gb_s: float
    latency_us: float
    num_hosts: int = 1
    host_bandwidth_gb_s: float | None = None
    host_share: float = 0.0
    shares_line: bool = False

    def __post_init__(self) -> None:
        slowest_gb_s = self.slowest_gb_s(self.world_size)
        num_hosts, latency_us = self.num_hosts, self.latency_us
        fills_hosts = num_hosts >= 1 and self.world_size % num_hosts == 0
        for is_right, what, expected, got in (
            (self.world_size >= 1, "world size", "1 or more ranks", self.world_size),
            (self.bandwidth_gb_s > 0, "bandwidth", "more than 0 GB/s", self.bandwidth_gb_s),
            (slowest_gb_s > 0, "bandwidth between hosts", "more than 0 GB/s", slowest_gb_s),
            (0 <= latency_us < math.inf, "latency", "0 us or more", latency_us),
            (0 <= self.host_share <= 1, "host share", "0 to 1", self.host_share),
            (fills_hosts, "hosts", f"a divisor of the {self.world_size} ranks", num_hosts),
        ):
            if not is_right:
                more = " Every host has the same number of ranks." if what == "hosts" else ""
                raise ValueError(f"{what}: expected {expected}, got {got}.{more}")

    def per_host(self, ranks: Sequence[int]) -> int:
        """How many of these ranks are on one host, at most."""
        size = max(self.world_size // max(self.num_hosts, 1), 1)
        return max(Counter(rank // size for rank in ranks).values(), default=0)

    def slowest_gb_s(self, group_size: int, per_host: int | None = None) -> float:
        """Of the links in a ring: the slowest sets the pace.

        Args:
            group_size: Ranks of the ring.
            per_host: Of these, on each host; ``None``: neighbouring ranks.
        """
        per_host = self.per_host(range(group_size)) if per_host is None else per_host
        if per_host >= group_size or self.host_bandwidth_gb_s is None:
            return self.bandwidth_gb_s
        share = per_host if self.shares_line else 1
        return min(self.bandwidth_gb_s, share * self.host_bandwidth_gb_s)

    def cost(self, kind: str, nbytes: int, group_size: int, per_host: int | None = None) -> Cost:
        """Of one collective.

        Args:
            kind: A collective, as in the table of this file; or ``barrier``.
            nbytes: Of the whole tensor: an all-gather's output, a reduce-scatter's input.
            group_size: Ranks that take part.
            per_host: Of these, on each host; ``None``: neighbouring ranks.
        """
        steps, sent_bytes = group_size - 1, nbytes * (group_size - 1) // group_size
        per_host = self.per_host(range(group_size)) if per_host is None else per_host
        bytes_per_s = self.slowest_gb_s(group_size, per_host) * 1e9
        if kind == "all_reduce":
            steps, sent_bytes = 2 * steps, 2 * sent_bytes
        elif kind in ("broadcast", "barrier", "send"):
            steps = math.ceil(math.log2(group_size))
            sent_bytes = nbytes if group_size > 1 else 0
        elif kind == "recv":  # is the other rank's send
            steps = sent_bytes = 0
        seconds = sent_bytes / bytes_per_s
        if kind == "all_to_all" and self.host_bandwidth_gb_s is not None:
            # A message to each rank, over the sender's link or its share of the line.
            leaving = nbytes * (group_size - per_host) // group_size
            seconds = max(
                (sent_bytes - leaving) / (self.bandwidth_gb_s * 1e9),
                leaving / (self.host_bandwidth_gb_s * 1e9),
            )
        duration_s = steps * self.latency_us * 1e-6 + seconds
        return Cost(sent_bytes, duration_s)

    def assumptions_of_links(self) -> list[str]:
        """What a reader of a figure has to know of the network, a sentence each."""
        links = f"{self.bandwidth_gb_s:g} GB/s per rank and direction, {self.latency_us:g} us"
        if self.num_hosts > 1 and self.host_bandwidth_gb_s is not None:
            links += (
                f"; {self.world_size // self.num_hosts} ranks per host, "
                f"{self.host_bandwidth_gb_s:g} GB/s per rank out of a host"
                f"{' over a line that they share' if self.shares_line else ''}"
            )
        ring = (
            "Collectives are rings of neighbouring ranks: an all-gather or reduce-scatter takes "
            "W - 1 steps in which a rank sends (W - 1)/W of the whole, an all-reduce twice that. "
            "Broadcasts and barriers are trees of log2 W steps. "
            "Time = steps x latency + sent bytes / bandwidth of the slowest link between them."
        )
        order = (
            "A rank's collectives go one after another, in the order in which they were started; "
            "those within hosts beside those that leave them. Nothing else is "
            "on the network; what engines agree on between hosts costs nothing."
        )
        return [f"Links: {links}.", ring, order]

    def assumptions(self, device_type: str = "cpu") -> list[str]:
        """What a reader of a simulation's figure has to know, a sentence each.

        Args:
            device_type: Where rank 0 computes: ``cpu`` or ``cuda``.
        """
        overlap = (
            "What overlaps is what overlaps on CPU: FSDP1 and FSDP2 prefetch on CUDA streams, and "
            "wait for most of their collectives here at once."
        )
        others = (
            "Every rank computes as long as rank 0, whose computation is real: there are no "
            "stragglers. The others are taken to hold what rank 0 holds, so losses mean nothing."
        )
        copies = (
            f"A transfer occupies the processor for {self.host_share:.0%} of its time, or for as "
            "long as the copies into rank 0's memory take, which are real."
        )
        if device_type == "cuda":
            overlap = (
                "Streams overlap as they do with NCCL, whose kernels take more of the device from "
                "what they overlap with than one that copies and spins."
            )
            copies = "The copies into rank 0's memory are real, and count as part of the transfer."
        return [*self.assumptions_of_links(), overlap, others, copies]


@dataclass(frozen=True)
class Cost:
    """What one collective takes.

    Attributes:
        sent_bytes: By each rank.
        duration_s: From its start to its end, in seconds.
    """

    sent_bytes: int
    duration_s: float


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
