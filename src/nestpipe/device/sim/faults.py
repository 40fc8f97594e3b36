"""What the simulated device raises.  Imports nothing heavy."""

from __future__ import annotations


class DeviceFault(RuntimeError):
    """Something went wrong on the device earlier; told at a host sync, names the operation and the place that issued it."""


class DeviceMix(RuntimeError):
    """An operation was given tensors of the host and of the device; told at once."""
