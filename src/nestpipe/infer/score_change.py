"""How far scores move between two openings of a model: what fewer bits in a row cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nestpipe.data.source import Source
from nestpipe.infer.open_run import OpenModel
from nestpipe.infer.predict import scores_of
from nestpipe.infer.scoring import first_samples

SAMPLES = 20_000
"""Samples that are compared at most."""
TOP = 10


@dataclass(frozen=True)
class ScoreChange:
    samples: int
    largest: float
    """Of any score; on sequences, of those items that are among the best in both."""
    relative: float
    """Root mean square of the change over the standard deviation of scores."""
    same_top: float | None
    """Share of samples whose best TOP items are the same, in any order; None where items are not ranked."""

    def __str__(self) -> str:
        text = f"scores of {self.samples:,} samples: largest change {self.largest:.2g}, "
        text += f"rms {self.relative:.2g} of their standard deviation"
        return text if self.same_top is None else f"{text}; the best {TOP} items the same for {self.same_top:.1%}"


def score_change(before: OpenModel, after: OpenModel, source: Source, batch_size: int) -> ScoreChange | None:
    """Over the first samples of a source; None if it has none."""
    head = first_samples(source, SAMPLES)
    old: list[float] = []
    new: list[float] = []
    samples = same = 0
    ranked = False
    for (a, _), (b, _) in zip(scores_of(before, head, batch_size, TOP), scores_of(after, head, batch_size, TOP)):
        samples += a.num_rows
        ranked = "items" in a.schema.names
        if not ranked:
            old += a["logit"].to_pylist()
            new += b["logit"].to_pylist()
            continue
        columns = [part[name].to_pylist() for part in (a, b) for name in ("items", "scores")]
        for items, scores, items_now, scores_now in zip(*columns):
            now = dict(zip(items_now, scores_now))
            same += set(items) == set(now)
            pairs = [(score, now[item]) for item, score in zip(items, scores) if item in now]
            old += [pair[0] for pair in pairs]
            new += [pair[1] for pair in pairs]
    if not samples:
        return None
    change, spread = np.array(new) - np.array(old), float(np.std(old)) if old else 0.0
    largest = float(np.abs(change).max()) if len(change) else 0.0
    relative = float(np.sqrt(np.square(change).mean())) / spread if spread else 0.0
    return ScoreChange(samples, largest, relative, same / samples if ranked else None)
