"""The cost of every action on a cluster: a profile, scaled to workers, batch, link and skew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nestpipe.schedule.action import Action
from nestpipe.schedule.options import DEFAULT, Options
from nestpipe.sim.clock import Cost
from nestpipe.sim.profile import Profile, StageCost
from nestpipe.sim.topology import AllToAll, Message, Topology

NOTHING = StageCost()


@dataclass(frozen=True)
class Cluster:
    """The cluster on which to simulate a schedule."""

    profile: Profile
    topology: Topology
    micro_batches: int
    batch: int
    """Samples per worker."""
    link: float = 1.0
    """Speed of links as a multiple of the profile's."""
    replicates: bool = False
    """Copies of a row get the gradients of all groups before they are updated (HSP)."""
    skew: float = 0.0
    """How much more than the mean the busiest owner looks up, sends and receives."""
    seed: int = 1

    @property
    def workers(self) -> int:
        return self.topology.workers

    @property
    def options(self) -> Options:
        profile = self.profile
        return replace(
            DEFAULT,
            buckets=profile.buckets,
            defer_weight_grads=profile.defer_weight_grads,
            early_prepare=False,
            replicates=self._between.members > 1,
        )

    @property
    def _between(self) -> AllToAll:
        """The exchange of `replicate`; of one member where there is none."""
        return self.topology.between_copies() if self.replicates else AllToAll(1, self.workers)

    def owned_rows(self) -> float:
        """Rows that an owner reads, updates and writes back in a step, as a multiple of those in one group of all workers.

        With HSP an owner has the rows of all groups: what fewer owners share is what all workers touch.  With 2D-SP it has
        those that its own group touches, of which fewer workers share fewer.
        """
        copies = self.workers / self.topology.group_size
        return copies if self.replicates else copies ** (1 - self.profile.network.sharing)

    def replica_mb(self, mb: float) -> float:
        """Of `mb` that each worker of a group needs: what an owner tells all owners of its rows' copies, each row once."""
        distinct = self.topology.group_size ** (self.profile.network.sharing - 1)
        return mb * distinct * (self._between.members - 1)

    def cost(self) -> Callable[[Action], Cost]:
        """A new function of costs, which draws the same random numbers every time."""
        rng = np.random.default_rng(self.seed)
        profile, network = self.profile, self.profile.network
        size = self.batch / profile.samples
        busiest = 1 + self.skew
        groups, between = self.topology.exchange().groups, self._between
        per_micro = {"embed", "compute", "grad", "accumulate", "replicate"}
        owned = self.owned_rows()
        rows = self._all2all(network.rows_mb * size * busiest / self.micro_batches)
        keys = self._all2all(network.keys_mb * size * busiest)
        told = between.takes(network, self.replica_mb(network.keys_mb * size * busiest) / self.link)
        copied = between.takes(
            network, self.replica_mb(network.rows_mb * size * busiest) / self.micro_batches / self.link
        )
        dense = self._all_reduce(network.dense_mb / profile.buckets)
        agreed = self._all_reduce(0.0)

        def cost(action: Action) -> Cost:
            stage = action.stage
            spent = profile.stages.get(stage, NOTHING)
            share = size / self.micro_batches if stage in per_micro else size
            uneven = busiest if stage in ("retrieve", "writeback", "update", "accumulate") else 1.0
            rows_here = owned if stage in ("retrieve", "writeback", "update") else 1.0
            host = spent.host * share * uneven * rows_here
            host += spent.per_micro if stage in per_micro else spent.per_micro * self.micro_batches
            device = (spent.device * rows_here + spent.per_worker * self.workers) * share * uneven
            device += spent.device_per_micro
            if stage == "compute":
                drawn = rng.standard_normal(self.workers) * profile.jitter if profile.jitter else 0.0
                return Cost(host, device * np.maximum(0.0, 1 + drawn), ahead=True)
            if stage in ("embed", "grad"):
                return Cost(host, device, rows.wire, rows.after, groups)
            if (
                stage == "route"
            ):  # owners tell each other their keys when they have those of their group: all wait for all
                everyone = 1 if between.members > 1 else groups
                return Cost(host, device, keys.wire + told.wire, keys.after + told.after, everyone)
            if stage == "replicate":
                return Cost(host, device, copied.wire, copied.after, between.members, across=True)
            if stage == "reduce":
                final = (
                    profile.buckets_final[action.micro]
                    if profile.buckets_final
                    else (action.micro + 1) / profile.buckets
                )
                return Cost(host, device, dense.wire, dense.after, 1, from_share=final)
            if stage == "agree":
                return Cost(host, device, agreed.wire, agreed.after, 1)
            return Cost(host, device)

        return cost

    def burst(self) -> float:
        """Milliseconds of wire time that an idle link passes at once."""
        network = self.profile.network
        return network.burst_mb / (network.mb_per_ms * network.share * self.link)

    def _all2all(self, mb: float) -> Message:
        return self.topology.takes(self.profile.network, mb / self.link)

    def _all_reduce(self, mb: float) -> Message:
        """A ring: every part goes around twice."""
        if self.workers == 1:
            return Message(0.0, 0.0)
        network, around = self.profile.network, 2 * (self.workers - 1) / self.workers
        wire = around * mb / (network.mb_per_ms * network.share * self.link)
        return Message(wire, network.message_ms)
