"""SIGTERM while a worker starts: training that begins meanwhile ends in order, and one that has not begun never does."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKER = """
import os, signal, sys, threading, time
from nestpipe.launch import signals
signals.end_on_signals()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(float(sys.argv[1]))
asked = threading.Event()
with signals.ending_orderly(asked.set, 60.0):
    print("training", flush=True)
    assert asked.wait(30.0)
    time.sleep(1.5 * signals.GRACE_SECONDS)
    print("saved", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("starts_in", "said", "code"), [(0.0, "training\nsaved\n", 0), (0.4, "training\nsaved\n", 0), (20.0, "", 143)]
)
def test_a_signal_that_comes_before_training(starts_in: float, said: str, code: int) -> None:
    """Promise: whoever has been told to stop and begins all the same is let finish what it begins."""
    command = [sys.executable, "-c", WORKER, str(starts_in)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (said, code), done.stderr
