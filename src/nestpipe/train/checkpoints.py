"""When a run writes a checkpoint, what the trainer adds to it, and how a run resumes from one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import LESS_IS_BETTER, Checkpoint, Folder
from nestpipe.checkpoint.listing import recipe_value
from nestpipe.checkpoint.load import restore
from nestpipe.checkpoint.places import FOLDER, place_at
from nestpipe.checkpoint.writer import CheckpointWriter, Saved
from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe
from nestpipe.data.balance.costs import CostFrom, CostPlan, costs_from
from nestpipe.data.skipped import Skipped, skipped_of
from nestpipe.data.source import Source
from nestpipe.data.stream import Position
from nestpipe.pipeline import Progress, TrainPipeline
from nestpipe.train.streams import TrainStream, train_stream

FIXED = ("data", "model", "train.seed", "train.batch_size", "train.epochs", "tables.optimizer", "dense.optimizer")
"""Recipe keys that must not change when a run resumes."""


def folder_of(recipe: Recipe, run: Path) -> Folder:
    return Folder(place_at(recipe.checkpoint.path) if recipe.checkpoint.path else run / FOLDER)


class Resumed:
    """The checkpoint that a run resumes from."""

    def __init__(self, folder: Folder, last: Checkpoint) -> None:
        self.chain = folder.chain(last)
        self.manifest = last.manifest
        _check_trainer(last)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def digest(self) -> str:
        """Digest of the manifest, and so of everything that is restored."""
        return self.chain[-1].digest

    @property
    def trainer(self) -> dict[str, Any]:
        return self.manifest.trainer

    def check_recipe(self, recipe: Recipe, saved: Recipe) -> None:
        """Raises CheckpointError if `recipe` changes a key that must stay as in `saved`."""
        for key in FIXED:
            section, _, name = key.partition(".")
            now, before = getattr(recipe, section), getattr(saved, section)
            if name:
                now, before = getattr(now, name), getattr(before, name)
            if now != before:
                what = f"from {before!r} to {now!r}" if name else "since the checkpoint"
                raise CheckpointError(f"{key} changed {what}: change it back, or start a new run")
        if recipe.train.streams not in (None, began := len(self.positions())):
            raise CheckpointError(
                f"train.streams is {recipe.train.streams}, but the run has {began} data streams since it began: "
                f"use train.streams={began}, or start a new run"
            )

    def stream(self, recipe: Recipe, source: Source, world: World, costs: CostPlan | None = None) -> TrainStream:
        """The training data from the saved position on, shared among the current number of workers."""
        positions, data = self.positions(), self.manifest.data
        if data["extent"] != source.extent:
            raise CheckpointError(
                f"the training data had {data['extent']} units at the checkpoint and has {source.extent} now: "
                "restore its files, or start a new run"
            )
        before, now = self.trainer.get("data_digest"), getattr(source, "digest", None)
        if before != now and before is not None:
            raise CheckpointError(
                "the training data has changed since the checkpoint (another log, or other files in its folder): restore its "
                "files, or start a new run"
            )
        skipped = skipped_of(source)
        if skipped is not None:
            skipped.go_on(data["skipped"])
        return train_stream(recipe, source, world, len(positions), positions, costs, self.step)

    def costs(self) -> list[CostFrom]:
        """What histories had been found to cost by then; empty where nothing is balanced."""
        return costs_from(self.trainer["balance"]) if self.trainer.get("balance") else []

    def positions(self) -> dict[int, Position]:
        """The saved position of each data stream."""
        data = self.manifest.data
        try:
            if set(data) != {"streams", "positions", "extent", "skipped"}:
                raise ValueError("it must have streams, positions, extent and skipped")
            streams, found = data["streams"], data["positions"]
            if type(streams) is not int or streams < 1 or not isinstance(found, dict) or len(found) != streams:
                raise ValueError(f"streams is {streams!r}")
            if type(data["extent"]) is not int or data["extent"] < 0:
                raise ValueError(f"extent is {data['extent']!r}")
            Skipped().go_on(data["skipped"])
            return {n: Position.from_dict(found[str(n)]) for n in range(streams)}
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.chain[-1].path}: its position in the training data cannot be read ({error})"
            ) from None

    def plan(self, pipeline: TrainPipeline) -> None:
        """Restores what "auto" had chosen by then."""
        choices = self.trainer.get("micro_batches_chosen")
        pipeline.restore_choices(self.step, [(int(first), int(n)) for first, n in choices or []])


def _check_trainer(last: Checkpoint) -> None:
    """Raises CheckpointError unless the trainer's own state is valid."""

    def number(value: object) -> bool:
        return type(value) is float or whole(value)

    def whole(value: object) -> bool:
        return type(value) is int and 0 <= value < 1 << 62

    def choice(value: object) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(map(whole, value)) and value[1] > 0

    def costs(value: object) -> bool:
        try:
            return value == [] or bool(costs_from(value))
        except (ValueError, TypeError):
            return False

    state = last.manifest.trainer
    lists = [state.get("losses", []), state.get("micro_batches_chosen", [])]
    if not (
        whole(state.get("samples", 0))
        and number(state.get("seconds", 0))
        and all(isinstance(values, list) for values in lists)
        and all(map(number, lists[0]))
        and all(map(choice, lists[1]))
        and costs(state.get("balance", []))
    ):
        raise CheckpointError(f"{last.path}: its trainer state cannot be read")


