"""The interpreter: runs a list of actions, knows which are done, and says which one failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from nestpipe.comm.errors import PeerLost
from nestpipe.engine.flight import Flight
from nestpipe.schedule.action import Action, Name

StageFunction = Callable[[Flight, int], None]


class Engine:
    """Runs actions one after another in list order, which satisfies every schedule's waits; lanes of their own come with `dbp`.

    A flight exists from its batch's first action to its last; once `route` has found that no worker has data left, the
    remaining actions of that batch do nothing, on every worker alike.
    """

    def __init__(self, stages: dict[str, StageFunction], rank: int) -> None:
        self._stages = stages
        self._rank = rank
        self._done: set[Name] = set()
        self.busy: dict[str, float] = dict.fromkeys(stages, 0.0)
        """Seconds spent in each stage since the start."""

    def run(self, actions: Iterable[Action], flights: dict[int, Flight]) -> None:
        for action in actions:
            missing = [w for w in action.waits if w not in self._done and w[1] >= action.batch]
            assert not missing, f"{action} waits for {missing}, which the list does not hold before it"
            flight = flights.setdefault(action.batch, Flight(action.batch))
            if not flight.ended:
                started = time.perf_counter()
                try:
                    self._stages[action.stage](flight, action.micro)
                except PeerLost as error:
                    raise PeerLost(f"{action.stage} of batch {action.batch}: {error}") from None
                except Exception as error:
                    error.add_note(f"rank {self._rank}, {action.stage} of batch {action.batch}")
                    raise
                self.busy[action.stage] += time.perf_counter() - started
            self._done.add(action.name)

    def forget(self, batch: int) -> None:
        """Drops what is known of a finished batch."""
        self._done = {name for name in self._done if name[1] > batch}
