"""Systems on simulated clusters: what is published, what must be so whatever the profile, and what a profile may hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nestpipe.cli.main import main
from nestpipe.sim.figures import Settings, run, table
from nestpipe.sim.profile import ProfileError, load_profile, read_profile
from nestpipe.sim.published import FIGURES, compare
from nestpipe.sim.sweep import AXES, sweep
from nestpipe.sim.systems import SYSTEMS, exact
from nestpipe.sim.topology import parse

PAPER = load_profile("paper-npu")


@pytest.mark.slow
def test_published_figures_are_met_with_few_fitted_numbers():
    found = compare(PAPER)
    assert [one.what for one in found if not one.holds] == []
    promised = [figure for figure in FIGURES if figure.promised]
    assert len(promised) == 14
    assert len(PAPER.fitted) <= len(FIGURES) / 2


@pytest.mark.slow
def test_the_best_number_of_micro_batches_is_between_the_extremes():
    rows = [row for row in sweep("micro", PAPER, 1536, Settings()) if row["system"] == "nestpipe"]
    assert 2 < min(rows, key=lambda row: row["step_ms"])["value"] < 32


def test_check_refuses_the_stale_prefetcher_alone():
    verdicts = {name: exact(name) for name, system in SYSTEMS.items() if not system.grouped}
    assert verdicts == {"torchrec": "yes", "uniemb": "no", "dbp": "yes", "fwp": "yes", "nestpipe": "yes"}


@pytest.mark.parametrize("name", SYSTEMS)
def test_exposed_parts_add_up_to_the_step(name):
    one = run(SYSTEMS[name], PAPER, 64, Settings(steps=20))
    parts = one.lookup_ms + one.exposed_comm_ms + one.dense_ms + one.compute_ms
    assert parts == pytest.approx(one.step_ms, rel=1e-6)


@pytest.mark.slow
def test_no_schedule_is_faster_than_compute_or_slower_than_serial():
    rows = {row["system"]: row for row in table(PAPER, [256], settings=Settings(steps=20))}
    alone = PAPER.stages["compute"].device
    assert all(
        alone <= row["step_ms"] <= rows["torchrec"]["step_ms"] + 1e-9 for row in rows.values() if row["system"] != "fwp"
    )
    assert rows["nestpipe"]["step_ms"] < min(rows["dbp"]["step_ms"], rows["fwp"]["step_ms"])


def test_stragglers_cost_more_where_more_workers_wait_for_each_other():
    jittery = replace(PAPER, jitter=0.05)

    def lost(workers: int) -> float:
        steps = [run(SYSTEMS["nestpipe"], one, workers, Settings(steps=20)).step_ms for one in (jittery, PAPER)]
        return steps[0] - steps[1]

    assert 0 < lost(4) < lost(512)


def test_one_worker_has_nobody_to_exchange_with():
    one = run(SYSTEMS["nestpipe"], PAPER, 1, Settings(steps=20))
    assert one.exposed_comm_ms == one.raw_comm_ms == 0.0


def test_a_hierarchy_helps_where_every_peer_costs():
    flat = run(SYSTEMS["torchrec"], PAPER, 512, Settings(steps=15))
    hosts = run(SYSTEMS["torchrec"], PAPER, 512, Settings(steps=15, topology="hierarchical:8"))
    assert hosts.exposed_comm_ms < flat.exposed_comm_ms


@pytest.mark.parametrize("text", ["groups:0", "groups:", "ring", "groups:7", "hierarchical:-1", "full-mesh:2"])
def test_topologies_that_cannot_be(text):
    with pytest.raises(ValueError, match=r"topology|divided"):
        parse(text, 64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"samples": 0}, "samples must be at least 1"),
        ({"samples": "many"}, "profile.samples"),
        ({"colour": 1}, "unknown key 'profile.colour'"),
        ({"network": {"mb_per_ms": 0.0}}, "network.mb_per_ms must be above 0"),
        ({"network": {"share": 2.0}}, "network.share"),
        ({"network": {"rows_mb": float("nan")}}, "network.rows_mb must be a number"),
        ({"stages": {"compute": {"device": -1.0}}}, "stages.compute.device must be at least 0"),
        ({"stages": {"lunch": {}}}, "stages.lunch: there is no such stage"),
        ({"stages": 3}, "stages must be a table"),
    ],
)
def test_profiles_that_cannot_be_used_say_what_to_change(change, says):
    values = {"title": "t", "samples": 8, "network": {}, "stages": {"compute": {"device": 1.0}}, **change}
    with pytest.raises(ProfileError, match=says) as caught:
        read_profile(values, "p.toml")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("p.toml: ")


@pytest.mark.slow
def test_the_command_prints_the_published_table_and_holds(tmp_path, capsys):
    place = tmp_path / "sim.json"
    assert main(["simulate", "--json", str(place)]) == 0
    result = json.loads(place.read_text())
    keys = ("system", "workers", "step_ms", "lookup_ms", "exposed_comm_ms", "speedup", "qps", "scaling_efficiency")
    assert [row["system"] for row in result["rows"]] == list(SYSTEMS)
    assert all(key in row for row in result["rows"] for key in keys)
    assert all(one["holds"] for one in result["published"])
    shown = capsys.readouterr().out
    assert "28 published figures" in shown and "assumed:" in shown


@pytest.mark.slow
def test_a_profile_that_misses_what_it_promises_fails(monkeypatch, capsys):
    from nestpipe.sim import profile

    wrong = {**PAPER.stages, "compute": replace(PAPER.stages["compute"], device=2000.0)}
    monkeypatch.setattr(profile, "load_profile", lambda name: replace(PAPER, stages=wrong))
    assert main(["simulate"]) == 1
    assert "NO" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("axis", sorted(AXES))
def test_sweeps_are_drawn(axis, tmp_path, monkeypatch):
    monkeypatch.setitem(AXES, axis, replace(AXES[axis], values=AXES[axis].values[:3]))
    picture = tmp_path / "sweep.svg"
    assert main(["simulate", "--workers", "64", "--steps", "12", "--sweep", axis, "--svg", str(picture)]) == 0
    text = picture.read_text()
    assert text.startswith("<svg") and text.count("<polyline") == len(AXES[axis].systems) and "nan" not in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", "mars"], "no profile 'mars'"),
        (["--workers", "many"], "--workers"),
        (["--workers", "6", "--system", "2d-sp"], "6 workers cannot be divided by the 4"),
        (["--system", "ps"], "--system must be one of"),
        (["--sweep", "moon"], "--sweep must be one of"),
        (["--svg", "x.svg"], "--svg draws a sweep"),
        (["--micro", "0"], "--micro must be at least 1"),
        (["--micro", "1024"], "--micro 1024 is more than the 512 samples"),
        (["--link-speed", "0"], "--link-speed must be above 0"),
        (["--skew", "-1"], "--skew must be at least 0"),
        (["--jitter", "-1"], "jitter must be at least 0"),
        (["--steps", "3"], "--steps must be more than 10"),
        (["--topology", "ring"], "--topology must be one of"),
        (["--calibrate", "lab.txt"], "--calibrate lab.txt"),
    ],
)
def test_bad_flags_are_one_line(arguments, says, capsys):
    assert main(["simulate", *arguments]) != 0
    error = capsys.readouterr().err.strip()
    assert says in error and "\n" not in error
