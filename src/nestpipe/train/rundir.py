"""The directory that a run leaves behind: recipe.toml, metrics.jsonl, summary.json, trace.json; `launch` until it is over."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from nestpipe.config.recipe import Recipe
from nestpipe.errors import NestPipeError
from nestpipe.launch.restarts import LAUNCH_FILE


class RunError(NestPipeError, ValueError):
    """The run directory cannot be used; the message is one line and says what to do."""

    exit_code = 2


class RunDirectory:
    """One run's files, written by rank 0 alone; on other ranks every method does nothing.

    An existing run is never written to, unless it goes on.  `path` should be the same on all ranks: choose it (`default_path`)
    before the workers start, as the default has the time in it.
    """

    def __init__(
        self,
        recipe: Recipe,
        path: str | Path | None = None,
        rank: int = 0,
        *,
        goes_on: bool = False,
        launch: str | None = None,
    ) -> None:
        """`goes_on`: the run is there already, and is left as it is until `rewind_to`.  `launch`: who may go on unasked."""
        self.path = default_path(recipe.name) if path is None else Path(path)
        self._writes = rank == 0
        self._recipe = recipe.to_toml()
        self._launch = launch
        if self._writes and not goes_on:
            with _one_line(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            refuse_existing(self.path)
            self._write_launch()
            with _one_line(self.path):
                # "x" and not "w": of two runs that start in one directory at the same time, one gets it.
                (self.path / "recipe.toml").open("x").close()
            self._write("recipe.toml", self._recipe)

    def _write_launch(self) -> None:
        """First of all, so that whoever is started again knows the run however little there is of it."""
        if self._launch is not None:
            self._write(LAUNCH_FILE, self._launch)

    def rewind_to(self, step: int) -> None:
        """The run goes on after so many steps: what it logged of later ones is dropped."""
        if not self._writes:
            return
        self._write_launch()
        path = self.path / "metrics.jsonl"
        with _one_line(path):
            (self.path / "summary.json").unlink(missing_ok=True)
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if _step_of(line) <= step]
        self._write("metrics.jsonl", "".join(line + "\n" for line in kept))
        self._write("recipe.toml", self._recipe)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; it is in the file when this returns.  nan and infinity become null."""
        if self._writes:
            line = json.dumps(plain(record), allow_nan=False)
            path = self.path / "metrics.jsonl"
            with _one_line(path), path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json whole or not at all, even if the machine stops in between.  The run is over: no launch goes on with
        it unasked."""
        self._write("summary.json", json.dumps(plain(summary), allow_nan=False, indent=2) + "\n")
        if self._writes:
            with _one_line(self.path):
                (self.path / LAUNCH_FILE).unlink(missing_ok=True)

    def write_trace(self, trace: Mapping[str, Any] | None) -> None:
        """Write trace.json, the last steps, whole or not at all; None, on other ranks: nothing."""
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
                # The rename itself is on disk only when the directory is.
                directory = os.open(self.path, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        except RunError:
            with suppress(OSError):
                temporary.unlink()
            raise


def _step_of(line: str) -> float:
    """Of a line of metrics.jsonl; one that is torn or not ours counts as after everything."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def refuse_existing(path: Path) -> None:
    """RunError where a run that begins would write over another."""
    with _one_line(path):
        if path.exists() and any(path.iterdir()):
            raise FileExistsError


def default_path(name: str) -> Path:
    """runs/<name>-<now>, with a number behind it when another run has begun in the same second."""
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
        raise RunError(f"'{path}' exists already: choose another place with --run, or remove it") from error
    except OSError as error:
        raise RunError(f"cannot write '{path}': {error.strerror or error}; choose another place with --run") from error


def plain(value: Any) -> Any:
    """What JSON can hold: tensors and numpy scalars as numbers, nan and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # torch and numpy, scalars and arrays alike
        return plain(value.tolist())
    return value
