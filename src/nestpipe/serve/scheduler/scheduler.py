"""The order of work: ready rankings, rankings that complete their prefix, pre-inference, re-warming.

Rankings go by deadline, pre-inference by when it is due.  One step of a job at a time: a step is a block, or an opened
ranking with a slice of its candidates, so whatever is more urgent waits for one step at most.  Work whose deadline has
passed never starts another step, and work that cannot make it does not start while others wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator

from nestpipe.serve.scheduler.costs import Costs
from nestpipe.serve.scheduler.jobs import PrefixJob, RankJob

Ranked = list[tuple[float, int, RankJob]]


class Scheduler:
    """Jobs that wait.  A job that is over is skipped, wherever it stands."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._order = itertools.count()
        self._ready: Ranked = []
        self._takeovers: Ranked = []
        self._parked: list[RankJob] = []
        self._ahead: list[tuple[float, int, PrefixJob]] = []
        self._rewarm: deque[PrefixJob] = deque()

    def add(self, job: RankJob | PrefixJob) -> None:
        """Queues a job, or the next step of one."""
        if isinstance(job, PrefixJob):
            if job.rewarm:
                self._rewarm.appendleft(job) if job.prefix.slots else self._rewarm.append(job)
            else:
                heapq.heappush(self._ahead, (job.due, next(self._order), job))
        else:
            queue = self._takeovers if job.missing else self._ready
            heapq.heappush(queue, (job.deadline, next(self._order), job))

    def park(self, job: RankJob) -> None:
        """Queues a ranking that cannot go on before `unpark`."""
        self._parked.append(job)

    def unpark(self) -> None:
        parked, self._parked = self._parked, []
        for job in parked:
            if not job.over:
                self.add(job)

    def promote(self) -> None:
        """Rankings whose prefix has been completed by others become ready."""
        complete = [entry for entry in self._takeovers if not entry[2].missing]
        if complete:
            self._takeovers = [entry for entry in self._takeovers if entry[2].missing]
            heapq.heapify(self._takeovers)
            for entry in complete:
                heapq.heappush(self._ready, entry)

    def take(self, now: float) -> tuple[RankJob | PrefixJob | None, list[RankJob]]:
        """The job whose step is next, no longer queued, and the rankings that are dropped because they are too late."""
        late: list[RankJob] = []
        for queue in (self._ready, self._takeovers):
            while queue:
                job = heapq.heappop(queue)[2]
                if job.over:
                    continue
                if not self._too_late(job, now):
                    return job, late
                late.append(job)
        while self._ahead:
            ahead = heapq.heappop(self._ahead)[2]
            if not ahead.over:
                return ahead, late
        while self._rewarm:
            rewarm = self._rewarm.popleft()
            if not rewarm.over:
                return rewarm, late
        return None, late

    def _too_late(self, job: RankJob, now: float) -> bool:
        if now >= job.deadline:
            return True
        # The last one waiting always starts: what steps cost would otherwise never be learnt anew after a stall.
        waiting = bool(self._ready or self._takeovers)
        return waiting and job.started is None and now + self.costs.left(job) > job.deadline

    def backlog(self, deadline: float) -> float:
        """Seconds of ranking work that goes before a job with this deadline."""
        return sum(self.costs.left(job) for job in self._rankings() if job.deadline <= deadline)

    def ahead(self, due: float) -> float:
        """Seconds of pre-inference that goes before what is due then."""
        return sum(self.costs.of_blocks(job.missing) for at, _, job in self._ahead if at <= due and not job.over)

    @property
    def waiting(self) -> int:
        """Rankings in the queue."""
        return sum(1 for _ in self._rankings())

    def _rankings(self) -> Iterator[RankJob]:
        queued = (entry[2] for queue in (self._ready, self._takeovers) for entry in queue)
        return (job for job in itertools.chain(queued, self._parked) if not job.over)

    @property
    def waiting_ahead(self) -> int:
        return sum(not entry[2].over for entry in self._ahead) + sum(not job.over for job in self._rewarm)

    @property
    def rewarming(self) -> bool:
        return any(not job.over for job in self._rewarm)

    def drop_rewarming(self) -> list[PrefixJob]:
        """Takes all re-warming out of the queue."""
        dropped = [job for job in self._rewarm if not job.over]
        self._rewarm.clear()
        return dropped
