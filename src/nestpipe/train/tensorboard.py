"""The figures of metrics.jsonl as TensorBoard events, in a folder beside it.  Needs the optional package `tensorboard`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nestpipe.errors import NestPipeError

FOLDER = "tensorboard"


class NoTensorBoard(NestPipeError, ValueError):
    """The package is missing; the message says how to install it."""

    exit_code = 2


def check_installed() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise NoTensorBoard(
            "--log tensorboard needs the package tensorboard: pip install -c constraints.txt -e '.[tensorboard]'"
        )


def figures(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl with their names: `train/loss`, `eval/auc`, `memory/resident_bytes`."""
    for name, value in record.items():
        if name != "step":
            yield from _inside(name, value) if isinstance(value, Mapping) else _inside("train", {name: value})


def _inside(path: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _inside(f"{path}/{name}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}/{name}", float(value)


class Events:
    """A run's events.  What was written is on disk when a method returns."""

    def __init__(self, run: Path) -> None:
        check_installed()
        self._folder = run / FOLDER
        self._writer: Any = None

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines of metrics.jsonl, as they stand there: null for what is no number."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to load

            self._writer = SummaryWriter(str(self._folder))
        for record in records:
            for name, value in figures(record):
                self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def begin_again(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replaces all that is there: a run that resumes takes back steps, and an event file cannot be shortened."""
        self.close()
        if self._folder.is_dir():
            for path in self._folder.glob("events.out.tfevents.*"):
                path.unlink()
        self.write(records)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
