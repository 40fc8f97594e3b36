"""What a run shows while it runs: a live line on a terminal, plain lines elsewhere.  Worker 0 only."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_EVERY = 5.0
"""Seconds between lines where there is no terminal."""


class Display:
    """`show` as often as you like; it draws a few times a second.  Does nothing where `on` is false."""

    def __init__(self, title: str, on: bool = True) -> None:
        self.on = on
        self.title = title
        self.console = Console(stderr=True)
        self._last = 0.0
        self._started = time.perf_counter()
        self._progress: Progress | None = None

    def __enter__(self) -> Display:
        if self.on and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._progress.start()
            self._task = self._progress.add_task(self.title, total=1.0, status="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, fraction: float, status: str) -> None:
        """`fraction` of the run is done; `status` says how it goes."""
        if not self.on:
            return
        if self._progress is not None:
            self._progress.update(self._task, completed=min(fraction, 1.0), status=status)
            return
        now = time.perf_counter()
        if now - self._last < PLAIN_EVERY:
            return
        self._last = now
        elapsed = now - self._started
        left = f"{elapsed * (1 - fraction) / fraction:.0f} s left" if fraction > 0 else "estimating"
        print(f"{self.title} {fraction:4.0%}  {status}  {elapsed:.0f} s, {left}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.on:
            self.console.print(text, highlight=False, soft_wrap=True)
