"""Lists a folder of checkpoints: the committed ones, and directories that only look like one."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import LESS_IS_BETTER, Checkpoint, Folder


@dataclass(frozen=True)
class Stray:
    """A directory that no run can resume from."""

    name: str
    why: str


@dataclass(frozen=True)
class Listing:
    checkpoints: list[Checkpoint]
    """By step, ascending."""
    strays: list[Stray]
    metric: str | None
    """The metric that decides which checkpoint is the best."""

    @property
    def best(self) -> Checkpoint | None:
        if self.metric is None:
            return None
        sign = -1 if self.metric in LESS_IS_BETTER else 1
        scored = [
            (sign * value, one.manifest.step, one)
            for one in self.checkpoints
            if (value := one.manifest.metrics.get(self.metric)) is not None
        ]
        return max(scored, key=lambda item: item[:2])[2] if scored else None


def list_folder(folder: Folder, metric: str | None = None) -> Listing:
    """`metric` decides which checkpoint is the best; default: checkpoint.best of the last one's recipe."""
    checkpoints, strays = [], []
    for one in folder.found():
        if one.problem or one.step is None:
            strays.append(Stray(one.name, one.problem))
            continue
        try:
            checkpoints.append(folder.read(one.step))
        except CheckpointError as error:
            strays.append(Stray(one.name, str(error)))
    if metric is None and checkpoints:
        metric = recipe_value(checkpoints[-1], "checkpoint", "best")
    return Listing(sorted(checkpoints, key=lambda one: one.manifest.step), strays, metric)


def recipe_value(checkpoint: Checkpoint, *keys: str) -> str | None:
    """A string from the recipe in a checkpoint; None if it is missing or "none"."""
    try:
        value = tomllib.loads(checkpoint.manifest.recipe)
        for key in keys:
            value = value[key]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if isinstance(value, str) and value != "none" else None
