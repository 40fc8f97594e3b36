"""Kills a training run again and again and resumes it each time, and compares its digest with that of an untouched run.

    python bench/kills.py [--kills 100] [--seed 1] [--storage s3] [--workers 4 --group-size 2]

SIGKILL comes at a random moment: while processes start, while they read a checkpoint, in mid-step, while a checkpoint
is written or old ones are removed.  It hits all processes, one worker, or only the launcher.  Each life may have
another schedule and another tier (DRAM or disk), which must not change a bit.  With `--storage s3` the checkpoints of the
run that is killed are on an S3 server (moto's), which the script starts on loopback; the untouched run has them on disk.
With `--group-size` replicas are compared at every checkpoint and whenever the run resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SCHEDULES = ("serial", "dbp", "fwp", "nested")
MOMENTS = ("starting", "reading", "training", "training", "writing", "writing", "removing")


def targets(workers: int) -> list[str]:
    return ["all", "all", *(f"worker {number}" for number in range(workers)), "launcher"]


STEPS_A_LIFE = 12
DEADLINE = 180.0
"""Seconds after which a process that should have ended, or taken a step, counts as hanging."""
SETTINGS = {
    "data.samples": 5970,  # uneven shards, some 30 steps an epoch
    "data.eval_samples": 300,
    "data.features": 4,
    "data.ids": 2000,
    "data.hot": 1,
    "model.dim": 8,
    "train.batch_size": 100,
    "train.epochs": "none",
    "train.log_every": 1,
    "train.timeout": 60,
    "pipeline.micro_batches": 2,
    "checkpoint.every_steps": 4,
    "checkpoint.full_every": 3,
    "checkpoint.keep": 2,
}


@dataclass(frozen=True)
class Outcome:
    kills: int
    expected: str
    found: str
    moments: Counter[str]
    problems: list[str]

    @property
    def good(self) -> bool:
        return self.expected == self.found and not self.problems


class Process(Protocol):
    """What is used of subprocess.Popen."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


Start = Callable[[list[str], Path], Process]
"""Starts `nestpipe ARGUMENTS`, which writes its errors to a file."""


def in_a_new_interpreter(arguments: list[str], said: Path) -> Process:
    with said.open("w") as err:
        return subprocess.Popen([sys.executable, "-m", "nestpipe", *arguments], stdout=subprocess.DEVNULL, stderr=err)


class Store(Protocol):
    """Where the checkpoints of a run are."""

    settings: dict[str, str]

    def newest(self) -> int:
        """The step of the last committed checkpoint, or 0."""

    def busy(self, moment: str) -> bool:
        """Whether a checkpoint is half written ("writing") or half removed ("removing") at this moment."""

    def left_over(self) -> list[str]:
        """What is neither a checkpoint nor a lock."""


class Disk:
    """In the run directory."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "checkpoints"
        self.settings: dict[str, str] = {}

    def newest(self) -> int:
        found = (int(path.name[5:]) for path in self._folder.glob("step-*") if (path / "COMMIT").exists())
        return max(found, default=0)

    def busy(self, moment: str) -> bool:
        return any(self._folder.glob(f".{moment}-*"))

    def left_over(self) -> list[str]:
        return [path.name for path in self._folder.glob(".*-step-*")]


class S3:
    """On an S3 server."""

    def __init__(self, endpoint: str) -> None:
        import boto3

        self._client = boto3.client("s3", endpoint_url=endpoint)
        self._client.create_bucket(Bucket="kills")
        self.settings = {"checkpoint.path": "'s3://kills/run'"}

    def _found(self) -> dict[str, bool]:
        """The directories, and whether each has its COMMIT."""
        found: dict[str, bool] = {}
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket="kills", Prefix="run/"):
            for one in page.get("Contents", []):
                _, name, *file = one["Key"].split("/")
                if name:
                    found[name] = found.get(name, False) or file == ["COMMIT"]
        return found

    def newest(self) -> int:
        return max((int(name[5:13]) for name, committed in self._found().items() if committed), default=0)

    def busy(self, moment: str) -> bool:
        found = self._found()
        last = max((name for name, committed in found.items() if committed), default="")
        half = [name for name, committed in found.items() if not committed and name.startswith("step-")]
        return any((name < last) == (moment == "removing") for name in half)

    def left_over(self) -> list[str]:
        return [name for name, committed in self._found().items() if not committed]


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """A server on loopback, with the environment that leads to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "kills",
        "AWS_SECRET_ACCESS_KEY": "kills",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(port), "the S3 server did not start")
        yield S3(endpoint)
    finally:
        server.kill()
        server.wait()
        os.environ.clear()
        os.environ |= before


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


