"""The training loop: `train` tells the story of a run, `Trainer` has a verb for each concern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from nestpipe.comm.consistency import check_consistent
from nestpipe.comm.world import World
from nestpipe.config.own_class import is_own
from nestpipe.config.recipe import Recipe
from nestpipe.data.skipped import Skipped, skipped_of
from nestpipe.data.source import DataError
from nestpipe.errors import NestPipeError
from nestpipe.files.patience import limit_waiting
from nestpipe.launch.signals import ending_orderly
from nestpipe.pipeline import Progress
from nestpipe.train.balance import LoadBalance
from nestpipe.train.build import NO_SAMPLES, make_pipeline, open_source, prepare_data
from nestpipe.train.checkpoints import Checkpoints, Resumed, folder_of, restore_run
from nestpipe.train.display import Display
from nestpipe.train.evaluate import best_possible, by_popularity, evaluate, rehearse
from nestpipe.train.evicted import EvictedFiles
from nestpipe.train.memory import HeapTrimmer, memory_of
from nestpipe.train.pace import Pace
from nestpipe.train.rundir import RunDirectory
from nestpipe.train.streams import cost_plan, train_stream
from nestpipe.train.summary import in_words, summarise
from nestpipe.train.tracing import gather_trace, kept_if_it_fails, write_trace


def train(
    recipe: Recipe,
    world: World,
    run: str | Path | None,
    *,
    quiet: bool = False,
    check_staleness: bool = False,
    trace: str | None = None,
    resumed: Resumed | None = None,
    resuming: bool = False,
    launch: str | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Trains a recipe on this worker, together with all others; returns the summary, the same on every worker.

    `resumed`: the checkpoint to resume run `run` from; `resuming` without one: the run was interrupted before its first.
    `trace`: a file for the whole timeline.  `launch`: by what name the launcher will know this run when it restarts workers.
    `tensorboard`: what the log has goes into event files, too.
    """
    limit_waiting(recipe.train.timeout)
    traced = trace is not None
    trainer = Trainer(recipe, world, run, quiet, check_staleness, traced, resumed, resuming, launch, tensorboard)
    with trainer.guarded():
        while step := trainer.next_step():
            trainer.balance_load(step)
            trainer.write_log()
            trainer.evaluate_if_due()
            trainer.save_if_due(step)
            trainer.show_progress()
        trainer.finish()
    return trainer.close(trace)


