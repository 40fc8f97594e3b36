"""FuXi on generated long histories: what the workers of a rung train where lengths are as uneven as in a real log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nestpipe.data.balance.balanced_stream import BalancedStream
from nestpipe.data.balance.costs import CostFrom, CostPlan
from nestpipe.data.batch import Batch
from nestpipe.data.long_histories import LongHistoriesData
from nestpipe.data.shares import SharedStream
from nestpipe.data.source import is_indexed
from nestpipe.models.fuxi import FuXi, FuXiConfig
from nestpipe.pipeline import TrainPipeline


class FuXiWorkload:
    """Alpha.  Global batches are dealt to workers by the model's FLOPs, or, without balance, as many histories to each."""

    def __init__(self, config: dict[str, Any], workers: int) -> None:
        self._config, self._workers = config, workers

    def model(self) -> nn.Module:
        config = self._config
        settings = FuXiConfig(
            config["dim"], config["blocks"], config["heads"], max_length=config["length"], dropout=0.0
        )
        return FuXi(settings)

    def fill_tables(self, pipeline: TrainPipeline) -> None:
        """Nothing to do: the seed gives a row its first value when it is first trained."""

    def batches(self, rank: int) -> Iterator[Batch]:
        pool = list(itertools.islice(self._stream(rank), self._config["distinct_batches"]))
        return (batch.select(torch.arange(len(batch))) for batch in itertools.cycle(pool))  # new tensors, as a reader's

    def _stream(self, rank: int) -> Iterator[Batch]:
        config = self._config
        data = LongHistoriesData(
            users=1_000_000,
            items=config["items"],
            groups=config["groups"],
            median_length=config["median_length"],
            max_length=config["length"],
            negatives=config["negatives"],
            negatives_from=config["negatives_from"],
            eval_users=0,
        )
        source = data.open("train", config["seed"])
        assert is_indexed(source)
        where: Any = {"rank": rank, "workers": self._workers}
        if not config["balance"]:
            return SharedStream(source, config["batch"], **where)
        model = self.model()
        assert isinstance(model, FuXi)
        costs = CostPlan([CostFrom(0, *model.history_flops(), "flops")])
        return BalancedStream(source, config["batch"], costs, **where)
