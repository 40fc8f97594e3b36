"""Promise: every thread of a process computes with the same number of threads, so a product has the same bits in all of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = """
import ctypes, re, threading
import torch
from nestpipe.device.sim.machine import MACHINE
from nestpipe.engine.lanes import LaneThread

found = re.search(r"/\\S*lib[gi]omp\\S*", open("/proc/self/maps").read())
openmp = ctypes.CDLL(found[0])
torch.set_num_threads(1)
seen = {}

def by_itself():
    seen["new"] = openmp.omp_get_max_threads()

def on_the_device():
    MACHINE.drain()
    seen["device"] = openmp.omp_get_max_threads()

for target in (by_itself, on_the_device):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
lane = LaneThread("network")
lane.submit(lambda: seen.update(lane=openmp.omp_get_max_threads()))
lane.close()
print(seen["new"], seen["device"], seen["lane"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks OpenMP's library by its place in /proc")
def test_lanes_compute_with_as_many_threads_as_torch_was_told() -> None:
    """A new thread has OpenMP's own number, two here, until it is told; a lane and a thread of the device are."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    told = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["2", "1", "1"]
