"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_own_model_learns_on_two_workers() -> None:
    """Promise: a model, a loop and torchrun are all that two workers need."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "own_model.py")], capture_output=True, text=True, timeout=170, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(losses) == 4 and losses[-1] < 0.6 * losses[0], done.stdout
    assert "512 samples on 2 workers" in done.stdout
