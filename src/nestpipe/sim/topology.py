"""Who sends to whom in an All2All, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.sim.profile import NetworkCost


@dataclass(frozen=True)
class Message:
    """Milliseconds of an exchange."""

    wire: float
    """While which the link is busy."""
    after: float
    """And then, however little there is to carry."""


@dataclass(frozen=True)
class AllToAll:
    """An All2All among `members` workers, in `groups` groups that do not wait for each other."""

    members: int
    groups: int

    def remote(self) -> float:
        """Of rows that are anywhere with equal chance, the share that another worker has."""
        return (self.members - 1) / self.members

    def takes(self, network: NetworkCost, mb: float) -> Message:
        """For `mb` from each worker to the others together."""
        peers = self.members - 1
        if not peers:
            return Message(0.0, 0.0)
        slower = 1 + network.congestion * peers
        wire = mb * slower / (network.mb_per_ms * network.share)
        return Message(wire, network.message_ms + network.peer_ms * peers)


@dataclass(frozen=True)
class Topology:
    """How an All2All over `workers` is done."""

    workers: int

    def exchange(self) -> AllToAll:
        return AllToAll(self.workers, 1)

    def takes(self, network: NetworkCost, mb: float) -> Message:
        """An All2All of rows or gradients; `mb` as if all of it had to leave the worker."""
        exchange = self.exchange()
        return exchange.takes(network, mb * exchange.remote())


class FullMesh(Topology):
    """Every worker sends to every other one."""


@dataclass(frozen=True)
class Grouped(Topology):
    """2D sparse parallelism: tables are divided among the workers of a group, and every group has all tables.

    The sums between copies are counted as part of the exchange, as in the published figures.
    """

    groups: int = 4

    def exchange(self) -> AllToAll:
        return AllToAll(self.workers // self.groups, self.groups)


@dataclass(frozen=True)
class Hierarchical(Topology):
    """Workers of a host gather first what goes to another host, `speed` times as fast; then hosts exchange, link by link."""

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
    """As on the command line."""
    kind, _, number = text.partition(":")
    if text == FULL_MESH:
        return FullMesh(workers)
    if kind in ("groups", "hierarchical") and number.isascii() and number.isdigit() and int(number) > 0:
        parts = int(number)
        if workers % parts:
            raise ValueError(f"{workers} workers cannot be divided by the {parts} of {text!r}")
        return Grouped(workers, groups=parts) if kind == "groups" else Hierarchical(workers, per_host=parts)
    raise ValueError(f"--topology must be one of {KINDS}, not {text!r}")
