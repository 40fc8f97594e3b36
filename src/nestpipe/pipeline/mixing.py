"""Models whose loss is not a mean over samples: what a micro-batch computes would depend on which samples are in it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nestpipe.config.micro_batches import MicroBatches


def refuse_mixing(model: nn.Module, micro_batches: MicroBatches) -> None:
    """ValueError where a module is known to mix the samples of a batch and there are micro-batches.

    What a forward pass does with its samples cannot be seen from outside: a loss over in-batch negatives, or a mean over the
    batch in the middle of a model, is the user's to know (docs/exactness.md).
    """
    counts = [pair[1] for pair in micro_batches] if isinstance(micro_batches, list | tuple) else [micro_batches]
    if all(count == 1 for count in counts):
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"{type(module).__name__} at {name!r} mixes the samples of a batch, so micro-batches would not "
                "train what one batch trains: use LayerNorm or GroupNorm, or pipeline.micro_batches = 1"
            )
