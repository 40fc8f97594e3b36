"""Runs every kind of step of a model once before it serves: kernels are compiled, files are mapped, shapes are checked."""

from __future__ import annotations

import numpy as np

from nestpipe.errors import NestPipeError
from nestpipe.infer.contract import History, RelayModel
from nestpipe.serve.instance.scratch import Scratch


class WarmUpError(NestPipeError):
    """A model that cannot rank."""


def warm_up(model: RelayModel, candidates: int = 256) -> None:
    """Ranks histories of one event, of a few blocks and of the whole window; WarmUpError if it gives no scores."""
    for events in sorted({0, 1, min(model.max_length, 2 * model.block + 1), model.max_length}):
        times = np.arange(events, dtype=np.int64)
        history = model.window(History(np.arange(events, dtype=np.int64), np.zeros(events, np.int32), times))
        complete = model.complete_blocks(history)
        scratch = Scratch(complete, model.block_floats)
        blocks = [scratch.block(index) for index in range(complete)]
        for index in range(complete):
            model.encode_block(history, index, blocks[: index + 1])
        ranking = model.open(history, events, blocks)
        for m in (candidates, 1):
            scores = ranking.score(np.arange(m, dtype=np.int64))
            if scores.shape != (m, len(model.actions)) or scores.dtype != np.float32:
                raise WarmUpError(f"version {model.version} gives scores of {scores.dtype} {list(scores.shape)}")
            if not np.isfinite(scores).any():
                raise WarmUpError(f"version {model.version} gives no finite score: its weights are damaged")
