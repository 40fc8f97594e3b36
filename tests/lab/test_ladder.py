"""Ladders: rungs take turns, ratios are taken within a round, and nothing of a ladder outlives it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forks import Fork
from nestpipe.cli.main import main
from nestpipe.config.pipeline import PipelineConfig
from nestpipe.lab.ladder import BenchError, Best, Hides, Ladder, Mix, Rung, ladders, load_ladder
from nestpipe.lab.network import LabError, Network, known, remove_abandoned
from nestpipe.lab.running import RunningRung, cores_of_hosts, run_ladder
from nestpipe.lab.settings import WorkerOptions, read_settings
from nestpipe.lab.summary import summarise
from nestpipe.lab.turn_taking import cause

pytestmark = pytest.mark.usefixtures("alone_in_the_lab")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun and its workers without new interpreters."""

    def start(self: RunningRung, command: list[str], interface: str, host: int, cores: object = None) -> Fork:
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"] and cores is None
        log = self.folder / "log"
        return Fork(command[2], command[3:], self.folder, log, log, {**os.environ, "GLOO_SOCKET_IFNAME": interface})

    monkeypatch.setattr(RunningRung, "_start", start)


def ladder(*rungs: Rung, workers: int = 1) -> Ladder:
    return Ladder("sleep", "lab_worker", list(rungs), {"step_s": 0.01}, workers, 3, [rungs[0].name])


def rung(name: str, **settings: object) -> Rung:
    return Rung(name, {"name": name, **settings})


@pytest.mark.slow
def test_rungs_take_turns(tmp_path: Path, forks: None) -> None:
    """Every rung trains once in every round, and only when its turn has come."""
    slow, fast = rung("slow", step_s=0.04), rung("fast", step_s=0.01)
    both = [RunningRung(ladder(slow, fast), r, 2, tmp_path / str(i)) for i, r in enumerate((slow, fast))]
    try:
        for turn in range(3):
            for one in both:
                one.train(turn)
        reports = [one.report() for one in both]
    finally:
        for one in both:
            one.stop()
    assert (tmp_path / "order").read_text().split("\n")[:-1] == ["slow 1", "fast 1", "slow 2", "fast 2"]
    result = summarise(ladder(slow, fast), [slow, fast], reports, 2)
    assert [r["ratios"]["slow"]["median"] for r in result["rungs"]] == [1.0, pytest.approx(4.0)]


def test_hosts_do_not_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 5, 7, 9})
    assert cores_of_hosts(2) == [{1, 3}, {5, 7}]
    assert cores_of_hosts(5) == [{1}, {3}, {5}, {7}, {9}]
    assert cores_of_hosts(6) == [None] * 6


def test_some_rungs_of_a_ladder() -> None:
    """Promise: with named rungs the others are left out, and so is every comparison that needs them."""
    whole = load_ladder("dlrm")
    some = whole.only(["nested N=8", "serial N=8", "wire alone N=8"])
    assert [r.name for r in some.rungs] == ["serial N=8", "nested N=8", "wire alone N=8"]
    assert whole.limit and not some.limit
    assert whole.only([]) is whole
    with pytest.raises(BenchError, match=r"no rung 'nested N=9' in this ladder; it has .*'nested N=8'"):
        whole.only(["nested N=9"])
    disk = load_ladder("dlrm-disk")
    assert disk.hides and not disk.only([disk.rungs[0].name]).hides


@pytest.mark.slow
def test_a_ladder_compares_the_slowest_workers(forks: None) -> None:
    result = run_ladder(ladder(rung("one"), rung("two", step_s=0.02), workers=2), [], 2, lambda done, what: None)
    assert [r["step_ms"] for r in result["rungs"]] == [pytest.approx(20.0), pytest.approx(40.0)]
    assert result["rungs"][1]["ratios"]["one"]["median"] == pytest.approx(0.5)


