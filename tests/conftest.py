"""What holds for all tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: a new thread that sums must not take two

import fcntl
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # as workers do: a product of several threads may round by how many there are

settings.register_profile("nestpipe", deadline=None)  # a busy machine is not a wrong program
settings.load_profile("nestpipe")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell.  What is started here would inherit that, and Ctrl-C could not be tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def alone_in_the_lab() -> Iterator[None]:
    """One test at a time, over all processes, of those that make labs, or list or remove whatever labs there are."""
    with (Path(tempfile.gettempdir()) / "nestpipe-tests-lab.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def storage() -> Iterator[Any]:
    """An S3 server on loopback, and the environment that leads to it."""
    from object_storage import serving

    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.variables.items():
            patch.setenv(name, value)
        yield server
