"""Shard groups and replica groups: who is in them, who owns a key, and that messages stay among them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.comm.exchange import Exchange, Shared
from nestpipe.comm.topology import group_size, one_group, sent_inside, split
from nestpipe.comm.world import World
from nestpipe.config.pipeline import PipelineConfig
from workers import run


def test_sizes_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: none is all workers, "host" those of this host, a number itself; a wrong one gets one line with choices."""
    assert [group_size(None, 6), group_size(3, 6), group_size(6, 6), group_size(1, 6)] == [6, 3, 6, 1]
    assert group_size(4, 1) == 1  # a single worker, as when a notebook tries a recipe of a cluster
    with pytest.raises(ValueError, match=r"pipeline\.group_size .* 4 does not: with 6 workers it can be 1, 2, 3, 6$"):
        group_size(4, 6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE is not set: .* 1, 2, 4$"):
        group_size("host", 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert group_size("host", 4) == 2
    with pytest.raises(ValueError, match=r"this host has 2 workers: with 3 workers it can be 1, 3$"):
        group_size("host", 3)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "hosts", "2"])
def test_settings_that_are_no_size(wrong: object) -> None:
    """Promise: what can be no number of workers is refused when the settings are made."""
    with pytest.raises(ValueError, match=r"pipeline\.group_size must be"):
        PipelineConfig(group_size=wrong)  # type: ignore[arg-type]


def test_one_group_is_the_world() -> None:
    """Promise: by default the shard group is all workers over the world's own connections, and nobody has a replica."""
    world = World(2, 5, {}, 1.0)
    for topology in (one_group(world), split(world, 5)):
        assert (topology.shard.rank, topology.shard.size, topology.shard.groups) == (2, 5, world.groups)
        assert topology.replicas.size == 1 and topology.replicas.counts


def talk(world: World, size: int) -> tuple[list[int], list[int], list[float], list[float], dict[int, int], bool]:
    """Members of both groups, what came from them, and what was counted."""
    topology = split(world, size)
    shard, replicas = topology.shard, topology.replicas
    heard = []
    traffics = []
    for members, lane in ((shard, "network"), (replicas, "replica")):
        exchange = Exchange(members, lane)
        rows = np.full((members.size, 3), -1.0, np.float32)
        rows[members.rank] = world.rank
        exchange.share_rows([Shared(rows, [1] * members.size)])
        heard.append(rows[:, 0].tolist())
        traffics.append(exchange.traffic)
    between = traffics[1].by_rank()
    assert sent_inside(shard, traffics[0].by_rank())[1] == 0 and sent_inside(shard, between)[0] == 0
    assert traffics[1].by_rank("replica") == between and not any(traffics[1].by_rank("network").values())
    keys = np.arange(100)
    owned = torch.from_numpy(shard.owns(np.zeros(100, np.uint16), keys).astype(np.int64))
    Exchange(world, "metrics").all_reduce(owned)
    once_a_group = bool((owned == replicas.size).all())
    return list(shard.ranks), list(replicas.ranks), heard[0], heard[1], between, once_a_group


@pytest.mark.parametrize(("workers", "size"), [(2, 1), (4, 2), pytest.param(6, 3, marks=pytest.mark.slow)])
def test_messages_stay_in_their_group(workers: int, size: int) -> None:
    """Promise: groups are consecutive ranks, each key has one owner in each, and bytes are counted by who got them."""
    for rank, (mine, others, inside, between, sent, once_a_group) in enumerate(run(workers, talk, size)):
        first = rank - rank % size
        assert mine == inside == list(range(first, first + size))
        assert others == between == list(range(rank % size, workers, size))
        assert sent == {other: 12 for other in others if other != rank} and once_a_group