FINISH_SECONDS = 2.0
"""Time for a checkpoint to commit after the run has failed.  Short: a failed worker must end within seconds."""


class Checkpoints:
    """A run's checkpoints.  Does nothing if the recipe has none.  All workers call its methods together."""

    def __init__(
        self, recipe: Recipe, pipeline: TrainPipeline, stream: TrainStream, folder: Folder, resumed: Resumed | None
    ) -> None:
        section = recipe.checkpoint
        self._section, self._pipeline, self._stream = section, pipeline, stream
        self._recipe = recipe.to_toml()
        self._began = pipeline.next_batch
        self._folder = folder
        self._writer: CheckpointWriter | None = None
        self._asked_at = time.monotonic()
        self._best: float | None = None
        if pipeline.world.rank == 0 and (section.on or resumed is not None):
            # No other worker writes before the first step, which all take together.
            folder.lock()
            folder.rewind_to(pipeline.next_batch)
        if not section.on:
            return
        self._writer = CheckpointWriter(
            pipeline,
            folder,
            keep=section.keep,
            full_every=section.full_every,
            best=section.best,
            loaded=resumed.chain if resumed else None,
        )
        if resumed is not None and resumed.trainer.get("best_metric") == section.best:
            best = resumed.trainer.get("best")
            self._best = best if isinstance(best, int | float) else None

    def after(self, step: Progress, metrics: dict[str, float], about: Callable[[], dict[str, Any]]) -> list[Saved]:
        """Saves if a checkpoint is due; called after every step.  Returns the checkpoints committed since the last call.

        `metrics`: of an evaluation at this step, or {}.  `about`: makes the trainer's own state.
        """
        if self._writer is None:
            return []
        trained, section = self._pipeline.next_batch, self._section
        due = bool(section.every_steps and trained % section.every_steps == 0) or "checkpoint" in step.requests
        if self._better(metrics) or due:
            self._save(metrics, about)
        elif section.every_minutes and time.monotonic() - self._asked_at >= 60 * section.every_minutes:
            # A monotonic clock of this worker.  The others learn of it with the next step's outcome.
            self._asked_at = time.monotonic()
            self._pipeline.request("checkpoint")
        return self._writer.poll()

    def finish(self, metrics: dict[str, float], about: Callable[[], dict[str, Any]]) -> list[Saved]:
        """Saves the final state, unless it is saved already.  Waits until it is committed."""
        if self._writer is None:
            self._folder.unlock()
            return []
        if self._writer.last_step != self._pipeline.next_batch:
            if self._section.best in metrics:  # a wrong name must not cost the last checkpoint
                self._better(metrics)
            self._save(metrics, about)
        self._writer.wait()
        self._folder.unlock()
        return self._writer.poll()

    @contextmanager
    def finished_if_it_fails(self) -> Iterator[None]:
        """If the run fails while a checkpoint is being written, gives it FINISH_SECONDS to commit."""
        try:
            yield
        except BaseException:
            if self._writer is not None:
                self._writer.let_finish(FINISH_SECONDS)
            raise

    @property
    def on(self) -> bool:
        return self._writer is not None

    def _save(self, metrics: dict[str, float], about: Callable[[], dict[str, Any]]) -> None:
        assert self._writer is not None
        self._pipeline.refresh()  # `about` must see the last batch's evictions
        self._asked_at = time.monotonic()
        positions = self._stream.positions_after(self._pipeline.next_batch - self._began)
        data = {
            "streams": self._stream.streams,
            "positions": {str(number): position.as_dict() for number, position in positions.items()},
            "extent": self._stream.source.extent,
            "skipped": dict(skipped.parts) if (skipped := skipped_of(self._stream.source)) is not None else {},
        }
        chosen = [
            list(choice) for choice in self._pipeline.micro_batch_choices if choice[0] < self._pipeline.next_batch
        ]
        best = {"best_metric": self._section.best, "best": self._best}
        trainer = {**about(), **best, "micro_batches_chosen": chosen}
        if (data_digest := getattr(self._stream.source, "digest", None)) is not None:
            trainer["data_digest"] = data_digest
        finite = {name: value for name, value in metrics.items() if value == value}
        self._writer.save(data, {"trainer": trainer, "metrics": finite, "recipe": self._recipe})

    def _better(self, metrics: dict[str, float]) -> bool:
        """Whether these metrics are the best so far.  Equal on all workers, as metrics are."""
        name = self._section.best
        if name is None or not metrics:
            return False
        if name not in metrics:
            raise ValueError(f"checkpoint.best is {name!r}, but the held-out metrics are {', '.join(metrics)}")
        value = metrics[name]
        if value != value:
            return False
        sign = -1 if name in LESS_IS_BETTER else 1
        if self._best is not None and sign * value <= sign * self._best:
            return False
        self._best = value
        return True


