"""What a builder may vary.  Nothing here changes results: `check` proves each list equal to `serial` with the same options."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.config.pipeline import PipelineConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """What a schedule has to know about the model, its tables and the machine."""

    buckets: int = 1
    """Pieces in which dense gradients are all-reduced.  The model decides, so that all schedules add in the same order."""
    clips: bool = False
    """Gradients are scaled by their global norm before anything is updated."""
    has_deferred_layers: bool = True
    """The model has layers that can leave their weight gradients to `weight_grad`."""
    host_computes: bool = True
    """The host's own cores compute the dense part."""
    on_disk: bool = False
    """Rows are on disk, so that `writeback` takes long."""
    evicts: bool = False
    """Sweeps evict rows."""
    replicates: bool = False
    """Several groups of workers hold all rows each, and stay equal."""
    averages: bool = False
    """Several groups of workers hold all rows each, and train on their own between averages."""


@dataclass(frozen=True, slots=True)
class Options:
    """A `PipelineConfig` in which the workload has decided what was left open.  Made by `resolve`."""

    buckets: int
    clips: bool
    look_ahead: int
    """How many micro-batches `embed` is ahead of `compute` in a frozen window."""
    early_reduce: bool
    """A bucket is summed as soon as the last backward pass has finished it, not after the whole pass."""
    early_update: bool
    """Rows are updated as soon as their gradients are complete; only the store and the dense model wait for `agree`."""
    defer_weight_grads: bool
    """Backward passes leave weight gradients to the stage `weight_grad`, under every schedule: sums round differently without
    it."""
    early_prepare: bool
    """Later batches are prepared from the end of a batch's compute, when a host that computes has least to do.  Otherwise from
    the first rows of the next batch: an accelerator's host is busy at the boundary."""
    early_retrieve: bool
    """Rows are retrieved while the batch before last is still being written back: the rows it touched come from its buffer,
    which is then a third one beside those of the batch that computes and of the one that is retrieved."""
    evicts: bool
    """Rows are evicted, before any batch: the same ones under every schedule."""
    replicates: bool = False
    """Several groups of workers hold all rows each: owners of the same rows exchange their gradients in `replicate`."""
    average_every: int = 0
    """Groups of workers that hold all rows each train on their own, and every so many batches `average` makes them equal.  0:
    there is one group, or they always are equal."""

    @property
    def update_waits(self) -> bool:
        """Whether rows may be updated only after all workers have agreed."""
        return self.clips or not self.early_update


def resolve(config: PipelineConfig, workload: Workload) -> Options:
    """The options that a pipeline of this config runs with.  ValueError where the config asks for what cannot be exact."""
    if config.early_retrieve and workload.evicts:
        raise ValueError("pipeline.early_retrieve must be false, or left out, where tables evict rows (ttl, max_rows)")
    wants_early = workload.on_disk or config.schedule == "semi_async"
    retrieves_early = wants_early and not workload.evicts  # a sweep has to see what writeback wrote
    return Options(
        buckets=workload.buckets,
        clips=workload.clips,
        look_ahead=config.look_ahead,
        early_reduce=config.early_reduce,
        early_update=config.early_update,
        defer_weight_grads=config.defer_weight_grads and workload.has_deferred_layers,
        early_prepare=workload.host_computes if config.early_prepare is None else config.early_prepare,
        early_retrieve=retrieves_early if config.early_retrieve is None else config.early_retrieve,
        evicts=workload.evicts,
        replicates=workload.replicates,
        average_every=config.average_every if workload.averages else 0,
    )


DEFAULT = resolve(PipelineConfig(), Workload())
