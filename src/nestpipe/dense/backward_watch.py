"""Watches a backward pass and reports, bucket by bucket, when its gradients are final."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from nestpipe.dense.replica import Bucket
from nestpipe.device.one_shot_event import OneShotEvent


class BackwardWatch:
    """While watching, sets events[b] once every parameter of bucket b has its gradient.

    torch adds to a parameter's gradient once per backward pass, after all uses of the parameter.  A model that runs
    several passes inside one (re-entrant checkpointing) adds more than once, so the event would come too early.  That
    raises RuntimeError.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket.parameters}
        self._sizes = [len(bucket.parameters) for bucket in buckets]

    @contextlib.contextmanager
    def watching(self, events: list[OneShotEvent]) -> Iterator[None]:
        """Around one backward pass."""
        missing, seen = list(self._sizes), set[nn.Parameter]()

        def added(parameter: nn.Parameter) -> None:
            if parameter in seen:
                raise RuntimeError(
                    "a parameter's gradient was added to twice in one backward pass (re-entrant checkpointing, or a "
                    "backward() inside the model): set pipeline.early_reduce = false"
                )
            seen.add(parameter)
            bucket = self._bucket_of[parameter]
            missing[bucket] -= 1
            if not missing[bucket]:
                events[bucket].set()

        # Registered anew for each pass, so that they run after hooks of the user, which may still change the gradient.
        handles = [p.register_post_accumulate_grad_hook(added) for p in self._bucket_of if p.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
