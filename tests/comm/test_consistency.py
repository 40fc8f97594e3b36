"""Workers that see different files, or are given different pipelines, refuse to start: all of them, in the same words."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from nestpipe import EmbeddingBagCollection, EmbeddingBagConfig, PipelineConfig, TrainPipeline
from nestpipe.comm.consistency import NotConsistent, check_consistent, gather_counts
from nestpipe.comm.world import World
from workers import run


def compare(world: World, differ: bool) -> str:
    try:
        check_consistent(world, checkpoints="abc", training_data=100 + world.rank * differ, held_out_data=None)
    except NotConsistent as error:
        return str(error)
    return "alike"


class Momentum:
    """A user's own optimizer, with no repr."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def state_width(self, dim: int) -> int:
        return dim

    def apply(self, values: Any, state: Any, grads: Any, lr: float, step: int) -> None:
        values -= lr * grads


def make(world: World, differs: str) -> str:
    """A pipeline whose workers differ in one thing, or in nothing."""
    table = EmbeddingBagConfig("t", embedding_dim=4 + 4 * world.rank * (differs == "tables"), feature_names=["f"])
    model = nn.Module()
    model.rows = EmbeddingBagCollection([table])
    try:
        TrainPipeline(
            model,
            None,
            Momentum(0.1 + world.rank * (differs == "sparse optimizer")),  # type: ignore[arg-type]
            PipelineConfig(micro_batches=1 + world.rank * (differs == "pipeline config")),
            seed=world.rank * (differs == "seed"),
            world=world,
        ).close()
    except NotConsistent as error:
        return str(error)
    return "the same"


@pytest.mark.parametrize("differs", ["", "seed", "sparse optimizer", "pipeline config", "tables"])
def test_pipelines_that_differ_are_refused(differs: str) -> None:
    """Promise: workers that would train different things, or hang in an exchange, are told what differs before the first step."""
    said = set(run(2, make, differs))
    wanted = f"workers see different {differs}: give TrainPipeline the same on every worker" if differs else "the same"
    assert len(said) == 1 and said.pop().startswith(wanted)


def mine_and_others(world: World) -> dict[str, int]:
    return gather_counts(world, {f"part {world.rank}": world.rank, "shared": 7})


def test_all_refuse_together() -> None:
    assert run(3, compare, False) == ["alike"] * 3
    said = set(run(3, compare, True))
    assert len(said) == 1 and said.pop().startswith("workers see different training data: all need the same files")


def test_what_each_knows_comes_together() -> None:
    assert run(2, mine_and_others) == [{"part 0": 0, "part 1": 1, "shared": 7}] * 2
