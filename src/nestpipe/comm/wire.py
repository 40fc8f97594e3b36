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
    rows, dense = Exchange(world, "network", traffic), Exchange(world, "dense", traffic)
    groups = [device.new_group(world.timeout) for _ in range(2)] if world.size > 1 else []
    if not all(groups) or not groups:
        return Wire(rows, dense, dense)
    watch = CollectiveWatch(world)
    of_rows, of_dense = (DeviceExchange(world, group, watch, traffic) for group in groups if group is not None)
    return Wire(of_rows, of_dense, dense, watch)
