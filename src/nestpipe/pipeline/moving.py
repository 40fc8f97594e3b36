"""Batches on their way to the device of a model."""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.data.batch import Batch
from nestpipe.device.backend import Device
from nestpipe.device.host import HostDevice


def move_batches(batches: Sequence[Batch], device: Device) -> list[Batch]:
    """The batches on `device`, by one copy for all of them.  On the host the batches themselves."""
    if isinstance(device, HostDevice):
        return list(batches)
    tensors = [tensor for batch in batches for tensor in batch.tensors()]
    moved = iter(device.upload([tensor.numpy() for tensor in tensors], "compute"))
    return [batch.with_tensors([next(moved) for _ in batch.tensors()]) for batch in batches]
