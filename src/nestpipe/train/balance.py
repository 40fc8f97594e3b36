"""What load balance learns while a run trains: how long workers computed, what a history costs, and who waited for whom.

Workers keep what their steps held and took, and share it every `data.balance_every` steps.  Worker 0 fits the cost, and all of
them get its numbers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe
from nestpipe.data.balance.costs import Cost, CostPlan
from nestpipe.data.balance.expected import fixed_loads
from nestpipe.data.balance.fit import Fitted, fit
from nestpipe.data.source import is_indexed
from nestpipe.pipeline import Progress
from nestpipe.train.streams import TrainStream, balance_of

WARMING_STEPS = 5
"""First steps of a process, which compile kernels and touch memory: neither fitted nor told."""
WINDOW_STEPS = 200
"""Steps that a cost is fitted to."""
COLUMNS = 8
"""Of a worker's step: micro-batches with samples; histories, tokens, squared tokens; seconds; those three of a fixed batch."""


class Waiting:
    """The share of steps that workers wait for the most loaded one: the mean over steps, for each worker."""

    def __init__(self) -> None:
        self.steps = 0
        self._shares: np.ndarray = np.zeros(0)

    def add(self, loads: np.ndarray) -> None:
        """Loads [workers] of one step.  One that is not known, or in which nobody had anything to do, does not count."""
        most = loads.max()
        if np.isfinite(loads).all() and most > 0:
            self._shares = 1 - loads / most + (self._shares if self.steps else 0.0)
            self.steps += 1

    def figures(self) -> dict[str, Any] | None:
        if not self.steps:
            return None
        each = (self._shares / self.steps).tolist()
        return {"share": float(np.mean(each)), "workers": each}


class LoadBalance:
    """All workers call the same methods after the same steps.  Does nothing where nothing is balanced."""

    def __init__(self, recipe: Recipe, world: World, stream: TrainStream, costs: CostPlan | None, began: int) -> None:
        self.mode = balance_of(recipe)
        self.costs = costs
        self._world, self._stream, self._began = world, stream, began
        self._train = recipe.train
        self._every = recipe.data.balance_every if costs is not None else 0
        self._rows: list[np.ndarray] = []
        self._shared = began
        """Steps that all workers know of."""
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW_STEPS)
        """Worker 0: [workers, 5] of each step."""
        self._fitted: Fitted | None = None
        self._errors: list[tuple[float, int]] = []
        """Held-out errors, and on how many steps."""
        self._waiting = {name: Waiting() for name in ("planned", "measured", "fixed")}

    def after(self, step: Progress, log: Callable[[dict[str, Any]], None]) -> bool:
        """Notes a step, and shares what is known every so many; true when there is a new cost.  `log` gets a line."""
        if self.costs is None:
            return False
        loads = self._stream.loads.take(step.batch - self._began)
        parts = sum(1 for micro in step.micros if len(micro))
        self._rows.append(np.array([parts, *loads[:3], step.compute_seconds, *loads[3:]], np.float64))
        steps = step.batch + 1
        if steps % self._every:
            return False
        last = self._share()
        entry = self._fit(steps, len(self._rows)) if self.costs.due(steps) else None
        self._rows.clear()
        self._shared = steps
        new = {} if entry is None else {"cost": {"a": entry[0].a, "b": entry[0].b, "c": entry[0].c, "error": entry[1]}}
        log({"step": steps, "waiting": {name: share for name, share in last.items() if share is not None}, **new})
        return entry is not None

    def figures(self) -> dict[str, Any] | None:
        """For the summary; None where nothing is balanced.  All workers call it together, once."""
        if self.costs is None:
            return None
        if self._rows:
            self._share()
            self._rows.clear()
        if self.mode == "tokens":
            self._expect_fixed()
        seen = sum(steps for _, steps in self._errors)
        loads = self._stream.loads
        return {
            "mode": self.mode,
            **{name: found.figures() for name, found in self._waiting.items()},
            "held_out_error": sum(error * steps for error, steps in self._errors) / seen if seen else None,
            "plan_ms": 1e3 * loads.plan_seconds / loads.plans if loads.plans else None,
            "costs": self.state(),
        }

    def state(self) -> list[dict[str, Any]]:
        """The costs so far, for checkpoints and balance.json."""
        return [entry.as_dict() for entry in self.costs.entries] if self.costs is not None else []

    def _expect_fixed(self) -> None:
        """A fixed batch has other histories than one that is filled: those of the first fixed batches of the run."""
        assert self.costs is not None and is_indexed(self._stream.source)
        cost, train = self.costs.entries[-1].cost, self._train
        streams = fixed_loads(
            self._stream.source, train.batch_size, self._world.size, self._stream.streams, train.epochs, cost
        )
        for loads in itertools.islice(streams, min(WINDOW_STEPS, self._waiting["planned"].steps)):
            self._waiting["fixed"].add(loads)

    def _share(self) -> dict[str, float | None]:
        """Brings the rows of all workers together; returns who waited in these steps."""
        assert self.costs is not None
        world = self._world
        everyone = torch.zeros((len(self._rows), world.size, COLUMNS), dtype=torch.float64)
        everyone[:, world.rank] = torch.from_numpy(np.stack(self._rows))
        Exchange(world, "metrics").all_reduce(everyone)
        lately = {name: Waiting() for name in self._waiting}
        for number, rows in enumerate(everyone.numpy(), start=self._shared):
            if number < self._began + WARMING_STEPS:
                continue
            self._window.append(rows[:, :5])
            cost = self.costs.known(number)
            loads = {"planned": cost.of_sums(rows[:, 1:4]), "measured": rows[:, 4], "fixed": cost.of_sums(rows[:, 5:])}
            for name, load in loads.items():
                lately[name].add(load)
                self._waiting[name].add(load)
        return {name: found["share"] if (found := w.figures()) else None for name, w in lately.items()}

    def _fit(self, steps: int, new: int) -> tuple[Cost, float | None] | None:
        """Fits on worker 0, on steps before these `new` ones to know the error on them, then on all; tells all workers."""
        assert self.costs is not None
        numbers = np.zeros(6)
        if self._world.rank == 0:
            numbers = self._fit_here(min(new, len(self._window)))
        told = torch.from_numpy(numbers)
        Exchange(self._world, "metrics").all_reduce(told)  # others add 0
        known, a, b, c, error, seen = told.tolist()
        mean_error = error if seen else None
        if seen:
            self._errors.append((error, int(seen)))
        cost = Cost(a, b, c) if known else None
        self.costs.tell(steps, cost, mean_error)
        return None if cost is None else (cost, mean_error)

    def _fit_here(self, new: int) -> np.ndarray:
        """[6]: whether there is a cost, a, b, c, the error on steps not seen, and on how many of them."""
        blocks = list(self._window)
        held_out = new if self._fitted is not None else new // 2
        earlier = self._fitted or fit(_stacked(blocks[: len(blocks) - held_out]))
        error = earlier.error(_stacked(blocks[len(blocks) - held_out :])) if earlier is not None else None
        self._fitted = fit(_stacked(blocks)) or self._fitted
        if self._fitted is None:
            return np.zeros(6)
        cost = self._fitted.cost
        return np.array([1, cost.a, cost.b, cost.c, error or 0.0, held_out if error is not None else 0])


def _stacked(blocks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(blocks) if blocks else np.zeros((0, 5))