Grouping = tuple[int, int | None]
"""Workers, and how many a shard group has; None: all."""


class Life:
    """One start of the run, until it ends or is killed."""

    def __init__(
        self,
        run: Path,
        store: Store,
        steps: int,
        start: Start,
        random_: random.Random | None = None,
        grouping: Grouping = (2, None),
    ) -> None:
        """`random_` draws the schedule and the tier; None: serial, in DRAM."""
        self.count, size = grouping
        self.run, self.store = run, store
        self.begins_at = store.newest()
        self._log_before = file_number(run / "metrics.jsonl")
        self.resumes = (run / "recipe.toml").exists()
        command = ["train", str(run) if self.resumes else "dlrm", "--quiet"]
        command += ["--resume"] if self.resumes else ["--run", str(run), "--workers", str(self.count)]
        settings = {} if self.resumes else {**SETTINGS, **store.settings, "pipeline.group_size": size or "none"}
        settings["train.steps"] = steps
        schedule, disk = ("serial", False)
        if random_ is not None:
            schedule, disk = random_.choice(SCHEDULES), random_.random() < 0.3
        settings |= {
            "tables.disk_path": f"'{run.parent}'" if disk else "none",
            "tables.dram_rows": 200 if disk else "none",
        }
        self.what = f"{schedule} {'disk' if disk else 'dram'}"
        command += ["--schedule", schedule, *(f"--set={key}={value}" for key, value in settings.items())]
        self._said = run.parent / "said.txt"
        self._said.write_text("")
        self.process = start(command, self._said)
        self.started = time.monotonic()

    def over(self) -> bool:
        return self.process.poll() is not None

    def step(self) -> int:
        """The last step that this life has logged; 0 until it has replaced the log of the life before."""
        return 0 if file_number(self.run / "metrics.jsonl") == self._log_before else last_step(self.run)

    def said(self) -> str:
        return self._said.read_text().strip()

    def workers(self) -> list[int]:
        return sorted(workers_of(self.process.pid))

    def kill(self, target: str) -> None:
        """Sends SIGKILL and waits until no process of this life is left."""
        workers = self.workers()
        killed = [self.process.pid, *workers]
        if target == "launcher":
            killed = [self.process.pid]
        elif target != "all" and len(workers) == self.count:
            killed = [workers[int(target.split()[1])]]
        for pid in killed:
            end(pid)
        self.process.wait(DEADLINE)
        until(lambda: not any(alive(pid) for pid in workers), f"workers {workers} have outlived their launcher")


def kill_and_resume(
    folder: Path,
    kills: int,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
    steps_a_life: int = STEPS_A_LIFE,
    start: Start = in_a_new_interpreter,
    store: Store | None = None,
    grouping: Grouping = (2, None),
) -> Outcome:
    """Trains once untouched and once with `kills` kills, each in its own folder below `folder`.

    `store`: where the latter has its checkpoints; None: on disk.
    """
    lives: list[Life] = []

    def begin(life: Life) -> Life:
        lives.append(life)
        return life

    try:
        return _kill_and_resume(folder, kills, seed, tell, steps_a_life, start, begin, store, grouping)
    finally:
        for life in lives:
            if not life.over():
                life.kill("all")


