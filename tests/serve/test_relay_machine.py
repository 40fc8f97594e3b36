"""Random lives of an instance on a virtual clock: whatever happens, in whatever order, the promises of the cache hold."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fake_relay import FakeModel, a_history, full_scores
from nestpipe.config.serving import ServingConfig
from nestpipe.serve.cache.prefix import State
from nestpipe.serve.instance.relay import Relay
from nestpipe.serve.scheduler.jobs import Outcome, RankJob

SLOT = 64
USERS = st.sampled_from(["a", "b", "c", "d", ""])
EVENTS = st.integers(0, 60)


class Life(RuleBasedStateMachine):
    """Rankings, pre-inference, cancels, switches, failures and time, in any order."""

    @initialize(arena=st.integers(0, 24), dram=st.integers(0, 24), queue=st.integers(1, 8))
    def start(self, arena: int, dram: int, queue: int) -> None:
        self.now, self.fails, self.version = 0.0, 0, 1
        self.jobs: list[tuple[RankJob, Any, int]] = []
        self.ended: list[RankJob] = []
        config = ServingConfig(
            arena=arena * SLOT, dram=dram * SLOT, queue=queue, hold_seconds=0.5, rewarm_seconds=0.2, score_slice=4
        )
        self.relay = Relay(self.model(), config, lambda: self.now)

    def model(self) -> FakeModel:
        return FakeModel(str(self.version), called=self.called)

    def called(self, kind: str, size: int) -> None:
        self.now += {"block": 0.01, "open": 0.005, "score": 0.001}[kind]
        if self.fails:
            self.fails -= 1
            if self.fails == 0:
                raise OSError(5, "Input/output error")

    @rule(
        user=USERS, events=EVENTS, other=st.booleans(), m=st.integers(0, 9), within=st.sampled_from([-1, 0.03, 0.2, 5])
    )
    def rank(self, user: str, events: int, other: bool, m: int, within: float) -> None:
        history = self.history(user, events, other)
        now = 10**6 + events
        job = self.relay.rank(user, history, now, np.arange(m), self.now + within, self.ended.append)
        self.jobs.append((job, history, now))

    @rule(user=USERS, events=EVENTS, other=st.booleans(), due=st.sampled_from([0.0, 0.1]))
    def preinfer(self, user: str, events: int, other: bool, due: float) -> None:
        self.relay.preinfer(user, self.history(user, events, other), self.now + due)

    @rule(user=USERS)
    def cancel_preinfer(self, user: str) -> None:
        self.relay.cancel_preinfer(user)

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.jobs:
            self.relay.cancel(self.jobs[pick % len(self.jobs)][0])

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            before = self.now
            running = [job for job, _, _ in self.jobs if not job.over and job.started is None]
            self.relay.step()
            assert all(job.started is None or job.started < job.deadline for job in running)
            assert self.now - before <= 0.011, "a step is one block or one slice"

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(after=st.integers(1, 6))
    def fail(self, after: int) -> None:
        self.fails = after

    @rule()
    def switch(self) -> None:
        if self.relay.switch.next is None:
            self.version += 1
            self.relay.begin_switch(self.model(), lambda: None)

    @invariant()
    def tiers_are_bounded_and_add_up(self) -> None:
        if not hasattr(self, "relay"):
            return
        cache = self.relay.cache
        prefixes = cache.prefixes()
        for arena, slots in (
            (cache.arena, [slot for p in prefixes for slot in p.slots]),
            (cache.tier.arena, [slot for p in prefixes for slot in p.tier_slots]),
        ):
            assert len(set(slots)) == len(slots), "two prefixes have one slot"
            assert arena.slots - arena.free == len(slots), "a slot is lost"
            assert arena.used_bytes <= arena.slots * arena.slot_bytes
        assert all(p.blocks or p.pins for p in prefixes), "an empty prefix stayed"
        assert not any(p.state is State.STALE and not p.pins for p in prefixes)

    @invariant()
    def pins_have_owners(self) -> None:
        if hasattr(self, "relay"):
            rankings = sum(job.prefix is not None for job, _, _ in self.jobs)
            waiting = sum(not job.over for job in self.relay.scheduler._rewarm)
            assert self.relay.cache.pins == rankings + len(self.relay.holds) + waiting

    def teardown(self) -> None:
        """Everything ends: each request once, the same bits, no pin, one version."""
        if not hasattr(self, "relay"):
            return
        self.fails = 0
        while self.relay.step() or self.relay.wake_at is not None:
            self.now += 0.001
        assert len(self.ended) == len(self.jobs) == len({id(job) for job in self.ended})
        for job, history, now in self.jobs:
            if job.outcome is Outcome.DONE:
                expected = full_scores(FakeModel(job.model.version), history, now, job.candidates)
                assert job.scores is not None and job.scores.tobytes() == expected.tobytes(), job.path
        assert self.relay.cache.pins == 0 and len(self.relay.holds) == 0
        assert self.relay.switch.versions == [str(self.version)]
        assert all(p.key.version == str(self.version) for p in self.relay.cache.prefixes())
        assert self.relay.scheduler.waiting == 0

    def history(self, user: str, events: int, other: bool) -> Any:
        history = a_history(events, seed=sum(user.encode()))
        if other and events > 10:
            history.actions[10:] ^= 1
        return history


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
