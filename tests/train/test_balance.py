"""Load balance in training: the same mathematics, digests that can be made again, and who waited for whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.comm.world import World
from nestpipe.config.build import RecipeError
from nestpipe.data.balance.costs import AHEAD, costs_from
from nestpipe.data.source import DataError
from nestpipe.train.balance import Waiting
from nestpipe.train.streams import cost_plan, train_stream
from nestpipe.train.verify import verify
from runs import log_of, losses, recipe_of, resume, small, steps_in, train_run
from workers import run

LONG = ["data.max_length=40", "data.mean_length=12.0", "model.max_length=40", "train.batch_size=8", "model.dropout=0.0"]
FITTED = [*LONG, "data.balance=cost", "data.balance_every=5"]


def hstu(*settings: str) -> list[str]:
    return small("hstu", *LONG, *settings)


def test_cost_changes_losses_by_rounding_only(tmp_path: Path) -> None:
    """The same global batches, so the same losses step by step, and the report tells planned and measured waiting."""
    runs = {}
    for mode in ("none", "cost"):
        settings = hstu(f"data.balance={mode}", "data.balance_every=5", "train.steps=24", "dense.dtype=float64",
                        "tables.dtype=float64")  # fmt: skip
        runs[mode] = run(2, train_run, "hstu", settings, str(tmp_path / mode))
    none, cost = (losses(tmp_path / mode) for mode in runs)
    assert list(none.values()) == pytest.approx(list(cost.values()), rel=1e-9)
    assert "balance" not in runs["none"][0] and not (tmp_path / "none" / "balance.json").exists()
    told = runs["cost"][0]["balance"]
    assert told["planned"]["share"] < told["fixed"]["share"] and len(told["measured"]["workers"]) == 2
    assert 0 <= told["measured"]["share"] < 1 and told["plan_ms"] > 0 and told["held_out_error"] is not None
    assert {**told, "plan_ms": 0} == {**runs["cost"][1]["balance"], "plan_ms": 0}
    lines = [line for line in log_of(tmp_path / "cost") if "waiting" in line]
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    entries = costs_from(json.loads((tmp_path / "cost" / "balance.json").read_text())["costs"])
    assert [entry.as_dict() for entry in entries] == told["costs"] and entries[0].source == "flops"
    assert {entry.batch for entry in entries[1:]} <= {step + AHEAD for step in (5, 10, 15, 20)} and len(entries) > 1


@pytest.mark.slow
def test_a_fitted_run_can_be_made_again(tmp_path: Path) -> None:
    """balance.json of a run gives its digest, under another schedule too; resumed runs come to it as well."""
    settings = small("hstu", *FITTED, "checkpoint.every_steps=8")
    for attempt in range(5):  # times of such small steps are mostly noise: a fit may find nothing in them
        path = tmp_path / f"first-{attempt}"
        first = run(2, train_run, "hstu", [*settings, "pipeline.schedule=nested"], str(path))[0]
        if len(first["balance"]["costs"]) > 2:
            break
    assert len(first["balance"]["costs"]) > 2
    again = [*settings, f"data.balance_costs='{path / 'balance.json'}'"]
    for schedule in ("serial", "dbp"):
        made = run(2, train_run, "hstu", [*again, f"pipeline.schedule={schedule}"], str(tmp_path / schedule))[0]
        assert made["digest"] == first["digest"], schedule
        assert made["balance"]["costs"] == first["balance"]["costs"]
    resumed = run(2, resume, "hstu", [*again, "pipeline.schedule=dbp"], str(tmp_path / "dbp"), 16)[0]
    assert resumed["digest"] == first["digest"]


@pytest.mark.slow
def test_given_costs_hold_from_their_batches_on(tmp_path: Path) -> None:
    """A run that is resumed between two of them, whose plans differ, comes to the digest of the whole run."""
    costs = [{"batch": batch, "a": 0.0, "b": 0.0, "c": 0.0, **one} for batch, one in ((0, {"c": 1}), (12, {"a": 1}))]
    (tmp_path / "costs.json").write_text(json.dumps({"costs": costs}))
    settings = small("hstu", *FITTED, f"data.balance_costs='{tmp_path}/costs.json'", "checkpoint.every_steps=8")
    digest = run(2, train_run, "hstu", settings, str(tmp_path / "run"))[0]["digest"]
    (tmp_path / "costs.json").unlink()  # a checkpoint has them
    for step in (8, 16):
        assert run(2, resume, "hstu", settings, str(tmp_path / "run"), step)[0]["digest"] == digest, step


@pytest.mark.slow
def test_a_run_resumes_with_the_costs_it_had(tmp_path: Path) -> None:
    """A checkpoint holds the costs up to then, those for later batches too; the run goes on to fit."""
    settings = small("hstu", *FITTED, "checkpoint.every_steps=7", "checkpoint.keep=9")
    for attempt in range(5):  # as above
        path = tmp_path / f"run-{attempt}"
        whole = run(2, train_run, "hstu", settings, str(path))[0]["balance"]["costs"]
        step = steps_in(path)[2]
        known = [entry for entry in whole if entry["batch"] <= step + AHEAD]
        if len(known) > 2:
            break
    rest = run(2, resume, "hstu", settings, str(path), step)[0]["balance"]["costs"]
    assert rest[: len(known)] == known and len(known) > 2
    kept = json.loads((path / "balance.json").read_text())["costs"]
    assert kept == rest


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cost", "tokens"])
def test_other_workers_train_the_rest(tmp_path: Path, mode: str) -> None:
    """Resumed on 3 workers and on 1: as many samples in all as the run of 2 that was not interrupted."""
    settings = small("hstu", *LONG, f"data.balance={mode}", "data.balance_every=5", "checkpoint.every_steps=10",
                     "checkpoint.keep=9")  # fmt: skip
    whole = run(2, train_run, "hstu", settings, str(tmp_path / "run"))[0]
    told = losses(tmp_path / "run")
    for workers in (3, 1):
        found = run(workers, resume, "hstu", settings, str(tmp_path / "run"), 10)[0]
        assert (found["samples"], found["steps"]) == (whole["samples"], whole["steps"])
        now = losses(tmp_path / "run")
        assert [now[step] for step in now] == pytest.approx([told[step] for step in told], rel=2e-3)


@pytest.mark.slow
def test_token_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    settings = small("hstu", *LONG, "data.balance=tokens", "data.token_budget=90", "checkpoint.every_steps=9")
    whole = run(2, train_run, "hstu", settings, str(tmp_path / "run"))[0]
    assert run(2, resume, "hstu", settings, str(tmp_path / "run"), 9)[0]["digest"] == whole["digest"]
    told = whole["balance"]
    assert told["mode"] == "tokens" and told["fixed"]["share"] > 0 and told["measured"] is not None
    assert not (tmp_path / "run" / "balance.json").exists()


def verified(world: World, settings: list[str], steps: int) -> dict[str, Any]:
    return verify(recipe_of("hstu", settings), steps, world, lambda done, what: None)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mode", ["cost", "tokens"])
def test_every_schedule_is_serial_with_balance(workers: int, mode: str) -> None:
    """Bit for bit, with micro-batches that are balanced, clustered or tuned, and workers that get nothing of a batch."""
    for schedule, more in (
        ("dbp", ["pipeline.micro_batches=1"]),
        ("fwp", ["pipeline.micro_batches=3"]),
        ("nested", ["pipeline.micro_batches=2", "pipeline.clustering=true"]),
        ("nested", ["pipeline.micro_batches=auto"]),
    ):
        settings = hstu(f"data.balance={mode}", "train.batch_size=2", f"pipeline.schedule={schedule}", *more)
        found = run(workers, verified, settings, 12)
        assert all(one["equal"] for one in found), found[0]["first_difference"]


def test_a_fit_after_every_step_makes_nobody_wait_for_ever(tmp_path: Path) -> None:
    """Streams and schedules read ahead, and what they read ahead of waits for them."""
    settings = hstu("data.balance=cost", "data.balance_every=1", "train.steps=40", "train.batch_size=2")
    found = run(2, train_run, "hstu", [*settings, "pipeline.schedule=nested"], str(tmp_path / "run"))
    assert len({one["digest"] for one in found}) == 1 and len(found[0]["balance"]["costs"]) > 10


def test_on_a_device_the_first_cost_stays(tmp_path: Path) -> None:
    """The host does not see how long a batch computed: nothing is fitted, and nothing is told as measured."""
    settings = hstu("data.balance=cost", "data.balance_every=4", "train.steps=10", "train.device=sim")
    told = train_run(World.single(), "hstu", settings, str(tmp_path / "run"))["balance"]
    assert told["measured"] is None and told["held_out_error"] is None and told["planned"] is not None
    assert [entry["source"] for entry in told["costs"]] == ["flops"]


def test_workers_that_get_nothing_take_part(tmp_path: Path) -> None:
    """Three workers, one stream of one sample: two of them have nothing at every step."""
    settings = hstu(
        "data.balance=cost", "train.batch_size=1", "train.streams=1", "train.steps=6", "data.balance_every=2"
    )
    found = run(3, train_run, "hstu", settings, str(tmp_path / "run"))
    assert len({one["digest"] for one in found}) == 1 and found[0]["samples"] == 6


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("hstu", ["data.balance=even"], "data.balance must be one of 'none', 'tokens', 'cost'"),
        ("hstu", ["data.token_budget=100"], r"data.token_budget goes with data.balance = 'tokens'"),
        ("hstu", ["data.balance=tokens", "data.token_budget=0"], "data.token_budget must be at least 1"),
        ("hstu", ["data.balance=tokens", "data.balance_costs=b.json"], r"data.balance_costs goes with .* 'cost'"),
        ("hstu", ["data.balance=cost", "data.balance_costs=''"], "data.balance_costs must be a text such as"),
        ("hstu", ["data.balance=cost", "data.balance_every=0"], "data.balance_every must be at least 1"),
        ("dlrm", ["data.balance=cost"], "unknown key 'data.balance'"),
        ("ml-1m-hstu", ["data.task=clicks", "data.balance=tokens"], r"data.balance = 'tokens' needs histories"),
        (
            "kuairand-27k-hstu",
            ["data.shuffle=100", "data.balance=cost"],
            r"data.balance = 'cost' .* leave out data.shuffle",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_line(model: str, settings: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        recipe_of(model, settings)
    assert "\n" not in str(refused.value)


def test_data_without_lengths_is_refused() -> None:
    """A user's own source that gives no lengths."""
    recipe = recipe_of("hstu", hstu("data.balance=cost"))

    class Plain:
        extent, piece, features, dense_features = 10, 1, ("history",), 0

    with pytest.raises(DataError, match=r"needs the length of every sample, which data.kind 'sequences' does not give"):
        train_stream(recipe, Plain(), World.single())  # type: ignore[arg-type]


