"""State that each worker saves for itself: its random state, and the model's buffers, such as BatchNorm's averages.

Parameters are equal on all workers and are saved once, in the dense file.  Buffers may differ; those of worker 0 are
in the dense file too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.plain_file import Place, Written
from nestpipe.checkpoint.tensors import read_tensors
from nestpipe.checkpoint.train_state import TrainState

BUFFER = "buffer."


def clone_worker(state: TrainState) -> dict[str, torch.Tensor]:
    """Copies of this worker's own state, on the host."""
    found = {"random": torch.get_rng_state()}
    if state.world.rank:
        for name, buffer in state.model.named_buffers():
            found[f"{BUFFER}{name}"] = buffer.detach().to("cpu", copy=True)
    return found


def restore_worker(state: TrainState, path: Place, written: Written) -> None:
    """Restores this worker's file.  Raises CheckpointError, before it changes anything, for another model."""
    random, buffers = read_worker(path, written)
    own = dict(state.model.named_buffers()) if state.world.rank else {}
    if _kinds(own) != _kinds(buffers):
        raise CheckpointError(f"{path}: its buffers are not those of the model: it belongs to another model")
    with torch.no_grad():
        for name, buffer in own.items():
            buffer.copy_(buffers[name])
    torch.set_rng_state(random)


def read_worker(path: Place, written: Written) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The random state for `torch.set_rng_state`, and buffers by name.  CheckpointError if the file is not valid."""
    tensors = read_tensors(path, written)
    now = torch.get_rng_state()
    found = tensors.pop("random", None)
    others = [name for name in tensors if not name.startswith(BUFFER)]
    if others or found is None or found.dtype != now.dtype or found.shape != now.shape:
        raise CheckpointError(
            f"{path} must have random, of {len(now)} bytes, and buffers, and nothing else; {RECOVERY_HINT}"
        )
    try:
        torch.Generator().set_state(found)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} has no valid random state of torch ({reason}); {RECOVERY_HINT}") from None
    return found, {name.removeprefix(BUFFER): tensor for name, tensor in tensors.items()}


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
