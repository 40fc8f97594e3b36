"""What a builder may vary.  None of it changes what is computed: `check` proves each equal to `serial` with the same options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Of a schedule, beside the number of micro-batches."""

    buckets: int = 1
    """Pieces in which dense gradients are summed over the workers.  The model decides, so that all schedules add alike."""
    clips: bool = False
    """Gradients are scaled by their global norm before anything is updated."""
    look_ahead: int = 2
    """How many micro-batches `embed` is ahead of `compute` in a frozen window."""
    early_reduce: bool = True
    """A bucket is summed as soon as the last backward pass has finished it, not after the whole pass."""
    early_update: bool = True
    """Rows are updated as soon as their gradients are complete; only the store and the dense model wait for the outcome."""

    defer_weight_grads: bool = True
    """Backward passes leave gradients of weights to a stage of their own, `weights`.  Where the model has late layers, and then
    under every schedule: sums round differently without it."""

    early_prepare: bool = True
    """Later batches are prepared from the end of a batch's compute on, when a host that computes itself has least to do.
    Otherwise from the first rows of the next batch on: where an accelerator computes, the host is needed at the boundary."""

    early_retrieve: bool = False
    """Rows are retrieved while the batch before last is still being written back: what it touched comes from its buffer, which is
    then a third one beside those of the batch that computes and of the one that is retrieved."""
    evicts: bool = False
    """Rows are evicted, before any batch: under every schedule the same ones."""

    @property
    def update_waits(self) -> bool:
        """Whether rows may be updated only after all workers have agreed."""
        return self.clips or not self.early_update


DEFAULT = Options()
