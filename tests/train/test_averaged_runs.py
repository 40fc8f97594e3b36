"""Runs with averaged replicas: verify, summary and report say that they are inexact; resumed runs are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nestpipe.cli.verify import _show
from nestpipe.comm.world import World
from nestpipe.report.run import read_run
from nestpipe.train.verify import verify
from runs import recipe_of, resume, small, train_run
from workers import run

AVERAGED = ["pipeline.group_size=1", "pipeline.replicas='average'", "tables.optimizer='rowwise_adagrad'"]


def settings(*more: str) -> list[str]:
    return small("dlrm", *AVERAGED, "pipeline.average_every=4", "pipeline.schedule='nested'", *more)


def verified(world: World) -> list[dict[str, Any]]:
    recipe = recipe_of("dlrm", settings())
    return [verify(recipe, 7, world, lambda done, what: None, against_exact=exact) for exact in (False, True)]


@pytest.mark.slow
def test_verify_never_calls_it_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: `verify` calls it as designed and not equal, and finds the difference to replicas that stay equal."""
    same, exact = run(2, verified)[0]
    assert not same["equal"] and same["as_designed"] and same["first_difference"] is None
    assert same["inexact"] == "replicas differ for up to 4 steps"
    assert _show(same) == 0
    told = capsys.readouterr().err
    assert "not equal to synchronous training, by design: replicas differ for up to 4 steps" in told
    assert "\nequal: " not in told and not told.startswith("equal")
    assert not exact["equal"] and exact["first_difference"] is not None
    assert _show(exact) == 1


def interrupted(world: World, folder: str) -> list[dict[str, Any]]:
    """Checkpoints after steps 3, 6, ... and evaluations after 5, 10, ..., neither a multiple of k = 4."""
    path, every = Path(folder), ["checkpoint.every_steps=3", "checkpoint.keep=99"]
    found = [
        train_run(world, "dlrm", settings(*every, f"pipeline.schedule='{s}'"), str(path / s))
        for s in ("serial", "nested")
    ]
    train_run(world, "dlrm", settings(*every, "train.steps=10"), str(path / "cut"))
    return [*found, resume(world, "dlrm", settings(*every), str(path / "cut"), 6)]


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_says_what_it_is(tmp_path: Path) -> None:
    """Promise: with averages at every k, evaluation and checkpoint, schedules agree, and so does a run that resumes; the summary
    and the page say that it is not exact."""
    serial, nested, resumed = run(2, interrupted, str(tmp_path))[0]
    assert serial["digest"] == nested["digest"] == resumed["digest"] and serial["metrics"] == resumed["metrics"]
    assert nested["inexact"] == "replicas differ for up to 4 steps" and nested["groups"] == 2
    assert nested["averages"] == serial["averages"] == 10  # after 3, 4, 5, 6, 8, 9, 10, 12, 15 and 16 steps
    assert nested["bytes_sent_in_averages"] > 0
    page = read_run(tmp_path / "nested")
    assert ("not exact, by design", "replicas differ for up to 4 steps") in page["facts"]
