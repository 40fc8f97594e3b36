"""Kills a training run again and again and resumes it each time, and compares its digest with that of an untouched run.

    python bench/kills.py [--kills 100] [--seed 1]

SIGKILL comes at a random moment: while processes start, while they read a checkpoint, in mid-step, while a checkpoint
is written or old ones are removed.  It hits all processes, one worker, or only the launcher.  Each life may have
another schedule and another tier (DRAM or disk), which must not change a bit.
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SCHEDULES = ("serial", "dbp", "fwp", "nested")
MOMENTS = ("starting", "reading", "training", "training", "writing", "writing", "removing")
TARGETS = ("all", "all", "worker 0", "worker 1", "launcher")
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


class Life:
    """One start of the run, until it ends or is killed."""

    def __init__(self, run: Path, steps: int, start: Start, random_: random.Random | None = None) -> None:
        """`random_` draws the schedule and the tier; None: serial, in DRAM."""
        self.run = run
        self.begins_at = newest(run)
        self._log_before = file_number(run / "metrics.jsonl")
        self.resumes = (run / "recipe.toml").exists()
        command = ["train", str(run) if self.resumes else "dlrm", "--quiet"]
        command += ["--resume"] if self.resumes else ["--run", str(run), "--workers", "2"]
        settings = {} if self.resumes else dict(SETTINGS)
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
        elif target != "all" and len(workers) == 2:
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
) -> Outcome:
    """Trains once untouched and once with `kills` kills, each in its own folder below `folder`."""
    lives: list[Life] = []

    def begin(life: Life) -> Life:
        lives.append(life)
        return life

    try:
        return _kill_and_resume(folder, kills, seed, tell, steps_a_life, start, begin)
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
) -> Outcome:
    drawn = random.Random(seed)
    steps = steps_a_life * kills + 40
    untouched = begin(Life(made(folder / "untouched") / "run", steps, start))
    run = made(folder / "killed") / "run"
    moments: Counter[str] = Counter()
    problems: list[str] = []
    began, ready = time.monotonic(), 10.0
    done = 0
    while done < kills:
        life = begin(Life(run, steps, start, drawn))
        target = drawn.choice(TARGETS)
        # Near the end only moments before the first step: the run must not end before all kills are done.
        moment = drawn.choice(MOMENTS if life.begins_at < steps - 40 else ("starting", "reading"))
        committed = newest(run)
        ready = _wait_for(life, moment, drawn, steps_a_life, ready)
        if life.over():
            problems.append(f"kill {done + 1}: {life.what} ended by itself: {life.said() or life.process.returncode}")
            break
        life.kill(target)
        done += 1
        moments[moment] += 1
        if newest(run) < committed:
            problems.append(f"kill {done}: the last checkpoint was of step {committed} and is of {newest(run)}")
        if newest(run) == 0:
            shutil.rmtree(run, ignore_errors=True)  # nothing was saved yet: start over
        left = (time.monotonic() - began) / done * (kills - done)
        tell(
            f"kill {done:3} of {kills}  {life.what:11}  {moment:8} {target:8}  step {last_step(run):5} of {steps}, "
            f"saved {newest(run):5}  {left:.0f} s left"
        )
    last = begin(Life(run, steps, start, drawn))
    last.process.wait(10 * DEADLINE)
    if last.process.returncode:
        problems.append(f"the last life failed: {last.said()}")
    untouched.process.wait(10 * DEADLINE)
    left_over = [path.name for path in (run / "checkpoints").glob(".*-step-*")]
    if left_over:
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
    until(lambda: life.over() or len(life.workers()) == 2, "workers did not start")
    if moment == "reading":
        _sleep(life, drawn.random() * max(0.0, ready - (time.monotonic() - life.started)))
        return ready
    wanted = life.begins_at + drawn.randint(1, 2 * steps_a_life - 2)
    until(lambda: life.over() or life.step() > life.begins_at, "no step was taken")
    first = time.monotonic() - life.started
    until(lambda: life.over() or life.step() >= wanted, f"step {wanted} was not reached")
    folder = life.run / "checkpoints"
    if moment == "training":
        time.sleep(drawn.random() * 0.1)
    else:
        pattern = f".{moment}-*"
        end_of_patience = time.monotonic() + 1.0  # the folder exists for a few milliseconds, every few steps
        while not life.over() and not any(folder.glob(pattern)) and time.monotonic() < end_of_patience:
            pass
        time.sleep(drawn.random() * 0.01)
    return first


def _sleep(life: Life, seconds: float) -> None:
    """Sleeps, at most until the first step: if the machine has become faster, the life could train to its end."""
    until_then = time.monotonic() + seconds
    while time.monotonic() < until_then and not life.over() and life.step() <= life.begins_at:
        time.sleep(0.01)


def newest(run: Path) -> int:
    """The step of the last committed checkpoint, or 0."""
    return max(
        (int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if (path / "COMMIT").exists()), default=0
    )


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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nestpipe-kills-", dir=args.path) as folder:
        outcome = kill_and_resume(Path(folder), args.kills, args.seed, lambda line: print(line, flush=True))
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
