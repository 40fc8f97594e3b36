"""SIGTERM while a worker starts: training that begins meanwhile ends in order, and one that has not begun never does."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKER = """
import os, signal, sys, threading, time, types
from nestpipe.launch import signals
now = 0.0  # by the clock that grace is measured with
signals.time = types.SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
signals.end_on_signals()
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "never":
    while True:
        now += signals.GRACE_SECONDS / 10
        time.sleep(0.01)
time.sleep(float(sys.argv[1]))
asked = threading.Event()
with signals.ending_orderly(asked.set, 60.0):
    print("training", flush=True)
    assert asked.wait(30.0)
    now += 2 * signals.GRACE_SECONDS
    time.sleep(0.2)
    print("saved", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("starts_in", "said", "code"), [("0", "training\nsaved\n", 0), ("0.4", "training\nsaved\n", 0), ("never", "", 143)]
)
def test_a_signal_that_comes_before_training(starts_in: str, said: str, code: int) -> None:
    """Promise: whoever has been told to stop and begins all the same is let finish what it begins."""
    command = [sys.executable, "-c", WORKER, starts_in]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (said, code), done.stderr


INTERRUPTED_WHILE_IT_STARTS_A_PROCESS = """
import os, signal, subprocess, sys
from contextlib import nullcontext
from nestpipe.launch.signals import signals_held
signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
try:
    with signals_held() if sys.argv[1] == "held" else nullcontext():
        child = subprocess.Popen(["true"], preexec_fn=lambda: None)  # so that Python itself forks
except KeyboardInterrupt:
    print("interrupted", child.wait())
else:
    print("lost")
"""


@pytest.mark.parametrize(("how", "said"), [("held", "interrupted 0\n"), ("not held", "lost\n")])
def test_ctrl_c_while_a_process_starts_is_not_lost(how: str, said: str) -> None:
    """Promise: a ladder that is interrupted in the moment in which it starts a rung ends.  Without help Python drops it."""
    command = [sys.executable, "-c", INTERRUPTED_WHILE_IT_STARTS_A_PROCESS, how]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == said