def refuse_others(recipe: Recipe, run: Path) -> None:
    """Raises CheckpointError if a new run would write into another run's checkpoints."""
    folder = folder_of(recipe, run)
    if recipe.checkpoint.on and (steps := folder.steps()):
        raise CheckpointError(
            f"{folder.path} already has checkpoints, the last of step {steps[-1]}: resume that run with --resume, "
            "or set another checkpoint.path"
        )


def find_resumed(recipe: Recipe, run: Path, step: int | None, saved: Callable[[str], Recipe]) -> Resumed | None:
    """The run's last checkpoint, or that of a step; None if it has none.  `saved` parses the text of a recipe."""
    folder = folder_of(recipe, run)
    last = folder.find(step)
    if last is None:
        return None
    resumed = Resumed(folder, last)
    for section in (
        "data",
        "model",
    ):  # before it is parsed: no class is imported that the run's own recipe does not name
        now_kind, before_kind = getattr(recipe, f"{section}_kind"), recipe_value(last, section, "kind")
        if before_kind is not None and before_kind != now_kind:
            raise CheckpointError(
                f"{section}.kind changed from {before_kind!r} to {now_kind!r}: change it back, or start a new run"
            )
    try:
        # Both are parsed from text: a default that is an empty tuple becomes a list there.
        now, before = saved(recipe.to_toml()), saved(last.manifest.recipe)
    except ValueError as error:
        raise CheckpointError(f"{last.path}: its recipe cannot be read ({error})") from None
    resumed.check_recipe(now, before)
    if now.train.steps is not None and now.train.steps < resumed.step:
        raise CheckpointError(
            f"train.steps is {now.train.steps}, but the run has already trained {resumed.step} steps: raise it "
            "(--steps), or resume from an earlier checkpoint with --from STEP"
        )
    return resumed


def restore_run(pipeline: TrainPipeline, resumed: Resumed, on_progress: Callable[[float], None]) -> None:
    """Restores a new pipeline to the checkpoint.  `on_progress` gets the fraction done."""
    restore(pipeline, resumed.chain, on_progress)
    resumed.plan(pipeline)