@pytest.mark.slow
def test_a_rung_that_fails_is_named_and_all_others_end(forks: None) -> None:
    """One line with the rung and its error, and no process is left."""
    with pytest.raises(BenchError, match=r"rung 'bad' failed with exit code 1: .*this rung was made to fail"):
        run_ladder(ladder(rung("good"), rung("bad", fails_at=2)), [], 3, lambda done, what: None)
    assert_no_worker_is_left()


@pytest.mark.slow
def test_between_its_turns_a_rung_is_stopped(tmp_path: Path, forks: None) -> None:
    """Promise: rungs that wait take nothing from the one that trains, and go on when told to."""
    one = RunningRung(ladder(rung("one")), rung("one"), 1, tmp_path / "0")
    try:
        one.train(0)
        (pid,) = (int(path.read_text()) for path in (tmp_path / "0").glob("pid-*"))
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T")
        one.train(1)
        assert one.report()["step_s_by_rank"] == [[[0.01]]]
    finally:
        one.stop()


@pytest.mark.slow
def test_a_killed_ladder_leaves_no_worker() -> None:
    """Promise: where nobody is left to wake a stopped worker, the kernel ends it."""
    code = (
        "from pathlib import Path; import sys, time\n"
        "from nestpipe.lab.ladder import Ladder, Rung\n"
        "from nestpipe.lab.running import RunningRung\n"
        "one = Rung('one', {'name': 'one', 'step_s': 0.01})\n"
        "rung = RunningRung(Ladder('t', 'lab_worker', [one]), one, 1, Path(sys.argv[1]))\n"
        "rung.train(0); print('trained', flush=True); time.sleep(60)"
    )
    with tempfile.TemporaryDirectory() as folder:
        killed = subprocess.Popen([sys.executable, "-c", code, f"{folder}/0"], stdout=subprocess.PIPE)
        assert killed.stdout is not None and killed.stdout.readline() == b"trained\n"
        assert workers_left()
        killed.kill()
        killed.wait()
        assert_no_worker_is_left()


def assert_no_worker_is_left() -> None:
    until(lambda: not workers_left())


def until(it_is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    """Signals take a moment on busy cores."""
    deadline = time.monotonic() + seconds
    while not it_is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers_left() -> list[str]:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "lab_worker" in line]


def test_whole_turns_count_what_their_steps_do_not_show() -> None:
    """A turn of four steps that waits for something at its end is slower, though its median step is not."""

    def report(waits_s: float) -> dict[str, Any]:
        turns = [[0.1] * 4] * 3
        return {
            "workers": 1,
            "config": {"steps": 4, "batch": 10},
            "step_s_by_rank": [turns],
            "window_s_by_rank": [[0.4 + waits_s] * 3],
            "cpu_s_by_rank": [[0.4] * 3],
            "first_losses": [],
        }

    rungs = [rung("without"), rung("with")]
    for whole, ratio in ((False, 1.0), (True, 0.8)):
        plan = Ladder("t", "w", rungs, against=["without"], whole_turns=whole)
        found = summarise(plan, rungs, [report(0.0), report(0.1)], 3)["rungs"][1]["ratios"]["without"]
        assert found["median"] == pytest.approx(ratio)


def test_what_is_hidden() -> None:
    """Told by the timelines and by step times: 40 of 50 ms a step are hidden, and the step gets 15 ms longer instead of 50."""

    def report(step_ms: float, exposed_ms: float) -> dict[str, object]:
        stages = {"retrieve": {"busy_ms": 50.0, "hidden_ms": 50.0 - exposed_ms, "exposed_ms": exposed_ms}}
        times = [[[step_ms / 1e3] for _ in range(3)]]
        flat = [[step_ms / 1e3] * 3]
        return {
            "workers": 1,
            "config": {"steps": 1, "batch": 10},
            "step_s_by_rank": times,
            "window_s_by_rank": flat,
            "cpu_s_by_rank": flat,
            "first_losses": [],
            "stages_by_rank": [stages],
            "bytes_sent_by_rank": [0],
        }

    rungs = [rung(name) for name in ("serial", "dbp", "serial disk", "dbp disk")]
    hides = Hides(["retrieve"], "serial disk", "dbp disk", ["serial", "dbp"])
    plan = Ladder("t", "w", rungs, hides=[hides])
    reports = [report(100, 0), report(100, 0), report(150, 50), report(115, 10)]
    hidden = summarise(plan, rungs, reports, 3)["hidden"][0]
    assert hidden["hidden_share"] == pytest.approx(0.8)
    assert hidden["hidden_share_of_step"] == pytest.approx(0.7)


