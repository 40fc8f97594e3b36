"""Batches on their way to the device of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nestpipe.data.batch import Batch
from nestpipe.device.backend import Device


def move_batches(batches: Sequence[Batch], device: Device) -> list[Batch]:
    """The batches on `device`, by one copy for all of them.  On the host the batches themselves."""
    if device.torch_device == torch.device("cpu"):
        return list(batches)
    tensors = [tensor for batch in batches for tensor in batch.tensors()]
    moved = iter(device.upload([tensor.numpy() for tensor in tensors], "compute"))
    return [batch.with_tensors([next(moved) for _ in batch.tensors()]) for batch in batches]