def test_a_run_that_names_no_costs_leaves_its_name_free(tmp_path: Path) -> None:
    """The file is read before anything is trained."""
    settings = hstu("data.balance=cost", f"data.balance_costs='{tmp_path}/none.json'")
    with pytest.raises(DataError, match=r"data.balance_costs: .*none.json cannot be read"):
        train_run(World.single(), "hstu", settings, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_balance_cannot_change_when_a_run_resumes(tmp_path: Path) -> None:
    settings = hstu("train.steps=4", "checkpoint.every_steps=2")
    train_run(World.single(), "hstu", settings, str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="data changed since the checkpoint"):
        resume(World.single(), "hstu", [*settings, "data.balance=cost"], str(tmp_path / "run"))


def test_costs_start_from_flops_where_a_model_knows_them() -> None:
    class Unknown:
        pass

    class Known:
        def history_flops(self) -> tuple[float, float, float]:
            return 0, 3, 4

    recipe = recipe_of("hstu", hstu("data.balance=cost"))
    for model, entry in ((Unknown(), (0.0, 1.0, 1e-3, "default")), (Known(), (0.0, 3.0, 4.0, "flops"))):
        plan = cost_plan(recipe, model, fitted=False)  # type: ignore[arg-type]
        assert plan is not None
        (found,) = plan.entries
        assert (found.a, found.b, found.c, found.source) == entry
    assert cost_plan(recipe_of("hstu", hstu()), Unknown(), fitted=True) is None  # type: ignore[arg-type]


def test_waiting_of_steps() -> None:
    """The mean over steps, for each worker; steps that nobody measured, or had nothing in, do not count."""
    waiting = Waiting()
    for loads in ([1.0, 2.0], [4.0, 1.0], [np.nan, 1.0], [0.0, 0.0]):
        waiting.add(np.array(loads))
    found = waiting.figures()
    assert found == {"share": pytest.approx(0.3125), "workers": [0.25, 0.375]}
    assert Waiting().figures() is None
