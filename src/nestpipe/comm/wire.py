"""How rows and dense gradients travel: by gloo from the host's memory, or by a device's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nestpipe.comm.device_exchange import CollectiveWatch, DeviceExchange
from nestpipe.comm.errors import PeerLost
from nestpipe.comm.exchange import Exchange, Traffic
from nestpipe.comm.world import World
from nestpipe.device.backend import Device


@dataclass(frozen=True)
class Wire:
    """The exchanges of a pipeline.  What workers agree on always travels by gloo."""

    rows: Any
    dense: Any
    agree: Exchange
    watch: CollectiveWatch | None = None

    def on_lost(self, fail: Callable[[PeerLost], None]) -> None:
        """`fail` is called with the first collective of a device that does not end."""
        if self.watch is not None:
            self.watch.on_lost = fail

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()


def open_wire(world: World, device: Device, traffic: Traffic) -> Wire:
    """All workers call it together."""
    agree = Exchange(world, "dense", traffic)
    group = device.new_group(world.timeout) if world.size > 1 else None
    if group is None:
        return Wire(Exchange(world, "network", traffic), agree, agree)
    of_dense = device.new_group(world.timeout)
    assert of_dense is not None
    watch = CollectiveWatch(world)
    rows, dense = (DeviceExchange(world, one, watch, traffic) for one in (group, of_dense))
    return Wire(rows, dense, agree, watch)
