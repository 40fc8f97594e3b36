"""How rows and dense gradients travel: by gloo from the host's memory, or by a device's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

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
    give_back: Callable[[], None] = lambda: None
    """Lets the next pipeline have the groups of the device."""

    def on_lost(self, fail: Callable[[PeerLost], None]) -> None:
        """`fail` is called with the first collective of a device that does not end."""
        if self.watch is not None:
            self.watch.on_lost = fail

    def behind(self, error: BaseException) -> BaseException:
        """The lost worker behind an error, if there is one, or the error itself."""
        return error if self.watch is None else self.watch.behind(error)

    def close(self) -> None:
        """Groups in which a worker was lost are not used again."""
        if self.watch is not None:
            self.watch.close()
            if not self.watch.lost:
                self.give_back()


def open_wire(world: World, device: Device, traffic: Traffic) -> Wire:
    """All workers call it together."""
    agree = Exchange(world, "dense", traffic)
    groups = _device_groups(world, device)
    if groups is None:
        return Wire(Exchange(world, "network", traffic), agree, agree)
    watch = CollectiveWatch(world)
    rows, dense = (DeviceExchange(world, one, watch, traffic) for one in groups)
    return Wire(rows, dense, agree, watch, lambda: world.spare.setdefault(device.torch_device.type, []).append(groups))


def _device_groups(world: World, device: Device) -> list[dist.ProcessGroup] | None:
    """For rows and for dense gradients: those of a pipeline that was closed, or new ones; None where gloo carries both."""
    if world.size == 1:
        return None
    spare = world.spare.get(device.torch_device.type)
    if spare:
        return spare.pop()
    first = device.new_group(world.timeout)
    second = None if first is None else device.new_group(world.timeout)
    return None if first is None or second is None else [first, second]
