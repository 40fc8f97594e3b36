"""The variants that `nestpipe bench gr` compares: worker programs with a setting of malloc each, and peers' checkouts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestpipe.lab.ladder import BenchError
from nestpipe.lab.running import PEER_PYTHON
from nestpipe.lab.settings import PEERS
from nestpipe.lab.turn_taking import TurnTaker, end_with_parent

TURN_SECONDS = 1200.0
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""glibc as shipped gives large blocks back to the system at once, and every step takes their pages again.  This keeps them."""
MALLOCS = {"as shipped": {}, "tuned": TUNED}
STEP_WORKER, OPERATOR_WORKER = "nestpipe.lab.gr_step_worker", "nestpipe.lab.gr_operator_worker"
PEER_SCRIPT = PEERS / "gr_steps.py"
CHECKOUTS = {
    "hstu": ("generative_recommenders/research/modeling/sequential/hstu.py", "Meta's generative-recommenders"),
    "fuxi": ("generative_recommenders/modeling/sequential/fuxi.py", "FuXi-alpha"),
}
"""By the name of a peer: a file of its repository, and what it is called."""


@dataclass(frozen=True)
class Variant:
    name: str
    """ours, plain, padded, or the peer."""
    malloc: str
    checkout: str | None = None
    """A peer's."""

    @property
    def title(self) -> str:
        return f"{self.name}, malloc {self.malloc}"

    def command(self, worker: str) -> list[str]:
        if self.checkout is None:
            return [sys.executable, "-m", worker]
        return [str(PEER_PYTHON), str(PEER_SCRIPT)]


class RunningVariant(TurnTaker):
    """A variant's process, pinned to one core."""

    def __init__(self, variant: Variant, worker: str, config: dict[str, Any], folder: Path) -> None:
        super().__init__(variant.title, folder, turn_seconds=TURN_SECONDS)
        self.variant = variant
        settings = folder / "config.json"
        peer = {} if variant.checkout is None else {"checkout": variant.checkout}
        settings.write_text(json.dumps({**config, **peer, "core": bench_core()}))
        command = [*variant.command(worker), "--config", str(settings), "--out", str(self._out)]
        self._processes = [self._start(command)]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment(self.variant.malloc),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=_prepare_child if sys.platform == "linux" else None,
        )


def _prepare_child() -> None:
    """Runs in the child.  Where memory runs out, the kernel is to end a bench and not somebody's training."""
    end_with_parent()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def environment(malloc: str) -> dict[str, str]:
    """Of a process with one thread and this setting of malloc, whatever this process has."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return {**kept, **MALLOCS[malloc], "OMP_NUM_THREADS": "1"}


def bench_core() -> int:
    """The core that all variants take turns on."""
    return max(os.sched_getaffinity(0))


def read_peers(given: Sequence[str]) -> dict[str, str]:
    """The checkouts by name, from `hstu=PATH` and `fuxi=PATH`.  BenchError where one cannot be used."""
    found = {}
    for peer in given:
        name, _, path = peer.partition("=")
        if name not in CHECKOUTS or not path:
            raise BenchError(f"--peers {peer}: `nestpipe bench gr` takes hstu=CHECKOUT or fuxi=CHECKOUT")
        file, title = CHECKOUTS[name]
        if not (Path(path) / file).is_file():
            raise BenchError(f"--peers {peer}: there is no {file} in it; give the folder of a checkout of {title}")
        if not PEER_PYTHON.is_file():
            raise BenchError(f"--peers {name} needs FBGEMM's operators: run `make bench-peers` first")
        found[name] = str(Path(path).resolve())
    return found
