"""Brings newer models in while the instance serves; what cannot be loaded changes nothing but a line in the log."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from nestpipe.errors import NestPipeError, message_of
from nestpipe.infer.contract import RelayModel
from nestpipe.serve.instance.compute import ComputeThread
from nestpipe.serve.instance.relay import Relay
from nestpipe.serve.instance.source import ModelSource
from nestpipe.serve.instance.warm_up import warm_up

log = logging.getLogger("nestpipe.serve")

SWITCH_SECONDS = 60.0
"""More than re-warming ever takes."""


class LoadError(NestPipeError):
    """A newer model that does not serve; the older one still does."""


class Loader:
    """One load at a time, whoever asks."""

    def __init__(self, source: ModelSource, compute: ComputeThread, model: RelayModel) -> None:
        self._source, self._compute, self._serving = source, compute, model
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""
        """Why the last load failed; empty after one that did not."""

    def load(self) -> str:
        """Opens the newest checkpoint, warms it up and lets it take over; returns its version once new requests get it."""
        with self._lock:
            try:
                model = self._opened()
                if model.version != self._serving.version:
                    self._let_take_over(model)
                    log.info("version %s serves", model.version)
            except Exception as error:
                said = message_of(error) or type(error).__name__
                self.trouble = f"{said}; version {self._serving.version} still serves"
                log.warning("no newer version: %s", self.trouble)
                raise LoadError(self.trouble) from error
            self.trouble = ""
            return self._serving.version

    def _opened(self) -> RelayModel:
        model, old = self._source.open(), self._serving
        if model.version == old.version:
            return model
        for what in ("block", "block_floats", "max_length", "actions"):
            if getattr(model, what) != getattr(old, what):
                raise LoadError(
                    f"version {model.version} has another {what} ({getattr(model, what)}, not {getattr(old, what)}):"
                    " start an instance of its own for it"
                )
        warm_up(model)
        return model

    def _let_take_over(self, model: RelayModel) -> None:
        done, refused = threading.Event(), []

        def begin(relay: Relay) -> None:
            if model.version in relay.switch.versions:
                refused.append(f"version {model.version} still finishes its requests: try again later")
                done.set()
            else:
                relay.begin_switch(model, done.set)

        self._compute.post(begin)
        if not done.wait(SWITCH_SECONDS):
            raise LoadError("the compute thread does not answer")
        if refused:
            raise LoadError(refused[0])
        self._serving = model

    def follow(self, seconds: float = 1.0, on_load: Callable[[str], Any] = lambda version: None) -> None:
        """Loads every new checkpoint from now on, looking for one every so many seconds."""
        seen = self._newest()

        def watch() -> None:
            nonlocal seen
            while not self._ended.wait(seconds):
                newest = self._newest()
                if newest is None or newest == seen:
                    continue
                seen = newest  # one that cannot be loaded is not tried again
                with contextlib.suppress(LoadError):  # it has been logged
                    on_load(self.load())

        self._thread = threading.Thread(target=watch, name="nestpipe-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _newest(self) -> str | None:
        try:
            return self._source.newest()
        except Exception as error:  # a run that is being moved or deleted
            self.trouble = message_of(error)
            return None