def _kill_and_resume(
    folder: Path,
    kills: int,
    seed: int,
    tell: Callable[[str], None],
    steps_a_life: int,
    start: Start,
    begin: Callable[[Life], Life],
    given: Store | None,
    grouping: Grouping,
) -> Outcome:
    drawn = random.Random(seed)
    steps = steps_a_life * kills + 40
    aside = made(folder / "untouched") / "run"
    untouched = begin(Life(aside, Disk(aside), steps, start, grouping=grouping))
    run = made(folder / "killed") / "run"
    store = given or Disk(run)
    moments: Counter[str] = Counter()
    problems: list[str] = []
    began, ready = time.monotonic(), 10.0
    done = 0
    while done < kills:
        life = begin(Life(run, store, steps, start, drawn, grouping))
        target = drawn.choice(targets(life.count))
        # Near the end only moments before the first step: the run must not end before all kills are done.
        moment = drawn.choice(MOMENTS if life.begins_at < steps - 40 else ("starting", "reading"))
        committed = store.newest()
        ready = _wait_for(life, moment, drawn, steps_a_life, ready)
        if life.over():
            problems.append(f"kill {done + 1}: {life.what} ended by itself: {life.said() or life.process.returncode}")
            break
        life.kill(target)
        done += 1
        moments[moment] += 1
        if store.newest() < committed:
            problems.append(f"kill {done}: the last checkpoint was of step {committed} and is of {store.newest()}")
        if store.newest() == 0:
            shutil.rmtree(run, ignore_errors=True)  # nothing was saved yet: start over
        left = (time.monotonic() - began) / done * (kills - done)
        tell(
            f"kill {done:3} of {kills}  {life.what:11}  {moment:8} {target:8}  step {last_step(run):5} of {steps}, "
            f"saved {store.newest():5}  {left:.0f} s left"
        )
    last = begin(Life(run, store, steps, start, drawn, grouping))
    last.process.wait(10 * DEADLINE)
    if last.process.returncode:
        problems.append(f"the last life failed: {last.said()}")
    untouched.process.wait(10 * DEADLINE)
    if left_over := store.left_over():
        problems.append(f"left behind: {left_over}")
    twice = [step for step, count in Counter(logged(run)).items() if count > 1]
    if twice or sorted(set(logged(run))) != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl does not have every step once: {twice or 'some are missing'}")
    return Outcome(done, digest(untouched), digest(last), moments, problems)


def _wait_for(life: Life, moment: str, drawn: random.Random, steps_a_life: int, ready: float) -> float:
    """Waits for the moment, or for the end of the life.  Returns the seconds until a life takes its first step."""
    if moment == "starting":
        _sleep(life, drawn.random() * 0.5 * ready)
        return ready
    until(lambda: life.over() or len(life.workers()) == life.count, "workers did not start")
    if moment == "reading":
        _sleep(life, drawn.random() * max(0.0, ready - (time.monotonic() - life.started)))
        return ready
    wanted = life.begins_at + drawn.randint(1, 2 * steps_a_life - 2)
    until(lambda: life.over() or life.step() > life.begins_at, "no step was taken")
    first = time.monotonic() - life.started
    until(lambda: life.over() or life.step() >= wanted, f"step {wanted} was not reached")
    if moment == "training":
        time.sleep(drawn.random() * 0.1)
    else:
        end_of_patience = time.monotonic() + 1.0  # the folder exists for a few milliseconds, every few steps
        while not life.over() and not life.store.busy(moment) and time.monotonic() < end_of_patience:
            pass
        time.sleep(drawn.random() * 0.01)
    return first


def _sleep(life: Life, seconds: float) -> None:
    """Sleeps, at most until the first step: if the machine has become faster, the life could train to its end."""
    until_then = time.monotonic() + seconds
    while time.monotonic() < until_then and not life.over() and life.step() <= life.begins_at:
        time.sleep(0.01)


def logged(run: Path) -> list[int]:
    """All steps with a loss in the log."""
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if "loss" in record:
            found.append(record["step"])
    return found


def last_step(run: Path) -> int:
    """The step of the last complete line of the log."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            found = re.findall(rb'^\{"step": (\d+), ', file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[-1]) if found else 0


def file_number(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0


def digest(life: Life) -> str:
    summary = life.run / "summary.json"
    return json.loads(summary.read_text())["digest"] if summary.exists() else f"none: {life.said()}"


def workers_of(launcher: int) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, above = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(above) == launcher and b"nestpipe" in command and state != "Z":
            found.append(int(process.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], otherwise: str) -> None:
    last = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > last:
            raise TimeoutError(f"{otherwise} within {DEADLINE:g} s")
        time.sleep(0.01)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="directory for the runs")
    parser.add_argument("--storage", choices=["disk", "s3"], default="disk", help="where the checkpoints are")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--group-size", type=int, help="workers of a shard group; default: all")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nestpipe-kills-", dir=args.path))
        store = stack.enter_context(s3_server()) if args.storage == "s3" else None
        outcome = kill_and_resume(
            Path(folder),
            args.kills,
            args.seed,
            lambda line: print(line, flush=True),
            store=store,
            grouping=(args.workers, args.group_size),
        )
    print(
        f"{outcome.kills} kills: " + ", ".join(f"{count} while {moment}" for moment, count in outcome.moments.items())
    )
    print(
        f"digest untouched {outcome.expected[:16]}, killed {outcome.found[:16]}: {'equal' if outcome.good else 'NOT GOOD'}"
    )
    for problem in outcome.problems:
        print(problem)
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
