"""Workers that see different files refuse to begin, all of them, in the same words."""

from __future__ import annotations

from nestpipe.comm.world import World
from nestpipe.train.consistency import NotConsistent, check_consistent, gather_counts
from workers import run


def compare(world: World, differ: bool) -> str:
    try:
        check_consistent(world, checkpoints="abc", training_data=100 + world.rank * differ, held_out_data=None)
    except NotConsistent as error:
        return str(error)
    return "alike"


def mine_and_others(world: World) -> dict[str, int]:
    return gather_counts(world, {f"part {world.rank}": world.rank, "shared": 7})


def test_all_refuse_together() -> None:
    assert run(3, compare, False) == ["alike"] * 3
    said = set(run(3, compare, True))
    assert len(said) == 1 and said.pop().startswith("workers see different training data: all need the same files")


def test_what_each_knows_comes_together() -> None:
    assert run(2, mine_and_others) == [{"part 0": 0, "part 1": 1, "shared": 7}] * 2
