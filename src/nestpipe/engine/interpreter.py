"""The interpreter: gives the actions of a list to their lanes, in list order, and says which one failed."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from nestpipe.comm.errors import PeerLost
from nestpipe.device import doing
from nestpipe.device.backend import Device
from nestpipe.device.host import HostDevice
from nestpipe.device.one_shot_event import OneShotEvent
from nestpipe.engine.lanes import LaneThread
from nestpipe.schedule.action import Action, Name
from nestpipe.schedule.stages import CALLERS_LANE, LANES
from nestpipe.schedule.timeline import Timeline


class Context(Protocol):
    """What the engine knows of a batch's state."""

    parts: dict[Name, list[OneShotEvent]]
    """Of an action that others may begin within: one event per part, set when that part is final."""

    @property
    def ended(self) -> bool:
        """No worker has data for this batch."""


StageFunction = Callable[[Any, int], None]
"""(context, micro-batch or bucket)"""
SWITCH_SECONDS = 0.0005
"""How long a lane may keep the GIL while another wants it.  Python's own 5 ms is as long as a whole stage."""


class Engine:
    """Runs lists of actions.  Actions of one lane run in list order; across lanes only what is declared is waited for.

    Every worker runs the same lists, so collectives of a lane are issued in the same order everywhere.  Once `route` has found
    that no worker has data left for a batch, the remaining actions of that batch and of all later ones do nothing, alike on every
    worker, because all of them come after that `route` on its lane.

    With `threads` off every lane is the caller's thread, which suits `serial`: there is nothing to run side by side.
    """

    def __init__(
        self,
        stages: dict[str, StageFunction],
        rank: int,
        threads: bool,
        timeline: Timeline | None = None,
        yielding: Collection[str] = (),
        device: Device | None = None,
    ) -> None:
        self._stages = stages
        self._device = device or HostDevice()
        self._rank = rank
        self._threads = threads
        self._lanes: dict[str, LaneThread] = {}
        self._yielding = yielding
        self._done: dict[Name, OneShotEvent] = {}
        self._failure: BaseException | None = None
        self._not_done: set[Name] = set()
        """Actions that failed or were left out."""
        self._told = False
        self._ended_at: int | None = None
        self.timeline = timeline or Timeline()
        self.behind: Callable[[BaseException], BaseException] = lambda error: error
        """What is behind an error of an action, to be told instead of it."""

    def run(self, actions: Sequence[Action], contexts: Mapping[int, Context]) -> None:
        """Issues all actions; returns when those of the compute lane are done.  Others may still be running."""
        if self._threads and not self._lanes:
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            self._lanes = self._start_lanes()
        try:
            self._issue(actions, contexts)
        except BaseException as error:
            # Ctrl-C may come between two actions: nobody must wait for what will not be run.
            self.fail(error)
            for action in actions:
                if action.name not in self._done:
                    continue
                if not self._threads or action.lane == CALLERS_LANE:
                    self._done[action.name].set()
                    self._release_parts(action, contexts[action.batch])
                else:  # it may not have been given to its lane; behind it there, so that one thread sets it
                    self._lanes[action.lane].submit(self._done[action.name].set)
            raise

    def _start_lanes(self) -> dict[str, LaneThread]:
        """A thread for every lane; on a device some lanes share one."""
        own = [lane for lane in LANES if lane != CALLERS_LANE and self._device.thread_of(lane) == lane]
        threads = {lane: LaneThread(lane, lane in self._yielding) for lane in own}
        return {lane: threads[self._device.thread_of(lane)] for lane in LANES if lane != CALLERS_LANE}

    def _issue(self, actions: Sequence[Action], contexts: Mapping[int, Context]) -> None:
        mine: Action | None = None
        for action in actions:
            if self._threads and action.lane != CALLERS_LANE:
                self._done[action.name] = self._device.event()
                job = functools.partial(self._perform_on_lane, action, contexts[action.batch])
                self._lanes[action.lane].submit(job)
                continue
            # What stands behind an action of the caller's is issued before that runs: it waits on its own lane.
            if mine is not None:
                self._perform(mine, contexts[mine.batch])
                self.raise_failure()
            self._done[action.name] = self._device.event()
            mine = action
        if mine is not None:
            self._perform(mine, contexts[mine.batch])
            self.raise_failure()

    def stage(self, name: str) -> StageFunction:
        """What a stage runs."""
        return self._stages[name]

    def replace(self, **stages: StageFunction) -> None:
        """Other functions for some stages: to measure a step without them, or to break it on purpose."""
        self._stages = {**self._stages, **stages}

    def settle(self) -> None:
        """Waits until everything that was issued is done."""
        self._wait()
        self.raise_failure()

    def _wait(self) -> None:
        for done in list(self._done.values()):
            done.wait()

    def forget(self, before: int) -> None:
        """Drops what is known of batches before `before`, all of whose actions are done."""
        for name in [n for n in self._done if n[1] < before and self._done[n].is_set()]:
            del self._done[name]
        self.timeline.forget(before)

    def recover(self, batch: int) -> None:
        """Lets a caller go on after a failure of `batch`, as if it had not been tried; only where nothing runs ahead."""
        if not self._threads:
            self._failure = None
            self._not_done.clear()
            self.forget(batch + 1)
            self.timeline.start_anew()

    def start_over(self) -> None:
        """After the data has ended and everything has settled: as if nothing had run, so that another epoch may follow."""
        self._ended_at = None
        self._done.clear()
        self.timeline.start_anew()

    def close(self) -> None:
        """Ends the lanes when they are done; raises only a failure that nobody has been told of yet."""
        self._wait()
        for lane in set(self._lanes.values()):
            lane.close()
        self._lanes = {}
        if not self._told:
            self.raise_failure()

    def raise_failure(self) -> None:
        """What has gone wrong before, if anything has: with lanes nothing runs after it."""
        if self._failure is not None:
            self._told = True
            raise self._failure

    def _perform_on_lane(self, action: Action, context: Context) -> None:
        with self._device.lane(action.lane):
            self._perform(action, context)

    def _perform(self, action: Action, context: Context) -> None:
        """Waits for what the action waits for, runs it, and marks it done whatever happens."""
        done = self._done[action.name]
        try:
            for wait in action.waits:
                # What is not known any more was done and forgotten; a list that names a later action is caught by `check`.
                self._wait_for(action, wait, self._done.get(wait))
            if action.within is not None:
                parts = context.parts.get(action.within)
                self._wait_for(action, action.within, parts[action.micro] if parts else self._done.get(action.within))
            if self._left_out(action):
                self._not_done.add(action.name)
            elif self._ended_at is None or action.batch < self._ended_at:
                doing.begin(action)
                start = time.perf_counter()
                self._stages[action.stage](context, action.micro)
                self.timeline.add(action, start, time.perf_counter())
                if context.ended and (self._ended_at is None or action.batch < self._ended_at):
                    self._ended_at = action.batch
        except PeerLost as error:
            self._not_done.add(action.name)
            self.fail(PeerLost(f"{action.stage} of batch {action.batch}: {error}"))
        except BaseException as error:
            self._not_done.add(action.name)
            error.add_note(f"rank {self._rank}, {action.stage} of batch {action.batch}")
            self.fail(self.behind(error))
        finally:
            done.set()
            self._release_parts(action, context)

    @staticmethod
    def _wait_for(action: Action, name: Name, done: OneShotEvent | None) -> None:
        """`action` may begin once the action `name` is done, or the part of it that it needs."""
        if done is not None:
            done.wait()

    def _left_out(self, action: Action) -> bool:
        """After a failure nothing runs any more.  After one that all workers agree on, whatever does not come after it does run,
        on all of them: nobody waits for a message that another did not send, and what was trained before reaches the tables.
        """
        if self._failure is None:
            return False
        return not getattr(self._failure, "on_all_workers", False) or any(n in self._not_done for n in action.after)

    @staticmethod
    def _release_parts(action: Action, context: Context) -> None:
        for part in context.parts.pop(action.name, ()):
            part.set()

    def fail(self, error: BaseException) -> None:
        """The first failure is the one that is told; after it no action runs any more."""
        if self._failure is None:
            self._failure = error