class Trainer:
    """A run on one worker.  All workers call the same methods in the same order."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        run: str | Path | None,
        quiet: bool,
        check_staleness: bool,
        trace: bool,
        resumed: Resumed | None,
        resuming: bool,
        launch: str | None,
        tensorboard: bool,
    ) -> None:
        torch.set_num_threads(recipe.train.threads)
        self.recipe, self.world = recipe, world
        # A run without checkpoints cannot be resumed: a second launch of the same name must not write over it.
        launch = launch if recipe.checkpoint.on else None
        self.directory = RunDirectory(
            recipe, run, world.rank, resuming=resuming, launch=launch, tensorboard=tensorboard
        )
        self.shows = world.rank == 0 and not quiet
        try:
            with Display(f"{recipe.name}: preparing data", on=self.shows) as display:
                prepare_data(recipe, world, display.show)
            source, self.held_out = open_source(recipe, "train", world), open_source(recipe, "eval", world)
            check_consistent(
                world,
                checkpoints=resumed.digest if resumed else None,
                training_data=source.extent,
                held_out_data=self.held_out.extent,
            )
            self.pipeline = make_pipeline(
                recipe, source, world, check_staleness=check_staleness, trace=trace, empty=resumed is not None
            )
            began, saved = (resumed.step, resumed.costs()) if resumed else (0, [])
            costs = cost_plan(recipe, self.pipeline.model, fitted=True, saved=saved, began=began)
            self.stream = (
                resumed.stream(recipe, source, world, costs)
                if resumed
                else train_stream(recipe, source, world, costs=costs)
            )
        except (NestPipeError, ValueError):
            self.directory.withdraw()
            raise
        if is_own(recipe.model_kind) or is_own(recipe.data_kind):
            rehearse(self.pipeline, self.held_out, recipe.eval)
        self.balance = LoadBalance(recipe, world, self.stream, costs, began)
        self.pace = Pace(recipe.train)
        self.skipped = skipped_of(source) or Skipped()
        self.trimmer = HeapTrimmer()
        self.evicted = EvictedFiles(self.directory.path, world.rank)
        self.metrics: dict[str, float] = {}
        self.evaluated_at: int | None = None
        self.stopped = False
        inexact = f" (not exact, by design: {self.pipeline.inexact})" if self.pipeline.inexact else ""
        self.display = Display(recipe.name + inexact, on=self.shows)
        if resumed is not None:
            self._restore(resumed)
        # The lock comes first: nothing of a run that another process is training may be touched.
        folder = folder_of(recipe, self.directory.path)
        self.checkpoints = Checkpoints(recipe, self.pipeline, self.stream, folder, resumed)
        if resuming:
            self.directory.rewind_to(self.pace.steps)
            self.evicted.rewind_to(self.pace.steps)
        self._write_costs()
        self._tell_of(getattr(source, "statistics", {}))

    def _tell_of(self, statistics: dict[str, Any]) -> None:
        """What is to be known of the training data: all of it in data.json, what was left out on the terminal too."""
        self.directory.write_data(statistics)
        for note in statistics.get("notes", ()):
            self.display.say(f"data: {note}")

    def _restore(self, resumed: Resumed) -> None:
        with Display(f"{self.recipe.name}: reading step {resumed.step}", on=self.shows) as display:
            restore_run(self.pipeline, resumed, lambda done: display.show(done, "rows"))
        self.pace.resume(resumed.step, resumed.trainer)
        self.metrics = {name: value for name, value in resumed.manifest.metrics.items() if value is not None}
        self.evaluated_at = resumed.step if self.metrics else None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, a failure or a signal leaves the run in order: its last steps, and a checkpoint that is being written."""
        with ExitStack() as stack:
            stack.enter_context(self.display)
            stack.enter_context(kept_if_it_fails(self.directory, self.pipeline.timeline, self.world))
            if self.checkpoints.on:  # a run without checkpoints has nothing to save and ends at once
                stop_seconds = self.recipe.checkpoint.stop_seconds
                stack.enter_context(ending_orderly(lambda: self.pipeline.request("stop"), stop_seconds))
            stack.enter_context(self.checkpoints.finished_if_it_fails())
            if self.pace.steps:
                self.display.say(f"resuming from step {self.pace.steps}")
            yield

    def next_step(self) -> Progress | None:
        """Trains one batch; None when the run is over: all steps taken, data ended, or asked to stop."""
        if self.pace.over or self.stopped:
            return None
        step = self.pipeline.progress(self.stream)
        if step is not None:
            if self.pace.count(step):
                self.pipeline.timeline.restart()
            self.stopped = "stop" in step.requests
        return step

    def balance_load(self, step: Progress) -> None:
        """Every so many steps all workers learn who waited for whom, and what a history costs."""
        if self.balance.after(step, self.directory.log):
            self._write_costs()

    def write_log(self) -> None:
        """What happened since the last step, and every `log_every` steps the figures of the window."""
        step = self.pace.steps
        for choice in self.pipeline.new_choices():
            self.directory.log({"step": step, "micro_batches": choice.micro_batches, "why": str(choice)})
            self.display.say(str(choice))
        self._write_evicted()
        for news in self.skipped.news():
            self.directory.log({"step": step, "skipped": news})
            self.display.say(news)
        self.trimmer.maybe_trim()  # before memory is measured: what the run needs, not what malloc kept lately
        if step % self.recipe.train.log_every == 0:
            line = {"step": step, **self.pace.window(self.world), "memory": memory_of(self.pipeline)}
            evicted = self.pipeline.total_evicted()
            self.directory.log({**line, "evicted": evicted} if evicted else line)

    def _write_evicted(self) -> None:
        """Replicas evict the same keys: one of them writes."""
        evicted = self.pipeline.take_evicted()
        if self.pipeline.topology.replicas.counts:
            self.evicted.append(evicted)

    def evaluate_if_due(self) -> None:
        if self.recipe.eval.every and self.pace.steps % self.recipe.eval.every == 0:
            with self.pace.paused():
                self._evaluate()
            self.display.say(f"step {self.pace.steps}  {in_words(self.metrics)}")

    def save_if_due(self, step: Progress) -> None:
        """The checkpoint of the last step waits for the last evaluation (`finish`)."""
        if not self.pace.over:
            metrics = self.metrics if self.evaluated_at == self.pace.steps else {}
            for saved in self.checkpoints.after(step, metrics, self._state):
                self.directory.log({"step": saved.step, "checkpoint": vars(saved)})

    def show_progress(self) -> None:
        self.display.show(self.pace.fraction(self.stream.fraction()), self.pace.status())

    def finish(self) -> None:
        """The last evaluation and the last checkpoint; a run that was asked to stop skips the former."""
        if self.pace.steps == 0:
            raise DataError(NO_SAMPLES)
        if not self.stopped and self.evaluated_at != self.pace.steps:
            self._evaluate()
        for saved in self.checkpoints.finish({} if self.stopped else self.metrics, self._state):
            self.directory.log({"step": saved.step, "checkpoint": vars(saved)})

    def close(self, trace: str | None) -> dict[str, Any]:
        """Writes the summary and the trace, and frees everything."""
        self.pipeline.settle()  # before the stream ends: a lane may be waiting for its next batch
        self.stream.close()
        self._write_evicted()
        run = str(self.directory.path)
        if self.stopped:
            self.pipeline.close()
            return {"recipe": self.recipe.name, "steps": self.pace.steps, "run": run, "stopped": True}
        if trace is not None:
            write_trace(trace, self.pipeline.timeline, self.world)
        balance = self.balance.figures()
        summary = summarise(self.recipe, self.pipeline, self.pace, self.metrics, self.skipped, run)
        if popular := by_popularity(self.world, self.pipeline.model, self.held_out, self.recipe.eval):
            summary["by_popularity"] = popular
        if best := best_possible(self.pipeline.model, self.held_out, self.recipe.eval):
            summary["best_possible"] = best
        if balance is not None:
            summary["balance"] = balance
        self.pipeline.close()
        self.directory.write_summary(summary)
        self.directory.write_trace(gather_trace(self.pipeline.timeline, self.world, few=True))
        return summary

    def _evaluate(self) -> None:
        self.metrics = evaluate(self.pipeline, self.held_out, self.recipe.eval)
        self.evaluated_at = self.pace.steps
        self.directory.log({"step": self.pace.steps, "eval": self.metrics})

    def _state(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint.  Keys evicted by then are on the list before it."""
        self.evicted.append(self.pipeline.take_evicted())
        balance = self.balance.state()
        return {**self.pace.state(), **({"balance": balance} if balance else {})}

    def _write_costs(self) -> None:
        if self.balance.mode == "cost":
            self.directory.write_balance(self.balance.state())
