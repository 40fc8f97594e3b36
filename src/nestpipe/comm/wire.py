"""How rows and dense gradients travel: by gloo from the host's memory, or by a device's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nestpipe.comm.device_exchange import CollectiveWatch, DeviceExchange
from nestpipe.comm.errors import PeerLost
from nestpipe.comm.exchange import Exchange, Traffic
from nestpipe.comm.members import Members
from nestpipe.comm.topology import Topology, one_group
from nestpipe.comm.world import World
from nestpipe.device.backend import Device


@dataclass(frozen=True)
class Wire:
    """The exchanges of a pipeline.  What workers agree on always travels by gloo."""

    rows: Any
    """Inside the shard group."""
    replicas: Any
    """Between replicas."""
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


def open_wire(world: World, device: Device, traffic: Traffic, topology: Topology | None = None) -> Wire:
    """All workers call it together.  Without a topology they are one shard group."""
    topology = topology or one_group(world)
    shard, replicas = topology.shard, topology.replicas
    agree = Exchange(world, "dense", traffic)
    groups = _device_groups(world, topology, device)
    if groups is None:
        return Wire(Exchange(shard, "network", traffic), Exchange(replicas, "replica", traffic), agree, agree)
    watch = CollectiveWatch(world)

    def exchange(members: Members, lane: str) -> Any:
        if members.size == 1:
            return Exchange(members, lane, traffic)
        return DeviceExchange(members, lane, groups[lane], watch, traffic)

    def give_back() -> None:
        world.spare.setdefault((device.torch_device.type, shard.size), []).append(groups)

    rows, between, dense = exchange(shard, "network"), exchange(replicas, "replica"), exchange(world, "dense")
    return Wire(rows, between, dense, agree, watch, give_back)


def _device_groups(world: World, topology: Topology, device: Device) -> dict[str, dist.ProcessGroup] | None:
    """By lane: those of a pipeline that was closed, or new ones; None where gloo carries all of it."""
    if world.size == 1:
        return None
    spare = world.spare.get((device.torch_device.type, topology.shard.size))
    if spare:
        return spare.pop()
    made: dict[str, dist.ProcessGroup] = {}
    members = {"network": topology.shard.ranks, "dense": range(world.size), "replica": topology.replicas.ranks}
    for lane, ranks in members.items():
        if len(ranks) == 1:
            continue
        group = device.new_group(world.timeout, None if len(ranks) == world.size else ranks)
        if group is None:
            return None
        made[lane] = group
    return made
