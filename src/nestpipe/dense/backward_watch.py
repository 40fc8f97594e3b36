"""Watches a backward pass and says, bucket by bucket, when its gradients are final."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from nestpipe.dense.replica import Bucket
from nestpipe.engine.one_shot_event import OneShotEvent


class BackwardWatch:
    """While watching, events[b] is set once every parameter of bucket b has its gradient.

    torch adds to a parameter's gradient once per backward pass, after all uses of the parameter.  A model that runs several
    passes inside one (re-entrant checkpointing) would be told too early: that is noticed and refused.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._bucket_of = {p: b for b, bucket in enumerate(buckets) for p in bucket.parameters}
        self._sizes = [len(bucket.parameters) for bucket in buckets]
        self._missing: list[int] = []
        self._seen: set[nn.Parameter] = set()
        self._events: list[OneShotEvent] | None = None
        self._handles = {p: p.register_post_accumulate_grad_hook(self._added) for p in self._bucket_of}

    @contextlib.contextmanager
    def watching(self, events: list[OneShotEvent]) -> Iterator[None]:
        """Around one backward pass."""
        for parameter, handle in self._handles.items():
            hooks = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:  # a hook that the user added since may still change the gradient
                handle.remove()
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._added)
        self._missing, self._seen = list(self._sizes), set()
        self._events = events
        try:
            yield
        finally:
            self._events = None

    def _added(self, parameter: nn.Parameter) -> None:
        if self._events is None:
            return
        if parameter in self._seen:
            raise RuntimeError(
                "a parameter's gradient was added to twice in one backward pass (re-entrant checkpointing, or a backward() "
                "inside the model): set pipeline.early_reduce = false"
            )
        self._seen.add(parameter)
        bucket = self._bucket_of[parameter]
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self._events[bucket].set()
