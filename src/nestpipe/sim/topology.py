"""Topologies: who sends to whom in an All2All, and its cost."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.sim.profile import NetworkCost


@dataclass(frozen=True)
class Message:
    """The cost of an exchange in milliseconds."""

    wire: float
    """The link is busy."""
    after: float
    """Latency after that, whatever the size."""


@dataclass(frozen=True)
class AllToAll:
    """An All2All among `members` workers, in `groups` groups that do not wait for each other."""

    members: int
    groups: int

    def remote(self) -> float:
        """The share of evenly spread rows that other workers own."""
        return (self.members - 1) / self.members

    def takes(self, network: NetworkCost, mb: float) -> Message:
        """For `mb` from each worker to all others together."""
        peers = self.members - 1
        if not peers:
            return Message(0.0, 0.0)
        slower = 1 + network.congestion * peers
        wire = mb * slower / (network.mb_per_ms * network.share)
        return Message(wire, network.message_ms + network.peer_ms * peers)


@dataclass(frozen=True)
class Topology:
    """How `workers` do an All2All."""

    workers: int

    @property
    def group_size(self) -> int:
        """Workers that share one copy of the tables."""
        return self.workers

    def exchange(self) -> AllToAll:
        return AllToAll(self.workers, 1)

    def between_copies(self) -> AllToAll:
        """Among the owners of the same rows, one in every group, each on its own."""
        return AllToAll(self.workers // self.group_size, self.group_size)

    def takes(self, network: NetworkCost, mb: float) -> Message:
        """An All2All of rows or gradients; `mb` counts those that stay on the worker, too."""
        exchange = self.exchange()
        return exchange.takes(network, mb * exchange.remote())


class FullMesh(Topology):
    """Every worker sends to every other one."""


@dataclass(frozen=True)
class Grouped(Topology):
    """Replica groups: every group has all tables, divided among its workers, and All2All stays inside a group.

    How copies are kept equal is not the topology's: `replicate` is in the list of HSP.  What 2D-SP does counts as part of
    the exchange, as in the published figures.
    """

    groups: int = 4

    def exchange(self) -> AllToAll:
        return AllToAll(self.group_size, self.groups)

    @property
    def group_size(self) -> int:
        return self.workers // self.groups


@dataclass(frozen=True)
class Hierarchical(Topology):
    """Workers of a host first gather what goes to other hosts, `speed` times as fast; then hosts exchange it."""

    per_host: int = 8
    speed: float = 8.0

    def takes(self, network: NetworkCost, mb: float) -> Message:
        inside, between = AllToAll(self.per_host, 1), AllToAll(self.workers // self.per_host, 1)
        first = inside.takes(network, mb * inside.remote() / self.speed)
        then = between.takes(network, mb * between.remote())
        return Message(first.wire + then.wire, first.after + then.after)


FULL_MESH = "full-mesh"
KINDS = f"{FULL_MESH}, groups:G, hierarchical:K"


def parse(text: str, workers: int) -> Topology:
    """Parses `--topology`."""
    kind, _, number = text.partition(":")
    if text == FULL_MESH:
        return FullMesh(workers)
    if kind in ("groups", "hierarchical") and number.isascii() and number.isdigit() and int(number) > 0:
        parts = int(number)
        if workers % parts:
            raise ValueError(f"{workers} workers cannot be divided by the {parts} of {text!r}")
        return Grouped(workers, groups=parts) if kind == "groups" else Hierarchical(workers, per_host=parts)
    raise ValueError(f"--topology must be one of {KINDS}, not {text!r}")
