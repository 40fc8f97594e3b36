"""A worker that is lost in a run with `--max-restarts`: all start again from the last checkpoint, and the bits are the same."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from commands import DEADLINE, Command, nestpipe, one_line, refused, small, until
from forks import Fork
from nestpipe.checkpoint.folder import Folder
from nestpipe.launch.restarts import launch_id, started_again
from runs import train_run
from workers import run

LENGTH = ["data.samples=20000", "train.log_every=1", "pipeline.schedule=dbp", "train.steps=120"]
EVERY = ["checkpoint.every_steps=40"]


def untouched(folder: Path) -> str:
    sizes = [setting for setting in small(*LENGTH, workers=2) if "=" in setting]
    return str(run(2, train_run, "dlrm", sizes, str(folder / "untouched"))[0]["digest"])


def saved(command: Command) -> int:
    return max(Folder(command.run / "checkpoints").steps(), default=0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_restarts_before_and_after_the_first_checkpoint(tmp_path: Path) -> None:
    """A worker killed before anything was saved: all begin anew.  One stopped beyond the deadline after step 40: all go on from
    there.  Both are said, with what was noticed; the digest is that of a run that nobody touched."""
    command = Command(
        tmp_path, [*small(*LENGTH, *EVERY, workers=2), "--max-restarts", "2", "--timeout", "4", "--json", "-"]
    )
    first = command.once_training(2)
    assert saved(command) == 0, "too late"
    os.kill(first[1], signal.SIGKILL)
    assert until(DEADLINE, lambda: saved(command) >= 40)
    second = command.workers()
    assert len(second) == 2 and not {*first.values()} & {*second.values()}
    os.kill(second[0], signal.SIGSTOP)
    ended = command.wait()
    summary = ended.summary()
    said = [line for line in ended.err.splitlines() if line.startswith("nestpipe: restart")]
    assert len(said) == 2, ended.err
    assert re.fullmatch(
        r"nestpipe: restart 1 of 2 \(.*rank 0 .*\); starting over, as there is no checkpoint yet", said[0]
    )
    assert re.fullmatch(r"nestpipe: restart 2 of 2 \(.*rank 1 .*\); resuming from step (40|80)", said[1]), said[1]
    assert summary["digest"] == untouched(tmp_path)


@pytest.mark.slow
def test_a_worker_that_fails_every_time(tmp_path: Path) -> None:
    """One line in the end, which says how often it was tried."""
    diverging = ["tables.optimizer=sgd", "tables.lr=1e30", "dense.optimizer=sgd", "dense.lr=1e30", *EVERY]
    ended = nestpipe(tmp_path, *small(*diverging), "--max-restarts", "1")
    told, last = ended.err.splitlines()
    assert ended.code == 1 and told.startswith("nestpipe: restart 1 of 1 (batch 1: the "), ended.err
    assert last.startswith("nestpipe: batch 1: the ") and last.endswith("; given up after 1 restart"), last


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_machines_leave_and_join(tmp_path: Path) -> None:
    """torchrun with a range of machines: the run goes on with one when the other is lost, and with both when it is back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = tmp_path / "run"
    arguments = [
        *small("data.samples=20000", "checkpoint.every_steps=20", "train.epochs=100000"),
        "--run-dir",
        str(run),
    ]
    conf = "last_call_timeout=6,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3"
    launcher = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=both", "--monitor-interval=0.2"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    machines: dict[str, Fork] = {}

    def start(name: str, host: str) -> None:
        options = [f"--rdzv-conf=is_host={host},{conf}", "-m", "--", "nestpipe", *arguments]
        log = tmp_path / name
        log.touch()
        machines[name] = Fork("torch.distributed.run", [*launcher, *options], tmp_path, log, log, environment)

    def worker_of(name: str) -> list[int]:
        pid = machines[name].pid
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def logs() -> str:
        return "".join((tmp_path / name).read_text(errors="replace") for name in machines)

    def told(words: str) -> int:
        """How often any machine's log has these words: whose worker is the first may change."""
        return logs().count(words)

    def trained() -> int:
        return max(Folder(run / "checkpoints").steps(), default=0)

    def goes_on(times: int) -> bool:
        return until(DEADLINE, lambda: told("; resuming from step") >= times)

    try:
        start("first", "true")
        start("second", "false")
        assert until(DEADLINE, lambda: trained() >= 40), logs()
        for pid in [*worker_of("second"), machines["second"].pid]:
            os.kill(pid, signal.SIGKILL)
        assert goes_on(1) and told("restart 1 of 1 (workers were lost or have joined)") == 1, logs()
        start("back", "false")
        assert goes_on(2), logs()
        now = trained()
        assert until(DEADLINE, lambda: trained() >= now + 40)
        saved_before = told("is saved: resume with")
        machines["first"].send_signal(signal.SIGTERM)
        machines["back"].send_signal(signal.SIGTERM)
        for name in ("first", "back"):
            machines[name].wait(DEADLINE)
        assert told("is saved: resume with") == saved_before + 1, logs()
    finally:
        for name, machine in machines.items():
            for pid in [*(worker_of(name) if machine.poll() is None else []), machine.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            machine.wait()


@pytest.mark.slow
def test_a_run_of_another_launch_is_not_written_over(tmp_path: Path) -> None:
    """Neither at the first start nor at a restart, with checkpoints in it or without."""
    for every in ([], EVERY):
        first = Command(tmp_path, [*small(*every, "train.steps=3"), "--json", "-"])
        first.wait().summary()
        before = {path: path.read_bytes() for path in first.run.rglob("*") if path.is_file()}
        again = [*small("train.seed=77", *EVERY), "--max-restarts", "1", "--run-dir", str(first.run)]
        refused(nestpipe(tmp_path, *again), "already")
        restarted = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}
        arguments = [*small("train.seed=77", *EVERY), "--run-dir", str(first.run)]
        ended = Command(tmp_path, arguments, run="none", variables=restarted).wait()
        assert ended.code and " already" in ended.err, ended.err
        assert {path: path.read_bytes() for path in first.run.rglob("*") if path.is_file()} == before


def test_a_launch_knows_its_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name over all restarts; launches without one by the agent that starts their workers."""
    for variable in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(variable, raising=False)
    assert launch_id() is None and not started_again(tmp_path)
    for name in ("job", "none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        (tmp_path / "launch").write_text(str(launch_id()))
        assert started_again(tmp_path)
        (tmp_path / "launch").write_text("another")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert not started_again(tmp_path)
    assert str(os.getppid()) in str(launch_id())


def test_what_cannot_be_restarted_is_refused(tmp_path: Path) -> None:
    refused(nestpipe(tmp_path, *small(), "--max-restarts", "2"), "--max-restarts needs checkpoints", "every_steps")
    refused(nestpipe(tmp_path, *small(*EVERY), "--max-restarts", "-1"), "at least 0")
    one_line(nestpipe(tmp_path, *small(*EVERY), "--from", "3"))
