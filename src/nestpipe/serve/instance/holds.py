"""Pins for rankings that are expected: a pre-inferred prefix stays until its ranking comes, is cancelled, or does not come."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from nestpipe.serve.scheduler.jobs import PrefixJob


@dataclass(eq=False)
class Hold:
    """One pin, for one user."""

    job: PrefixJob
    until: float
    over: bool = False


class Holds:
    """At most one for each user.  Whoever takes one out gives its pin back."""

    def __init__(self) -> None:
        self._by_user: dict[str, Hold] = {}
        self._by_time: list[tuple[float, int, Hold]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._by_user)

    def find(self, user: str) -> Hold | None:
        return self._by_user.get(user)

    def add(self, user: str, hold: Hold) -> None:
        assert user not in self._by_user
        self._by_user[user] = hold
        heapq.heappush(self._by_time, (hold.until, next(self._order), hold))

    def take(self, user: str) -> Hold | None:
        hold = self._by_user.pop(user, None)
        if hold is not None:
            hold.over = True
        return hold

    def take_expired(self, now: float) -> Iterator[Hold]:
        while self._by_time and (self._by_time[0][2].over or self._by_time[0][0] <= now):
            hold = heapq.heappop(self._by_time)[2]
            if not hold.over:
                taken = self.take(hold.job.prefix.key.user)
                assert taken is hold
                yield hold

    @property
    def next_end(self) -> float | None:
        return self._by_time[0][0] if self._by_time else None
