"""Which feature uses which table, group by group, and the keys of a batch in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.data.batch import Batch
from nestpipe.keys.window import Window, plan_window
from nestpipe.tables.group import TableGroup


@dataclass(frozen=True)
class GroupLookups:
    """The lookups of one group: lookup i is feature features[i] in table number tables[i].

    A feature may use several tables.
    """

    group: TableGroup
    features: tuple[str, ...]
    tables: np.ndarray

    def plan(self, micros: Sequence[Batch], workers: int, by_micro: bool = False) -> tuple[Window, np.ndarray]:
        """The window of these micro-batches, and the [N, L] ends of each lookup's occurrences in its `inverse`.

        `by_micro`: dedup each micro-batch separately.
        """
        keys: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        for micro in micros:
            features = micro.sparse_features
            places = np.array(features.places(self.features))
            values, by_feature = features.values().numpy(), features.offsets().numpy()[:: max(1, features.stride())]
            starts, stops = (by_feature[places], by_feature[places + 1]) if features.stride() else (places * 0,) * 2
            lengths.append(stops - starts)
            if (places[1:] == places[:-1] + 1).all():
                keys.append(values[starts[0] : stops[-1]])
            else:
                keys.extend(values[start:stop] for start, stop in zip(starts, stops))
        ends = np.cumsum(np.concatenate(lengths)) if lengths else np.empty(0, np.int64)
        count = len(self.features)
        window = plan_window(
            np.concatenate(keys) if keys else np.empty(0, np.int64),
            ends,
            np.tile(self.tables, len(micros)),
            np.repeat(np.arange(len(micros), dtype=np.int32), count),
            max(1, len(micros)),
            workers,
            by_micro,
        )
        return window, ends.reshape(len(micros), count)
