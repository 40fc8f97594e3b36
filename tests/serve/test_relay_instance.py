"""Relay inference on a virtual clock: paths, bits, pins, deadlines, versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fake_relay import FakeModel, a_history, full_scores
from nestpipe.config.serving import ServingConfig
from nestpipe.serve.instance.relay import Relay
from nestpipe.serve.scheduler.jobs import Outcome, Path, RankJob

COSTS = {"block": 0.010, "open": 0.005, "score": 0.001}
BLOCK = 64  # bytes of a slot of the fake model


class Bench:
    """A relay whose model advances a virtual clock."""

    def __init__(self, arena: int = 64, dram: int = 0, model: FakeModel | None = None, **config: Any) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []
        self.model = model or FakeModel()
        self.model.called = self.called
        settings = ServingConfig(arena=arena * BLOCK, dram=dram * BLOCK, **config)
        self.relay = Relay(self.model, settings, lambda: self.now)
        self.ended: list[RankJob] = []

    def called(self, kind: str, size: int) -> None:
        self.calls.append((kind, size))
        self.now += COSTS[kind]

    def rank(self, user: str, history: Any, m: int = 5, within: float = 10.0, now: int = 99_999) -> RankJob:
        return self.relay.rank(user, history, now, np.arange(m), self.now + within, self.ended.append)

    def run(self) -> None:
        while self.relay.step():
            pass

    def ranked(self, user: str, history: Any, **options: Any) -> RankJob:
        job = self.rank(user, history, **options)
        self.run()
        return job

    def check(self, job: RankJob, history: Any, now: int = 99_999) -> None:
        model = FakeModel(job.model.version)
        assert job.outcome is Outcome.DONE, job.why
        expected = full_scores(model, history, now, job.candidates)
        assert job.scores is not None and job.scores.tobytes() == expected.tobytes()


def test_every_path_has_the_bits_of_full_inference() -> None:
    """Promise: hit, takeover, dram, miss and scratch give the same scores, bit for bit."""
    bench = Bench(arena=8, dram=64)
    history = a_history(30, seed=1)
    for user, path in (("a", Path.MISS), ("a", Path.HIT), ("b", Path.MISS), ("a", Path.DRAM)):
        job = bench.ranked(user, history)
        assert job.path is path
        bench.check(job, history)
    longer = a_history(32, seed=1)
    job = bench.ranked("b", a_history(10, seed=1))  # fewer events: the first blocks of what is there
    bench.check(job, a_history(10, seed=1))
    bench.relay.preinfer("c", longer, due=bench.now + 1)
    bench.relay.step()
    job = bench.ranked("c", longer)
    assert job.path is Path.TAKEOVER
    bench.check(job, longer)
    for arena in (0, 1, 3):
        small = Bench(arena=arena)
        job = small.ranked("a", longer)
        bench.check(job, longer)
        assert small.relay.cache.pins == 0


def test_no_block_is_computed_twice() -> None:
    """Promise: pre-inference and rankings of one user share their work, whoever computes a block."""
    bench = Bench()
    history = a_history(30)
    bench.relay.preinfer("a", history, due=1.0)
    bench.relay.step()
    first, second = bench.rank("a", history), bench.rank("a", history)
    bench.run()
    assert [size for kind, size in bench.calls if kind == "block"] == list(range(7))
    bench.check(first, history)
    bench.check(second, history)


def test_a_returning_user_pays_for_new_events_only() -> None:
    """Promise: an extension computes the blocks that the new events completed."""
    bench = Bench()
    bench.ranked("a", a_history(20))
    bench.calls.clear()
    job = bench.ranked("a", a_history(29))
    assert [size for kind, size in bench.calls if kind == "block"] == [4, 5, 6]
    assert job.path is Path.TAKEOVER
    bench.check(job, a_history(29))


def test_another_history_of_a_user_never_gets_wrong_blocks() -> None:
    """Promise: blocks hold up to the first difference, also in actions, times and the event after a block."""
    for changed in ("items", "actions", "times"):
        for at in (0, 3, 4, 7, 8, 15, 16, 28, 29):
            bench = Bench()
            history = a_history(30)
            bench.ranked("a", history)
            other = a_history(30)
            getattr(other, changed)[at:] += 1
            pinned = bench.rank("a", history)  # pins the first one while the other ranks
            job = bench.rank("a", other)
            bench.run()
            bench.check(job, other)
            bench.check(pinned, history)
            bench.check(bench.ranked("a", other), other)
            assert bench.relay.cache.pins == 0


def test_the_order_of_work() -> None:
    """Promise: ready rankings before takeovers before pre-inference; an urgent one waits for one step."""
    bench = Bench()
    bench.ranked("ready", a_history(30))
    bench.calls.clear()
    bench.relay.preinfer("ahead", a_history(30, seed=2), due=1.0)
    bench.rank("late", a_history(30, seed=3))
    bench.relay.step()
    assert bench.calls == [("block", 0)]  # the ranking's, not the pre-inference's
    ready = bench.rank("ready", a_history(30))
    bench.relay.step()
    assert ready.over and bench.calls[1:] == [("open", 30), ("score", 5)]
    bench.run()
    blocks = [size for kind, size in bench.calls if kind == "block"]
    assert blocks == list(range(7)) * 2  # first the takeover as a whole, then the pre-inference


def test_deadlines() -> None:
    """Promise: nothing starts a step after its deadline; a deadline in the past is answered at once."""
    bench = Bench()
    past = bench.rank("a", a_history(30), within=-1.0)
    assert past.outcome is Outcome.EXPIRED and bench.ended == [past] and not bench.calls
    bench.ranked("warm", a_history(30))
    blocker, waits = bench.rank("b", a_history(30, 4), within=0.08), bench.rank("c", a_history(30, 5), within=0.081)
    bench.calls.clear()
    bench.run()
    assert waits.outcome is Outcome.FULL and waits.retry_after > 0
    assert blocker.outcome is Outcome.DONE
    expires = bench.rank("d", a_history(30, 6), within=0.035)
    bench.run()
    assert expires.outcome is Outcome.EXPIRED and expires.started is not None
    assert bench.relay.cache.pins == 0
    again = bench.ranked("d", a_history(30, 6))
    assert again.path is Path.TAKEOVER  # what was computed is not lost
    bench.check(again, a_history(30, 6))


def test_a_stall_does_not_refuse_everything_for_ever() -> None:
    """Promise: after steps that took far too long, the instance learns anew that it is quick."""
    bench = Bench()
    for _ in range(40):
        bench.relay.scheduler.costs.observe("block", 9.0)
        bench.relay.scheduler.costs.observe("open", 9.0)
    done = 0
    for i in range(60):
        jobs = [bench.rank(f"{i}{k}", a_history(20, seed=k), within=0.5) for k in range(2)]
        bench.run()
        done += sum(job.outcome is Outcome.DONE for job in jobs)
    assert done > 60


def test_very_many_candidates_let_others_go_first() -> None:
    """Promise: candidates are scored in slices, and a more urgent ranking waits for one slice."""
    bench = Bench(score_slice=10)
    bench.ranked("b", a_history(30, seed=2))
    many = bench.rank("a", a_history(3), m=1000, within=50)
    bench.relay.step()
    bench.relay.step()
    quick = bench.rank("b", a_history(30, seed=2), within=1)
    bench.relay.step()
    assert quick.over and not many.over
    bench.run()
    bench.check(many, a_history(3))


def test_cancel_stops_before_the_next_block() -> None:
    """Promise: neither a cancelled pre-inference nor a ranking whose client left computes another block, and pins go."""
    bench = Bench()
    bench.relay.preinfer("a", a_history(30), due=1.0)
    bench.relay.step()
    assert bench.relay.cancel_preinfer("a") and not bench.relay.cancel_preinfer("a")
    job = bench.rank("b", a_history(30, 1))
    bench.relay.step()
    bench.relay.cancel(job)
    calls = len(bench.calls)
    bench.run()
    assert len(bench.calls) == calls == 2
    assert bench.relay.cache.pins == 0 and job.outcome is Outcome.CANCELLED


def test_a_ranking_that_never_comes_unpins() -> None:
    """Promise: a hold ends by itself."""
    bench = Bench(hold_seconds=2.0)
    assert bench.relay.preinfer("a", a_history(30), due=1.0).admitted
    bench.run()
    assert bench.relay.cache.pins == 1 and bench.relay.wake_at == 3.0
    bench.now = 3.0
    bench.run()
    assert bench.relay.cache.pins == 0 and len(bench.relay.holds) == 0
    assert bench.ranked("a", a_history(30)).path is Path.HIT  # it is still there


def test_admission() -> None:
    """Promise: pre-inference that has no room or no use is refused with a reason, and its ranking says rejected."""
    bench = Bench(arena=10)
    assert bench.relay.preinfer("a", a_history(30), 1.0).reason == "computing"
    assert bench.relay.preinfer("b", a_history(30, 1), 1.0).reason == "arena full"
    assert bench.relay.preinfer("c", a_history(3), 1.0).reason == "short"
    assert bench.relay.preinfer("", a_history(30), 1.0).reason == "no user"
    bench.run()
    assert bench.relay.preinfer("a", a_history(30), 1.0).reason == "ready"
    job = bench.ranked("b", a_history(30, 1))
    assert job.path is Path.REJECTED
    bench.check(job, a_history(30, 1))
    assert bench.relay.cache.pins == 1


def test_a_failing_model_costs_one_request() -> None:
    """Promise: an error in a block or in a score ends its job, gives everything back, and no half block stays."""
    bench = Bench()
    history = a_history(30)

    def breaking(where: str, at: int) -> Callable[[str, int], None]:
        def broken(kind: str, size: int) -> None:
            if (kind, size) == (where, at):
                raise OSError(5, "Input/output error")

        return broken

    for where, at in (("block", 3), ("open", 30), ("score", 5)):
        bench.model.called = breaking(where, at)
        job = bench.ranked("a", history)
        assert job.outcome is Outcome.FAILED and "Input/output error" in job.why
        assert bench.relay.cache.pins == 0
        bench.relay.preinfer("a", history, 1.0)
        bench.run()
        bench.relay.cancel_preinfer("a")
        bench.model.called = bench.called
        bench.check(bench.ranked("a", history), history)
        for prefix in bench.relay.cache.prefixes():
            bench.relay.cache.drop(prefix)


def test_versions() -> None:
    """Promise: a switch re-warms recent users, a request sees one version, and the old one goes with its last request."""
    bench = Bench()
    history = a_history(30)
    bench.ranked("recent", history)
    bench.relay.preinfer("pair", a_history(30, 1), due=bench.now + 1)
    bench.run()
    new = FakeModel("2", called=bench.called)
    switched: list[float] = []
    begun = bench.rank("x", a_history(30, 2))
    bench.relay.begin_switch(new, lambda: switched.append(bench.now))
    assert bench.relay.model.version == "1"
    bench.run()
    assert switched and bench.relay.model.version == "2" and begun.model.version == "1"
    bench.check(begun, a_history(30, 2))
    assert bench.relay.switch.versions == ["2", "1"]
    pair = bench.ranked("pair", a_history(30, 1))
    assert pair.path is Path.HIT and pair.model.version == "1"
    bench.check(pair, a_history(30, 1))
    assert bench.relay.switch.versions == ["2"]
    recent = bench.ranked("recent", history)
    assert recent.path is Path.HIT and recent.model.version == "2"
    bench.check(recent, history)
    assert {prefix.key.version for prefix in bench.relay.cache.prefixes()} == {"2"}


def test_a_switch_does_not_wait_for_ever() -> None:
    """Promise: under full load re-warming never runs, and the new version takes over all the same."""
    bench = Bench(rewarm_seconds=1.0)
    bench.ranked("recent", a_history(30))
    bench.relay.begin_switch(FakeModel("2", called=bench.called), lambda: None)
    for i in range(100):
        bench.rank(f"{i}", a_history(30, seed=i))
        bench.relay.step()
        bench.relay.step()
        if bench.relay.model.version == "2":
            break
    assert bench.relay.model.version == "2" and bench.now < 1.2
    bench.run()
    assert bench.relay.cache.pins == 0 and bench.relay.switch.versions == ["2"]


@pytest.mark.parametrize(("dtype", "most"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_a_rounded_tier_changes_little(dtype: Any, most: float) -> None:
    """Promise: float16 and bfloat16 take half the bytes, and give back nearly the same numbers."""
    bench = Bench(arena=8, dram=64, dram_dtype=dtype)
    history = a_history(30, seed=1)
    bench.ranked("a", history)
    kept = [block.copy() for block in bench.relay.cache.blocks(bench.relay.cache.prefixes()[0], 7)]
    bench.ranked("b", a_history(30, seed=2))
    assert bench.ranked("a", history).path is Path.DRAM
    prefix = bench.relay.cache.prefixes()[-1]
    change = max(np.abs(a - b).max() for a, b in zip(kept, bench.relay.cache.blocks(prefix, 7)))
    assert 0 < change < most
