"""The simulated device is one per process: each test starts with it fresh, and leaves nothing queued."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nestpipe.device import sim


@pytest.fixture
def device() -> Iterator[Any]:
    """The device module, configured by its defaults: late order, races looked for."""
    sim.enable()
    sim.configure()
    torch.manual_seed(0)
    yield torch.get_device_module("sim")
    sim.configure()
