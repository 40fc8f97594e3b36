"""`TrainPipeline`: composes the sparse and the dense side with a schedule and the engine that runs it."""

from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.pipeline.progress import NotFinite, Progress

__all__ = ["NotFinite", "Progress", "TrainPipeline"]