def report(*step_ms: float, **more: Any) -> dict[str, Any]:
    """Of two workers: one step a round."""
    flat = [[ms / 1e3 for ms in step_ms]] * 2
    return {
        "workers": 2,
        "config": {"steps": 1, "batch": 10},
        "step_s_by_rank": [[[second] for second in rank] for rank in flat],
        "window_s_by_rank": flat,
        "cpu_s_by_rank": flat,
        "first_losses": [],
        **more,
    }


def test_shares_of_a_step_count_a_late_worker_once() -> None:
    """What one worker waits for another is All2All, and the other's own is lookup: together they are the step, not more."""
    exposed = [
        {"retrieve": 60.0, "embed": 10.0, "compute": 30.0},
        {"retrieve": 40.0, "embed": 30.0, "compute": 30.0},
    ]
    stages = [
        {stage: {"busy_ms": ms, "hidden_ms": 0.0, "exposed_ms": ms} for stage, ms in one.items()} for one in exposed
    ]

    timelines = {"stages_by_rank": stages, "bytes_sent_by_rank": [0]}
    rungs = [rung("serial"), rung("nested")]
    plan = Ladder("t", "w", rungs, mix=Mix("serial", lookup=50, all2all=20, compute=30))
    mix = summarise(plan, rungs, [report(100, 100, **timelines), report(40, 40, **timelines)], 2)["mix"]
    assert mix["found"] == pytest.approx({"lookup": 50, "all2all": 20, "compute": 30}) and mix["holds"]
    assert mix["ideal"] == pytest.approx(100 / 30) and mix["reached"]["nested"]["median"] == pytest.approx(2.5)
    assert set(mix["reached"]) == {"nested"}
    plan = Ladder("t", "w", rungs, mix=Mix("serial", lookup=56, all2all=15, compute=29))
    assert not summarise(plan, rungs, [report(100, 100, **timelines), report(40, 40, **timelines)], 2)["mix"]["holds"]


def test_a_rung_that_chooses_is_held_to_the_best_of_the_others() -> None:
    """Promise: compared within rounds with whoever is fastest by its middle round, not by one lucky round."""
    rungs = [rung("one"), rung("two"), rung("auto")]
    reports = [report(100, 104, 108), report(90, 110, 130), report(104, 108, 112)]
    plan = Ladder("t", "w", rungs, best=Best("auto", ["one", "two"], 1.05))
    best = summarise(plan, rungs, reports, 3)["best"]
    assert best["fastest"] == "one" and best["ratio"]["median"] == pytest.approx(108 / 104) and best["holds"]
    plan = Ladder("t", "w", rungs, best=Best("auto", ["one", "two"], 1.03))
    assert not summarise(plan, rungs, reports, 3)["best"]["holds"]
    assert plan.only(["one", "auto"]).best is None and plan.only(["one", "two", "auto"]).best is not None


