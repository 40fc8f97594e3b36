"""A worker's random state, as its file has it."""

from __future__ import annotations

from pathlib import Path

import torch

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.tensors import OTHERWISE, Written, read_tensors


def read_random(path: Path, written: Written) -> torch.Tensor:
    """What `torch.set_rng_state` takes; CheckpointError otherwise."""
    tensors = read_tensors(path, written)
    now = torch.get_rng_state()
    found = tensors.get("random")
    if len(tensors) != 1 or found is None or found.dtype != now.dtype or found.shape != now.shape:
        raise CheckpointError(f"{path} must have random, {len(now)} bytes, and nothing else; {OTHERWISE}")
    try:
        torch.Generator().set_state(found)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} has no random state of torch's ({reason}); {OTHERWISE}") from None
    return found
