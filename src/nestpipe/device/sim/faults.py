"""What the simulated device raises.  Imports nothing heavy."""

from __future__ import annotations

from nestpipe.errors import NestPipeError


class DeviceFault(NestPipeError, RuntimeError):
    """Something went wrong on the device earlier; told at a host sync, names the operation and the place that issued it."""


class DeviceMix(NestPipeError, RuntimeError):
    """An operation was given tensors of the host and of the device; told at once."""
