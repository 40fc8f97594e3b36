"""Relay-race inference of one instance: takes requests, and runs one step at a time.

No threads and no clock of its own: whoever owns it calls `step` again and again, on a wall clock or a virtual one.  Pre-inference
and rankings of a user advance the same prefix, so no block is computed twice, and a ranking that comes too early takes over
where pre-inference stands.  Whatever the path, scores are those of full inference, bit for bit, unless the tier behind the
arena rounds.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nestpipe.config.serving import ServingConfig
from nestpipe.errors import message_of
from nestpipe.infer.contract import History, RelayModel
from nestpipe.serve.cache.prefix import Prefix, PrefixKey
from nestpipe.serve.cache.prefix_cache import PrefixCache
from nestpipe.serve.instance.holds import Hold, Holds
from nestpipe.serve.instance.scratch import Scratch
from nestpipe.serve.instance.switch import Switch
from nestpipe.serve.scheduler.costs import Costs
from nestpipe.serve.scheduler.jobs import Outcome, Path, PrefixJob, RankJob
from nestpipe.serve.scheduler.scheduler import Scheduler

log = logging.getLogger("nestpipe.serve")

REFUSED_USERS = 4096
"""Users whose pre-inference was refused, remembered to tell the path of their rankings."""


@dataclass(frozen=True)
class Admission:
    """The answer to a pre-inference."""

    admitted: bool
    reason: str


class Relay:
    """Models, cache and scheduler of one instance.  One caller at a time."""

    def __init__(self, model: RelayModel, config: ServingConfig, clock: Callable[[], float]) -> None:
        self.config, self.clock = config, clock
        self.cache = PrefixCache(config.arena, config.dram, model.block, model.block_floats, config.dram_dtype)
        self.scheduler = Scheduler(Costs(config.score_slice))
        self.holds = Holds()
        self.switch = Switch(model)
        self.counts: Counter[str] = Counter()
        self._scratch = Scratch(-(-model.max_length // model.block), model.block_floats)
        self._refused: OrderedDict[str, None] = OrderedDict()

    @property
    def model(self) -> RelayModel:
        return self.switch.current

    # Requests

    def rank(
        self,
        user: str,
        history: History,
        now: int,
        candidates: np.ndarray,
        deadline: float,
        on_done: Callable[[RankJob], None],
        arrived: float | None = None,
    ) -> RankJob:
        """Queues a ranking; `on_done` is called once, maybe before this returns.  An empty user is nobody: nothing is kept."""
        at = self.clock()
        hold = self.holds.find(user)
        # A user pre-inferred under the version before ranks under it: every request sees one version, and its prefix is used.
        model = self.switch.model_of(hold.job.prefix.key.version) if hold else self.model
        windowed = model.window(history)
        job = RankJob(
            model,
            user,
            windowed,
            model.complete_blocks(windowed),
            now,
            candidates,
            at if arrived is None else arrived,
            deadline,
            on_done,
        )
        self.switch.enter(model.version)
        if at >= deadline:
            self._release_hold(user)
            self._end(job, Outcome.EXPIRED, "the deadline had passed when the request arrived")
            return job
        if model is self.model:
            self._release_hold(user)  # else its pin is what keeps the old version's prefix
        self._find_prefix(job)
        self._release_hold(user)
        ahead = self.scheduler.backlog(deadline)
        if self.scheduler.waiting >= self.config.queue or (
            ahead and at + ahead + self.scheduler.costs.left(job) > deadline
        ):
            job.retry_after = ahead
            self._end(job, Outcome.FULL, "more requests wait than can be ranked before this one's deadline")
            return job
        self.scheduler.add(job)
        return job

    def cancel(self, *jobs: RankJob) -> None:
        """Their clients have left: no further step of them runs."""
        for job in jobs:
            if not job.over:
                self._end(job, Outcome.CANCELLED, "the client has left")

    def preinfer(self, user: str, history: History, due: float) -> Admission:
        """Starts to compute a user's prefix, if that can help and there is room, and pins it for its ranking."""
        answer = self._preinfer(user, history, due)
        self.counts["admitted" if answer.admitted else "refused"] += 1
        self._refused.pop(user, None)
        if not answer.admitted and answer.reason != "short":
            self._refused[user] = None
            while len(self._refused) > REFUSED_USERS:
                self._refused.popitem(last=False)
        return answer

    def cancel_preinfer(self, user: str) -> bool:
        """Stops a user's pre-inference before its next block and gives its pin back; False if there is none."""
        hold = self.holds.find(user)
        if hold is None:
            return False
        if hold.job.missing:
            hold.job.prefix.cancelled = True
        self._release_hold(user)
        self.counts["cancelled"] += 1
        return True

    def _preinfer(self, user: str, history: History, due: float) -> Admission:
        model = self.model
        windowed = model.window(history)
        complete = model.complete_blocks(windowed)
        if not user:
            return Admission(False, "no user")
        if complete == 0:
            return Admission(False, "short")
        at = self.clock()
        self._release_hold(user)
        key = PrefixKey(model.version, user, windowed.start)
        existing = self.cache.find(key)
        if (existing is None or not existing.pins) and self.cache.promised() + complete > self.cache.arena.slots:
            return Admission(False, "arena full")
        if self.scheduler.ahead(due) + self.scheduler.backlog(due) > max(0.0, due - at) + self.config.hold_seconds:
            return Admission(False, "busy")
        prefix, shares = self.cache.claim(key, windowed, complete)
        if shares < complete:
            return Admission(False, "another history of this user is in use")
        self.cache.pin(prefix)
        job = PrefixJob(model, prefix, windowed, complete, due)
        self.switch.enter(model.version)
        self.holds.add(user, Hold(job, max(at, due) + self.config.hold_seconds))
        if job.missing <= 0:
            job.over = True
            return Admission(True, "ready")
        self.scheduler.add(job)
        return Admission(True, "joined" if existing is not None and existing.slots else "computing")

    def _find_prefix(self, job: RankJob) -> None:
        """Pins the user's prefix, and tells the path."""
        if job.user and job.complete and self.cache.arena.slots:
            key = PrefixKey(job.model.version, job.user, job.history.start)
            job.prefix, job.shares = self.cache.claim(key, job.history, job.complete)
            self.cache.pin(job.prefix)
            there = min(job.prefix.blocks, job.shares)
            if job.have == job.complete:
                job.path = Path.HIT
            elif there == job.complete:
                job.path = Path.DRAM
            elif there:
                job.path = Path.TAKEOVER
        if self._refused.pop(job.user, job) is None and job.path is Path.MISS:
            job.path = Path.REJECTED
        job.private = job.prefix is None

    # Steps

    def step(self) -> bool:
        """Runs one step; False if there is nothing to do."""
        for hold in self.holds.take_expired(self.clock()):
            self.counts["holds_expired"] += 1
            self._give_back(hold)
        at = self.clock()
        job, late = self.scheduler.take(at)
        for one in late:
            passed = at >= one.deadline
            self._end(
                one, Outcome.EXPIRED, "the deadline passed before compute" if passed else "no time left to rank it"
            )
        if job is None:
            self._switch_if_ready(at)
            return bool(late)
        try:
            if isinstance(job, PrefixJob):
                self._prefix_step(job)
            else:
                self._rank_step(job, at)
        except Exception as error:  # whatever a model does, the instance goes on
            self._failed(job, error)
        self._switch_if_ready(at)
        return True

    def _rank_step(self, job: RankJob, at: float) -> None:
        self.counts["started_late"] += at >= job.deadline  # never: the scheduler has dropped it
        if job.missing:
            if not self._add_block(job):
                self.scheduler.park(job)
                return
        else:
            self._score(job, at)
        if not job.over:
            self.scheduler.add(job)

    def _score(self, job: RankJob, at: float) -> None:
        if job.started is None:
            job.started = at
        kind = "slice"
        if job.ranking is None:
            kind = "open"
            job.scores = np.empty((len(job.candidates), len(job.model.actions)), np.float32)
            if len(job.candidates):
                job.ranking = job.model.open(job.history, job.now, self._blocks(job))
        assert job.scores is not None
        stop = min(len(job.candidates), job.scored + self.config.score_slice)
        if job.ranking is not None and stop > job.scored:
            job.scores[job.scored : stop] = job.ranking.score(job.candidates[job.scored : stop])
        job.scored = stop
        self._observe(job, kind, at)
        if stop == len(job.candidates):
            self._end(job, Outcome.DONE, "")

    def _blocks(self, job: RankJob) -> list[np.ndarray]:
        shared = [] if job.prefix is None else self.cache.blocks(job.prefix, job.have - job.own)
        return shared + [self._scratch.block(i) for i in range(job.own)]

    def _add_block(self, job: RankJob) -> bool:
        """Loads or computes the next block, into the prefix or else into scratch memory; False while another has that."""
        at = self.clock()
        if not job.private:
            assert job.prefix is not None
            if job.have < job.shares:
                job.started = at if job.started is None else job.started
                if self._extend(job, job.prefix, at):
                    return True
            job.private = True
            job.shares = job.have
        if not self._scratch.enter(job):
            return False
        job.started = at if job.started is None else job.started
        blocks = [*self._blocks(job), self._scratch.block(job.own)]
        job.model.encode_block(job.history, len(blocks) - 1, blocks)
        job.own += 1
        self._observe(job, "block", at)
        return True

    def _extend(self, job: RankJob | PrefixJob, prefix: Prefix, at: float) -> bool:
        """One more block of a prefix in the arena; False where there is no room."""
        if prefix.tier_slots:
            if not self.cache.load_block(prefix):
                return False
            self._observe(job, "load", at)
        else:
            if self.cache.add_block(prefix) is None:
                return False
            blocks = self.cache.blocks(prefix, len(prefix.slots))
            try:
                job.model.encode_block(job.history, len(blocks) - 1, blocks)
            except BaseException:
                self.cache.undo_block(prefix)
                raise
            self._observe(job, "block", at)
        if len(prefix.slots) >= prefix.wanted:
            self.scheduler.promote()
        return True

    def _prefix_step(self, job: PrefixJob) -> None:
        if job.missing > 0 and not self._extend(job, job.prefix, self.clock()):
            self.counts["no_room"] += 1
            self._end_ahead(job)
        elif job.missing > 0:
            self.scheduler.add(job)
        else:
            self._end_ahead(job)

    def _observe(self, job: RankJob | PrefixJob, kind: str, since: float) -> None:
        seconds = self.clock() - since
        self.counts[f"{kind}s"] += 1
        if kind != "load":
            self.scheduler.costs.observe(kind, seconds)
        if isinstance(job, RankJob):
            job.steps.append((kind, seconds))

    # Ends

    def _failed(self, job: RankJob | PrefixJob, error: Exception) -> None:
        self.counts["errors"] += 1
        said = message_of(error) or type(error).__name__
        log.warning("a step failed (version %s): %s: %s", job.model.version, type(error).__name__, said)
        if isinstance(job, RankJob):
            self._end(job, Outcome.FAILED, said)
        else:
            self._end_ahead(job)

    def _end(self, job: RankJob, outcome: Outcome, why: str) -> None:
        """The one way out of every ranking: pins and scratch memory are given back here."""
        assert not job.over
        job.outcome, job.why, job.ended = outcome, why, self.clock()
        job.ranking = None
        if job.prefix is not None:
            self.cache.unpin(job.prefix)
            job.prefix = None
        if self._scratch.leave(job):
            self.scheduler.unpark()
        self.counts[outcome.value] += 1
        if outcome is Outcome.DONE:
            self.counts[f"path_{job.path.value}"] += 1
        self._leave(job.model.version)
        job.on_done(job)

    def _end_ahead(self, job: PrefixJob) -> None:
        """Nothing is left to compute for a prefix.  A pre-inferred one stays pinned by its hold."""
        job.over = True
        if job.rewarm:
            self.cache.unpin(job.prefix)
            self._leave(job.model.version)

    def _release_hold(self, user: str) -> None:
        hold = self.holds.take(user)
        if hold is not None:
            self._give_back(hold)

    def _give_back(self, hold: Hold) -> None:
        hold.job.over = True
        self.cache.unpin(hold.job.prefix)
        self._leave(hold.job.model.version)

    def _leave(self, version: str) -> None:
        if self.switch.leave(version):
            self.cache.retire(version)

    # Versions

    def begin_switch(self, model: RelayModel, on_done: Callable[[], None]) -> None:
        """Computes prefixes of recent users under a new model when there is nothing better to do, then lets it take over."""
        assert model.block_floats == self.cache.block_floats
        at = self.clock()
        self.switch.prepare(model, at + self.config.rewarm_seconds, on_done)
        room, users = self.cache.arena.slots // 2, self.config.rewarm_users
        old = self.model.version
        for prefix in reversed([p for p in self.cache.prefixes() if p.key.version == old]):
            windowed = model.window(prefix.history)
            complete = model.complete_blocks(windowed)
            if users == 0 or complete > room:
                break
            if complete == 0:
                continue
            key = PrefixKey(model.version, prefix.key.user, windowed.start)
            made, shares = self.cache.claim(key, windowed, complete)
            if shares < complete:
                continue
            self.cache.pin(made)
            self.switch.enter(model.version)
            self.scheduler.add(PrefixJob(model, made, windowed, complete, at, rewarm=True))
            room, users = room - complete, users - 1

    def _switch_if_ready(self, at: float) -> None:
        if self.switch.next is None or (self.scheduler.rewarming and at < self.switch.until):
            return
        for job in self.scheduler.drop_rewarming():
            self._end_ahead(job)
        self.cache.retire(self.model.version)
        self.counts["switches"] += 1
        self.switch.take_over()

    @property
    def wake_at(self) -> float | None:
        """When there is something to do though no request comes."""
        times = [self.holds.next_end, self.switch.until if self.switch.next is not None else None]
        return min((time for time in times if time is not None), default=None)
