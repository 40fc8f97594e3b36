"""A model that serves: relay, compute thread and loader, from a source of models."""

from __future__ import annotations

import time

from nestpipe.config.serving import ServingConfig
from nestpipe.infer.contract import RelayModel
from nestpipe.serve.instance.compute import ComputeThread
from nestpipe.serve.instance.loader import Loader
from nestpipe.serve.instance.relay import Relay
from nestpipe.serve.instance.source import ModelSource
from nestpipe.serve.instance.warm_up import warm_up


class Instance:
    """Ready to rank as soon as it is made."""

    def __init__(self, source: ModelSource, config: ServingConfig, model: RelayModel | None = None) -> None:
        model = source.open() if model is None else model
        warm_up(model)
        self.config = config
        self.block, self.max_length, self.actions = model.block, model.max_length, model.actions
        self.context: tuple[str, ...] = tuple(getattr(model, "context", ()))
        self.compute = ComputeThread(Relay(model, config, time.monotonic))
        self.loader = Loader(source, self.compute, model)
        self.compute.start()

    @property
    def version(self) -> str:
        version: str = self.compute.snapshot["version"]
        return version

    def stop(self) -> None:
        self.loader.stop()
        self.compute.stop()
