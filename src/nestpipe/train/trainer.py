"""The training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe
from nestpipe.data.skipped import Skipped, skipped_of
from nestpipe.data.source import DataError
from nestpipe.launch.signals import ending_orderly
from nestpipe.pipeline.micro_plan import MicroPlan
from nestpipe.pipeline.pipeline import Progress
from nestpipe.pipeline.tuner import Choice, Tuner
from nestpipe.train.build import NO_SAMPLES, make_pipeline, open_source, train_stream
from nestpipe.train.checkpoints import Checkpoints, Resumed, folder_of, restore_run
from nestpipe.train.consistency import check_consistent, together
from nestpipe.train.digest import digest
from nestpipe.train.display import Display
from nestpipe.train.evaluate import evaluate
from nestpipe.train.evicted import EvictedFiles
from nestpipe.train.memory import HeapTrimmer, memory_of
from nestpipe.train.metrics import ClickMetrics
from nestpipe.train.rundir import RunDirectory
from nestpipe.train.tracing import gather_trace, kept_if_it_fails, write_trace

SETTLING_STEPS = 5
"""First steps, which compile and fill caches, and are left out of samples/s."""


def train(
    recipe: Recipe,
    world: World,
    run: str | Path | None,
    *,
    quiet: bool = False,
    check_staleness: bool = False,
    trace: str | None = None,
    resumed: Resumed | None = None,
    goes_on: bool = False,
    launch: str | None = None,
) -> dict[str, Any]:
    """Trains a recipe on this worker, together with all others; returns the summary, the same on every worker.

    `resumed`: the checkpoint of run `run` to go on from; `goes_on` without one: the run was interrupted before its first.
    `launch`: by what name the launcher will know this run when it starts workers again.
    """
    torch.set_num_threads(recipe.train.threads)
    # Without checkpoints there is nothing to go on from: a second launch of the same name must not write over the run.
    directory = RunDirectory(recipe, run, world.rank, resuming=goes_on, launch=launch if recipe.checkpoint.on else None)
    source = open_source(recipe, "train", world)
    held_out = open_source(recipe, "eval", world)
    check_consistent(
        world,
        checkpoints=resumed.digest if resumed else None,
        training_data=source.extent,
        held_out_data=held_out.extent,
    )
    pipeline = make_pipeline(
        recipe,
        source,
        world,
        check_staleness=check_staleness,
        trace=trace is not None,
        empty=resumed is not None,
    )
    stream = resumed.stream(recipe, source, world) if resumed else train_stream(recipe, source, world)
    pace = Pace(recipe)
    if resumed is not None:
        with Display(f"{recipe.name}: reading step {resumed.step}", on=world.rank == 0 and not quiet) as display:
            restore_run(pipeline, resumed, lambda done: display.show(done, "rows"))
        pace.go_on(resumed.step, resumed.trainer)
    # First of all what locks the run: nothing of one that another process is training may be touched.
    checkpoints = Checkpoints(recipe, pipeline, stream, folder_of(recipe, directory.path), resumed)
    if goes_on:
        directory.rewind_to(pace.steps)
    stopped = False
    chosen = NewChoices(pipeline.plan)
    left_out = skipped_of(source) or Skipped()
    trimmer = HeapTrimmer()
    evicted = EvictedFiles(directory.path, world.rank)
    if goes_on:
        evicted.rewind_to(pace.steps)

    def state() -> dict[str, Any]:
        """Of the trainer, for a checkpoint; what is evicted by then is on the list before it."""
        evicted.append(pipeline.sparse.take_evicted())
        return pace.state()

    metrics: dict[str, float] = {}
    if resumed is not None:
        metrics = {name: value for name, value in resumed.manifest.metrics.items() if value is not None}
    evaluated_at = pace.steps if metrics else None

    with (
        Display(recipe.name, on=world.rank == 0 and not quiet) as display,
        kept_if_it_fails(directory, pipeline.engine.timeline, world),
        _orderly(checkpoints, lambda: pipeline.request("stop"), recipe.checkpoint.stop_seconds),
        checkpoints.finished_if_it_fails(),
    ):
        if resumed is not None:
            display.say(f"going on from step {resumed.step}")
        while not pace.over and not stopped and (step := pipeline.progress(stream)):
            if pace.count(step):
                pipeline.engine.timeline.restart()
            for choice in chosen.new():
                directory.log({"step": pace.steps, "micro_batches": choice.micro_batches, "why": str(choice)})
                display.say(str(choice))
            evicted.append(pipeline.sparse.take_evicted())
            for news in left_out.news():
                directory.log({"step": pace.steps, "skipped": news})
                display.say(news)
            trimmer.maybe_trim()  # before memory is looked at: what the run needs, and not what malloc has kept of late
            if pace.steps % recipe.train.log_every == 0:
                line = {"step": pace.steps, **pace.window(world), "memory": memory_of(pipeline.sparse)}
                gone = sum_over_workers(pipeline.sparse.evicted(), world)
                directory.log({**line, "evicted": gone} if gone else line)
            evaluates = bool(recipe.eval.every and pace.steps % recipe.eval.every == 0)
            if evaluates:
                with pace.paused():
                    metrics = evaluate(pipeline, held_out, recipe.eval)
                evaluated_at = pace.steps
                directory.log({"step": pace.steps, "eval": metrics})
                display.say(f"step {pace.steps}  {in_words(metrics)}")
            # That of the last step waits for the last evaluation.
            for saved in checkpoints.after(step, metrics if evaluates else {}, state) if not pace.over else ():
                directory.log({"step": saved.step, "checkpoint": vars(saved)})
            display.show(pace.fraction(stream.fraction()), pace.status())
            stopped = "stop" in step.requests
        if pace.steps == 0:
            raise DataError(NO_SAMPLES)
        if not stopped and evaluated_at != pace.steps:
            metrics = evaluate(pipeline, held_out, recipe.eval)
            directory.log({"step": pace.steps, "eval": metrics})
        for saved in checkpoints.finish({} if stopped else metrics, state):
            directory.log({"step": saved.step, "checkpoint": vars(saved)})
    pipeline.settle()  # first: a lane may be waiting for the stream's next batch
    stream.close()
    evicted.append(pipeline.sparse.take_evicted())
    if stopped:
        pipeline.close()
        return {"recipe": recipe.name, "steps": pace.steps, "run": str(directory.path), "stopped": True}

    if trace is not None:
        write_trace(trace, pipeline.engine.timeline, world)
    stages = pipeline.engine.timeline.report()
    summary = {
        "recipe": recipe.name,
        "schedule": recipe.pipeline.schedule,
        "workers": world.size,
        "micro_batches": recipe.pipeline.micro_batches,
        "micro_batches_chosen": [list(choice) for choice in pipeline.plan.choices],
        "steps": pace.steps,
        "samples": pace.samples,
        "seconds": pace.seconds(),
        "samples_per_s": pace.samples_per_s(),
        "loss": pace.mean_loss(),
        "metrics": metrics,
        "digest": digest(pipeline),
        "seed": recipe.train.seed,
        "rows": sum(len(store) for store in pipeline.sparse.stores),
        "waiting": sum(len(s.sightings) for s in pipeline.sparse.stores if s.sightings is not None),
        "evicted": sum_over_workers(pipeline.sparse.evicted(), world),
        "ttl_horizons": [list(pair) for pair in pipeline.sparse.horizons() if pair[0] < pipeline.next_batch],
        "bytes_sent": pipeline.sparse.traffic.bytes_sent,
        "stages": stages,
        "step_ms": sum(stage["exposed_ms"] for stage in stages.values()),
        "buffer_bytes": {"now": pipeline.sparse.buffers.bytes, "peak": pipeline.sparse.buffers.peak},
        "windows_by_micro": pipeline.sparse.windows_by_micro,
        "run": str(directory.path),
    }
    if skipped := together(world, left_out.parts):
        summary["skipped"] = {"samples": sum(skipped.values()), "parts": sorted(skipped)}
    if pipeline.sparse.ledger is not None:
        summary["reads_verified"] = pipeline.sparse.ledger.verified
    pipeline.close()
    directory.write_summary(summary)
    directory.write_trace(gather_trace(pipeline.engine.timeline, world, few=True))
    return summary


def _orderly(checkpoints: Checkpoints, ask: Callable[[], None], seconds: float) -> AbstractContextManager[None]:
    """A run that can be gone on with ends in order when it is told to; any other at once."""
    return ending_orderly(ask, seconds) if checkpoints.on else nullcontext()


def sum_over_workers(counts: dict[str, int], world: World) -> dict[str, int]:
    """Counts by name, the same names on every worker, summed over all."""
    total = torch.tensor([*counts.values()], dtype=torch.int64)
    if world.size > 1 and counts:
        dist.all_reduce(total, group=world.groups["metrics"])
    return dict(zip(counts, total.tolist()))


class NewChoices:
    """What a tuner has decided since it was last asked; nothing where micro-batches are given."""

    def __init__(self, plan: MicroPlan) -> None:
        self._plan = plan
        self._told = 0

    def new(self) -> list[Choice]:
        if not isinstance(self._plan, Tuner):
            return []
        found = self._plan.decided[self._told :]
        self._told += len(found)
        return found


class Pace:
    """How far and how fast a run is: counts, the losses and scores since the last log line, time without evaluation."""

    def __init__(self, recipe: Recipe) -> None:
        self.total_steps = recipe.train.steps
        self.steps = 0
        self.samples = 0
        self._losses: deque[float] = deque(maxlen=recipe.train.log_every)
        self._scores = ClickMetrics(logits=True)
        self._auc: float | None = None
        self._paused = 0.0
        self._started = time.perf_counter()
        self._settled: tuple[float, int] | None = None
        self._began = 0

    @property
    def over(self) -> bool:
        return self.total_steps is not None and self.steps >= self.total_steps

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"samples": self.samples, "seconds": self.seconds(), "losses": list(self._losses)}

    def go_on(self, steps: int, state: dict[str, Any]) -> None:
        """From a checkpoint of `steps` steps."""
        self.steps = self._began = steps
        self.samples = int(state.get("samples", 0))
        self._started -= float(state.get("seconds", 0.0))
        self._losses.extend(state.get("losses", []))
        self._settled = self.seconds(), self.samples

    def count(self, step: Progress) -> bool:
        """Counts a step; true once, when the first steps are over."""
        self.steps += 1
        self.samples += step.samples
        self._losses.append(step.loss)
        for batch, outputs in zip(step.micros, step.outputs):
            if outputs is not None and batch.labels is not None and outputs.shape == batch.labels.shape:
                self._scores.update(outputs, batch.labels)
        if self.steps - self._began != SETTLING_STEPS:
            return False
        self._settled = self.seconds(), self.samples
        return True

    def window(self, world: World) -> dict[str, Any]:
        """The log line of the steps since the last one; training AUC is that of predictions made before each update."""
        scores = self._scores.compute(world.groups.get("metrics"))
        self._scores.reset()
        line = {"loss": self.mean_loss(), "samples": self.samples, "seconds": self.seconds()}
        line["samples_per_s"] = self.samples_per_s()
        if scores["samples"]:
            self._auc = scores["auc"]
            line |= {"auc": scores["auc"], "ne": scores["ne"]}
        return line

    def paused(self) -> _Paused:
        return _Paused(self)

    def seconds(self) -> float:
        return time.perf_counter() - self._started - self._paused

    def samples_per_s(self) -> float:
        seconds, samples = self._settled if self._settled and self.steps - self._began > SETTLING_STEPS else (0.0, 0)
        return (self.samples - samples) / max(self.seconds() - seconds, 1e-9)

    def mean_loss(self) -> float:
        return sum(self._losses) / max(1, len(self._losses))

    def fraction(self, of_data: float) -> float:
        return max(of_data, self.steps / self.total_steps if self.total_steps else 0.0)

    def status(self) -> str:
        auc = "" if self._auc is None else f"  auc {self._auc:.4f}"
        return f"step {self.steps}  {self.samples_per_s():,.0f} samples/s  loss {self.mean_loss():.4f}{auc}"


class _Paused:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __enter__(self) -> None:
        self._at = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._pace._paused += time.perf_counter() - self._at


def in_words(metrics: dict[str, float]) -> str:
    """Held-out metrics in one line."""
    if "auc" in metrics:
        text = f"held-out AUC {metrics['auc']:.4f}  NE {metrics['ne']:.4f}  log loss {metrics['log_loss']:.4f}"
        text += f"  calibration {metrics['calibration']:.3f}"
        if "bayes_auc" in metrics:
            text += f"  Bayes AUC {metrics['bayes_auc']:.4f}"
            if metrics["bayes_auc"] != 0.5:  # there is something to learn
                way = (metrics["auc"] - 0.5) / (metrics["bayes_auc"] - 0.5)
                text += f" ({way:.1%} of the way from 0.5)"
        return text
    return "  ".join(f"{k.upper()} {v:.4f}" for k, v in metrics.items() if k != "samples") or "no held-out samples"
