"""A stack of linear layers with ReLU between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from nestpipe.nn.deferred import DeferredStack


def mlp(sizes: Sequence[int], last_relu: bool) -> DeferredStack:
    """sizes[0] inputs, sizes[-1] outputs.  ReLU after every layer, after the last one only with `last_relu`."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return DeferredStack(*(layers if last_relu else layers[:-1]))
