"""What each worker has for itself, as its file has it: random state, and buffers of the model, such as BatchNorm's averages.

Parameters are the same on every worker and are in one file; buffers may differ.  Those of worker 0 are in that file, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.tensors import OTHERWISE, Written, read_tensors
from nestpipe.pipeline.pipeline import TrainPipeline

BUFFER = "buffer."


def clone_worker(pipeline: TrainPipeline) -> dict[str, torch.Tensor]:
    """Copies, on the host."""
    found = {"random": torch.get_rng_state()}
    if pipeline.world.rank:
        for name, buffer in pipeline.model.named_buffers():
            found[f"{BUFFER}{name}"] = buffer.detach().to("cpu", copy=True)
    return found


def restore_worker(pipeline: TrainPipeline, path: Path, written: Written) -> None:
    """Of the same worker of as many.  CheckpointError, before anything is changed, where it is of another model."""
    random, buffers = read_worker(path, written)
    own = dict(pipeline.model.named_buffers()) if pipeline.world.rank else {}
    if _kinds(own) != _kinds(buffers):
        raise CheckpointError(f"{path}: its buffers are not those of the model: it is of another model")
    with torch.no_grad():
        for name, buffer in own.items():
            buffer.copy_(buffers[name])
    torch.set_rng_state(random)


def read_worker(path: Path, written: Written) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `torch.set_rng_state` takes, and buffers by name; CheckpointError otherwise."""
    tensors = read_tensors(path, written)
    now = torch.get_rng_state()
    found = tensors.pop("random", None)
    others = [name for name in tensors if not name.startswith(BUFFER)]
    if others or found is None or found.dtype != now.dtype or found.shape != now.shape:
        raise CheckpointError(f"{path} must have random, {len(now)} bytes, and buffers, and nothing else; {OTHERWISE}")
    try:
        torch.Generator().set_state(found)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} has no random state of torch's ({reason}); {OTHERWISE}") from None
    return found, {name.removeprefix(BUFFER): tensor for name, tensor in tensors.items()}


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
