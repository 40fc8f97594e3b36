"""Systems on simulated clusters: what is published, what must be so whatever the profile, and what a profile may hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nestpipe.cli.main import main
from nestpipe.schedule import build_by, nested
from nestpipe.schedule.action import act
from nestpipe.sim.figures import Settings, cluster_of, run, table
from nestpipe.sim.group_sweep import sizes
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
    assert len(promised) == 17
    assert len(PAPER.fitted) <= len(FIGURES) / 2


@pytest.mark.slow
def test_the_best_number_of_micro_batches_is_between_the_extremes():
    rows = [row for row in sweep("micro", PAPER, 1536, Settings()) if row["system"] == "nestpipe"]
    assert 2 < min(rows, key=lambda row: row["step_ms"])["value"] < 32


def test_what_is_exact():
    """Promise: `check` refuses the stale prefetcher alone; groups are exact where their gradients are summed."""
    verdicts = {name: exact(name) for name in SYSTEMS}
    assert [name for name, verdict in verdicts.items() if verdict == "no"] == ["2d-sp", "uniemb", "nestpipe+2d-sp"]
    assert set(verdicts.values()) == {"yes", "no"}


def cluster(system, workers=64, **network):
    profile = replace(PAPER, network=replace(PAPER.network, **network))
    return cluster_of(SYSTEMS[system], profile, workers, Settings(group_size=16))


def test_copies_are_told_each_row_of_a_group_once():
    """Promise: replica traffic is one gradient (and key) a row that a group touches, to every other copy."""
    nothing_shared, all_shared = cluster("nestpipe+hsp", sharing=1.0), cluster("nestpipe+hsp", sharing=0.0)
    assert nothing_shared.replica_mb(5.0) == 3 * 5.0  # an owner's part of 16 workers' rows, to 3 other groups
    assert all_shared.replica_mb(5.0) == 3 * 5.0 / 16
    assert cluster("nestpipe+2d-sp").replica_mb(5.0) == 0.0
    stages = [a.stage for a in build_by(nested, 2, 2, nothing_shared.options)]
    assert stages.count("replicate") == 4
    assert not cluster("nestpipe+2d-sp").options.replicates
    assert not cluster("nestpipe+hsp", workers=16).options.replicates  # one group: nobody to tell


def test_owners_of_copies_have_the_rows_of_all_groups():
    """Promise: HSP pays for every copy of a row; 2D-SP only for what fewer workers share."""
    assert cluster("nestpipe+hsp", sharing=0.5).owned_rows() == 4.0
    assert cluster("nestpipe+2d-sp", sharing=0.5).owned_rows() == 2.0
    assert cluster("nestpipe+2d-sp", sharing=1.0).owned_rows() == 1.0
    flat = cluster("nestpipe+hsp", workers=16)
    costs = [c.cost()(act("update", 0)) for c in (flat, cluster("nestpipe+hsp"))]
    assert costs[1].device == 4 * costs[0].device


@pytest.mark.parametrize("name", ["nestpipe+2d-sp", "nestpipe+hsp"])
def test_one_group_is_no_group(name):
    """Promise: with one group of all workers, systems with groups are the one without."""
    flat = run(SYSTEMS["nestpipe"], PAPER, 32, Settings(steps=15))
    one = run(SYSTEMS[name], PAPER, 32, Settings(steps=15, group_size=32))
    assert one.step_ms == flat.step_ms and one.group_size == flat.group_size == 32


def test_sizes_of_groups_divide():
    assert sizes(1536) == [8, 16, 32, 64, 128, 256, 384, 512, 768, 1536]
    assert sizes(6) == [6] and all(10240 % size == 0 for size in sizes(10240))


@pytest.mark.slow
def test_group_sizes_are_compared_and_drawn(tmp_path, capsys):
    """Promise: the fastest size of each cluster is marked, in the table, the picture and the figures, with its memory."""
    picture, figures = tmp_path / "groups.svg", tmp_path / "groups.json"
    arguments = ["--sweep", "group", "--workers", "32,64", "--steps", "12", "--system", "nestpipe+hsp"]
    assert main(["simulate", *arguments, "--svg", str(picture), "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    for count in (32, 64):
        (best,) = [row for row in rows if row["best"] and row["workers"] == count]
        fastest = min(row["step_ms"] for row in rows if row["workers"] == count)
        assert best["step_ms"] <= 1.001 * fastest and best["copies"] * best["group_size"] == count
        assert best["table_share"] == 1 / best["group_size"]
    text = picture.read_text()
    assert text.count("<polyline") == 2 and text.count('fill="none" stroke="#') >= 4


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
        (["--group-size", "0"], "--group-size must be at least 1"),
        (["--group-size", "7", "--system", "nestpipe+hsp"], "--group-size 7 does not divide"),
        (["--sharing", "2"], "network.sharing must be from 0 to 1"),
        (["--sweep", "group", "--system", "dbp"], "--system of --sweep group must be one of"),
        (["--sweep", "group", "--svg", "x.svg"], "--svg draws one system"),
        (["--sweep", "group", "--group-size", "8"], "--group-size fixes what --sweep group varies"),
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