def test_what_was_chosen_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: `bench auto-…` says what `auto` chose and how it stands, and exits with 1 where that is too slow."""
    fixed = report(100, 100)
    timelines = {"stages_by_rank": [{}, {}], "bytes_sent_by_rank": [0], "micro_batches_chosen": [[0, 1], [207, 4]]}

    def run(auto_ms: float) -> int:
        def measured(ladder: Ladder, *_: object) -> dict[str, Any]:
            reports = [report(auto_ms, auto_ms, **timelines) if r.name == "auto" else fixed for r in ladder.rungs]
            return {**summarise(ladder, ladder.rungs, reports, 2), "link": None, "disk": None}

        monkeypatch.setattr("nestpipe.lab.running.run_ladder", measured)
        return main(["bench", "auto-dlrm", "--link", "none"])

    assert run(102) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "'auto' chose 4 micro-batches from batch 207 on and takes 1.02 (1.02 - 1.02) of the step of 'nested N=1'"
        in said
    )
    assert run(106) == 1 and "NOT within 1.05" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ladders())
def test_shipped_ladders_can_be_read(name: str) -> None:
    """And name only rungs that they have."""
    shipped = load_ladder(name)
    names = {r.name for r in shipped.rungs}
    assert set(shipped.against) | set(shipped.limit) <= names
    assert all({h.exposed, h.hidden, *h.without} <= names for h in shipped.hides)
    assert shipped.best is None or {shipped.best.rung, *shipped.best.of} <= names


LADDER = """
title = "t"
worker = "nestpipe.lab.worker"
[workload]
batch = 64
[[rungs]]
name = "one"
set = { schedule = "nested", compute_ms = 5 }
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("schedule =", "shedule =", ["ladder 'mine', rung 'one'", "unknown key 'shedule': did you mean 'schedule'?"]),
        ('"nested"', '"nestde"', ["rung 'one'", "pipeline.schedule must be one of 'serial', 'dbp'"]),
        ("compute_ms = 5", "look_ahead = 1.5", ["rung 'one'", "pipeline.look_ahead must be a whole number"]),
        ("compute_ms = 5", 'only = "disk"', ["rung 'one'", "only must be", "'compute', 'wire'"]),
        ("compute_ms = 5", 'only = "wire", micro_batches = "auto"', ["rung 'one'", "micro_batches must be a number"]),
        ("compute_ms = 5", "items = 5", ["rung 'one'", "unknown key 'items'"]),
        ("batch = 64", 'batch = "64"', ["batch must be a whole number"]),
        ("worker =", "workers = true\nworker =", ["mine.workers must be a whole number"]),
        ("[workload]", "[best]\nrung = 'one'\n[workload]", ["mine.best.of is missing"]),
        ("name =", "nmae =", ["mine.rungs[0].nmae"]),
    ],
)
def test_a_mistake_in_a_ladder_is_one_line(
    old: str,
    new: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Promise: `nestpipe bench` names the rung and the key before anything starts; nothing is silently ignored."""
    monkeypatch.setattr("nestpipe.lab.ladder.LADDERS", tmp_path)
    (tmp_path / "mine.toml").write_text(LADDER)
    assert load_ladder("mine").rungs == [Rung("one", {"schedule": "nested", "compute_ms": 5})]
    (tmp_path / "mine.toml").write_text(LADDER.replace(old, new, 1))
    assert main(["bench", "mine"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said


def test_settings_of_a_rung() -> None:
    """The workload that peers share, our worker's options and the pipeline's knobs, each with its defaults; old spellings too."""
    found = read_settings(
        {"kind": "hstu", "length": 20, "dram_rows": 7, "micro_batches": [[0, 4]], "late_weights": False}
    )
    assert found.workload["length"] == 20 and found.workload["items"] == 1_000_000 and found.workload["seed"] == 1
    assert found.options == WorkerOptions(kind="hstu", dram_rows=7)
    assert found.pipeline == PipelineConfig(micro_batches=[[0, 4]], defer_weight_grads=False)
    assert read_settings({}).workload.keys().isdisjoint({"items", "dram_rows", "schedule"})


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="network namespaces need root and iproute2",
)


@needs_root
def test_a_lab_is_made_and_removed() -> None:
    """Hosts reach one another, what they send is counted, and everything is gone afterwards."""
    with Network(2, "500mbit") as network:
        listen = (
            "import socket; s = socket.create_server(('', 7000)); print('listening', flush=True)\n"
            "c, _ = s.accept(); print(len(c.makefile('rb').read()))"
        )
        send = f"import socket; socket.create_connection(('{network.hosts[0].address}', 7000)).sendall(bytes(100000))"
        server = subprocess.Popen(network.hosts[0].command(["python3", "-c", listen]), stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None and server.stdout.readline() == b"listening\n"
            subprocess.run(network.hosts[1].command(["python3", "-c", send]), timeout=20, check=True)
            assert server.communicate(timeout=20)[0] == b"100000\n"
        finally:
            server.kill()
        assert network.bytes_sent()[1] > 100_000
        assert network.name in [other.name for other in known()]
    left = subprocess.run("ip -br link; ip netns", shell=True, capture_output=True, text=True).stdout
    assert network.name not in left and network.name not in [other.name for other in known()]


@needs_root
def test_a_lab_whose_maker_died_is_removed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    Network(1, None, name="npabad", owner=gone.pid).up()
    assert remove_abandoned() == ["npabad"]
    assert "npabad" not in subprocess.run("ip -br link; ip netns", shell=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("hosts", "rate"), [(0, None), (1000, None), (2, "fast"), (2, "500"), (2, "0mbit"), (2, "5mbit; rm")]
)
def test_what_is_no_lab(hosts: int, rate: str | None) -> None:
    with pytest.raises(LabError, match=r"hosts|rate"):
        Network(hosts, rate)


def other_interfaces() -> list[str]:
    """All but those of labs, of which there may be others on this machine."""
    lines = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if not line.startswith("np")]


@needs_root
def test_lab_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """`lab up` stays after the command has ended, and `lab down` removes it; other interfaces are left alone."""
    before = other_interfaces()
    assert main(["lab", "up", "--hosts", "2", "--link", "100mbit"]) == 0
    name = capsys.readouterr().out.split(":")[0]
    assert remove_abandoned() == [] and main(["lab", "ls"]) == 0
    assert f"{name}: 2 hosts, links 100mbit" in capsys.readouterr().out
    assert main(["lab", "down"]) == 0 and f"{name} removed" in capsys.readouterr().out
    assert other_interfaces() == before
    assert name not in subprocess.run("ip -br link; ip netns", shell=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "loading\n[rank1]: ValueError: no such table\nraise ChildFailedError(\n",
            "[rank1]: ValueError: no such table",
        ),
        (
            "Traceback\nnestpipe.comm.errors.PeerLost: rank 0 lost rank 1\nChildFailedError: \n",
            "nestpipe.comm.errors.PeerLost: rank 0 lost rank 1",
        ),
        (
            "raise ChildFailedError(\n  exitcode: -11 (pid: 7)\n  Signal 11 (SIGSEGV) received by PID 7\n",
            "exitcode: -11 (pid: 7)",
        ),
        (
            "terminate called\n  what():  [pair.cc] Connection closed\nraise ChildFailedError(\n",
            "what():  [pair.cc] Connection closed",
        ),
        (
            "[rank0]: nestpipe.pipeline.pipeline.NotFinite: batch 3: no\n=====\n",
            "[rank0]: nestpipe.pipeline.pipeline.NotFinite: batch 3: no",
        ),
        ("a.PeerLost: rank 1 lost rank 0\na.StaleRead: batch 3\n", "a.StaleRead: batch 3"),
        ("[rank1]: AssertionError\na.PeerLost: rank 0 lost rank 1\n", "[rank1]: AssertionError"),
        ("Exception in thread Thread-1 (f):\nValueError: boom\n", "ValueError: boom"),
        ("Exception ignored in: <f>\n[rank0]: ValueError: real\n", "[rank0]: ValueError: real"),
        (
            "what():  no space left\nException raised from f at x.cpp:12 (most recent call first):\n",
            "what():  no space left",
        ),
        ("usage: w\nworker.py: error: no such flag\n=====\n", "worker.py: error: no such flag"),
        ("one\ntwo\n\n", "two"),
        ("", "empty log"),
    ],
)
def test_a_failed_rung_is_told_by_its_cause(log: str, said: str) -> None:
    """Promise: of a launcher's pages of words the one line that says what went wrong."""
    assert cause(log) == said
