"""A run's directory: recipe.toml, metrics.jsonl, summary.json, trace.json; data.json of a log; `launch` until the run ends."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from nestpipe.config.recipe import Recipe
from nestpipe.errors import NestPipeError
from nestpipe.launch.restarts import LAUNCH_FILE
from nestpipe.train.tensorboard import Events


class RunError(NestPipeError, ValueError):
    """The run directory cannot be used.  The message is one line and says what to do."""

    exit_code = 2


class RunDirectory:
    """One run's files.  Only rank 0 writes; on other ranks every method does nothing.

    Never writes to an existing run, unless it resumes that run.  `path` should be equal on all ranks: choose it
    (`default_path`) before the workers start, because the default contains the time.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: str | Path | None = None,
        rank: int = 0,
        *,
        resuming: bool = False,
        launch: str | None = None,
        tensorboard: bool = False,
    ) -> None:
        """`resuming`: the run exists, and stays unchanged until `rewind_to`.  `launch`: may resume it on a restart.
        `tensorboard`: what metrics.jsonl has goes into event files, too."""
        self.path = default_path(recipe.name) if path is None else Path(path)
        self._writes = rank == 0
        self._recipe = recipe.to_toml()
        self._launch = launch
        self._new = not resuming
        self._events = Events(self.path) if tensorboard and self._writes else None
        if self._writes and not resuming:
            with _one_line(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            refuse_existing(self.path)
            self._write_launch()
            with _one_line(self.path):
                # "x", not "w": if two runs start in one directory at the same time, only one gets it.
                (self.path / "recipe.toml").open("x").close()
            self._write("recipe.toml", self._recipe)

    def withdraw(self) -> None:
        """Removes what a run that never began has written, so that the next try may have its name."""
        if self._writes and self._new:
            with suppress(OSError):
                for name in ("recipe.toml", "data.json", "balance.json", LAUNCH_FILE):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

    def _write_launch(self) -> None:
        """Comes first, so that a restarted launch knows its run however early it died."""
        if self._launch is not None:
            self._write(LAUNCH_FILE, self._launch)

    def rewind_to(self, step: int) -> None:
        """Drops log lines of later steps, because the run resumes after this one."""
        if not self._writes:
            return
        self._write_launch()
        path = self.path / "metrics.jsonl"
        with _one_line(path):
            (self.path / "summary.json").unlink(missing_ok=True)
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        self._write("metrics.jsonl", "".join(line + "\n" for line in kept))
        if self._events is not None:
            with _one_line(self.path):
                self._events.begin_again(json.loads(line) for line in kept)
        self._write("recipe.toml", self._recipe)

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl.  NaN and infinity become null."""
        if self._writes:
            record = plain(record)
            path = self.path / "metrics.jsonl"
            with _one_line(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
            if self._events is not None:
                with _one_line(self.path):
                    self._events.write([record])

    def write_data(self, statistics: Mapping[str, Any] | None) -> None:
        """Writes data.json, what there is to tell about the training data, if anything."""
        if statistics:
            self._write("data.json", json.dumps(plain(statistics), allow_nan=False, indent=2) + "\n")

    def write_balance(self, costs: Sequence[Mapping[str, Any]]) -> None:
        """Writes balance.json, what histories cost from which batch on, if anything is balanced by it."""
        if costs:
            self._write("balance.json", json.dumps(plain({"costs": costs}), allow_nan=False, indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json whole or not at all, even if the machine stops.  Ends the run: no restart resumes it."""
        self._write("summary.json", json.dumps(plain(summary), allow_nan=False, indent=2) + "\n")
        if self._events is not None:
            self._events.close()
        if self._writes:
            with _one_line(self.path):
                (self.path / LAUNCH_FILE).unlink(missing_ok=True)

    def write_trace(self, trace: Mapping[str, Any] | None) -> None:
        """Writes trace.json, the last steps, whole or not at all.  None, as on other ranks: writes nothing."""
        if trace is not None:
            self._write("trace.json", json.dumps(trace) + "\n")

    def _write(self, name: str, text: str) -> None:
        if not self._writes:
            return
        path, temporary = self.path / name, self.path / f"{name}.tmp"
        try:
            with _one_line(path):
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
                # Makes the rename durable.
                directory = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        except RunError:
            with suppress(OSError):
                temporary.unlink()
            raise


def remove_half_files(run: str | Path) -> None:
    """What a worker that was killed while it wrote has left beside its whole files.  Only when all workers have ended."""
    for path in Path(run).glob("*.json.tmp"):
        with suppress(OSError):
            path.unlink()


def _step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity for a torn or foreign line."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def refuse_existing(path: Path) -> None:
    """Raises RunError if a new run would overwrite another."""
    with _one_line(path):
        if path.exists() and any(path.iterdir()):
            raise FileExistsError


def default_path(name: str) -> Path:
    """runs/<name>-<now>, with a number appended if another run began in the same second."""
    stem = re.sub(r"[^\w.-]+", "-", name) + datetime.now().strftime("-%Y%m%d-%H%M%S")
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}-{number}"
    return path


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise RunError(f"'{path}' already exists: choose another directory with --run, or remove it") from error
    except OSError as error:
        raise RunError(
            f"cannot write '{path}': {error.strerror or error}; choose another directory with --run"
        ) from error


def plain(value: Any) -> Any:
    """A value that JSON can hold: tensors and numpy scalars become numbers, NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # scalars and arrays of torch and numpy
        return plain(value.tolist())
    return value
