"""What every action of a list takes on a cluster: a profile, scaled to its workers, batch, link and skew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nestpipe.schedule.action import Action
from nestpipe.schedule.options import DEFAULT, Options
from nestpipe.sim.clock import Cost
from nestpipe.sim.profile import Profile, StageCost
from nestpipe.sim.topology import Message, Topology

NOTHING = StageCost()


@dataclass(frozen=True)
class Cluster:
    """What a schedule is simulated on."""

    profile: Profile
    topology: Topology
    micro_batches: int
    batch: int
    """Samples of one worker."""
    link: float = 1.0
    """Speed of links, as a multiple of the profile's."""
    skew: float = 0.0
    """How much more than the mean the busiest owner has to look up, send and receive."""
    seed: int = 1

    @property
    def workers(self) -> int:
        return self.topology.workers

    @property
    def options(self) -> Options:
        profile = self.profile
        return replace(
            DEFAULT, buckets=profile.buckets, defer_weight_grads=profile.defer_weight_grads, early_prepare=False
        )

    def cost(self) -> Callable[[Action], Cost]:
        """Drawn anew: the same numbers every time."""
        rng = np.random.default_rng(self.seed)
        profile, network = self.profile, self.profile.network
        size = self.batch / profile.samples
        busiest = 1 + self.skew
        groups = self.topology.exchange().groups
        per_micro = {"embed", "compute", "grad", "accumulate"}
        rows = self._all2all(network.rows_mb * size * busiest / self.micro_batches)
        keys = self._all2all(network.keys_mb * size * busiest)
        dense = self._all_reduce(network.dense_mb / profile.buckets)
        agreed = self._all_reduce(0.0)

        def cost(action: Action) -> Cost:
            stage = action.stage
            spent = profile.stages.get(stage, NOTHING)
            share = size / self.micro_batches if stage in per_micro else size
            uneven = busiest if stage in ("retrieve", "writeback", "update", "accumulate") else 1.0
            host = spent.host * share * uneven
            host += spent.per_micro if stage in per_micro else spent.per_micro * self.micro_batches
            device = (spent.device + spent.per_worker * self.workers) * share * uneven + spent.device_per_micro
            if stage == "compute":
                drawn = rng.standard_normal(self.workers) * profile.jitter if profile.jitter else 0.0
                return Cost(host, device * np.maximum(0.0, 1 + drawn), ahead=True)
            if stage in ("embed", "grad"):
                return Cost(host, device, rows.wire, rows.after, groups)
            if stage == "route":
                return Cost(host, device, keys.wire, keys.after, groups)
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
        """Milliseconds of wire time that an idle link lets through at once."""
        network = self.profile.network
        return network.burst_mb / (network.mb_per_ms * network.share * self.link)

    def _all2all(self, mb: float) -> Message:
        return self.topology.takes(self.profile.network, mb / self.link)

    def _all_reduce(self, mb: float) -> Message:
        """A ring: every worker sends its part on, twice around."""
        if self.workers == 1:
            return Message(0.0, 0.0)
        network, around = self.profile.network, 2 * (self.workers - 1) / self.workers
        wire = around * mb / (network.mb_per_ms * network.share * self.link)
        return Message(wire, network.message_ms)
