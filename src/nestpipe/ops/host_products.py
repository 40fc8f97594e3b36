"""Matrix products of a linear layer's backward pass on the host, at shapes that its vector registers like.

A large weight whose width is no multiple of 8 gets columns of zeros for as long as a product takes.  A narrow one is
multiplied the other way round.  Results are the layer's own: in the same bits with MKL on an EPYC, and on any host they
depend on shapes alone, so every schedule rounds the same way.

`python bench/kernels.py`, 2026-11-17, one thread of an EPYC, caches cold.  Time without / with, median (quartiles) of
60 turns:

    415 x 512, both products of the backward pass, 8 x 256 samples    1.19 (1.14 to 1.26)    34.0 and 28.1 ms
    the same, 2048 samples at once                                    1.37 (1.30 to 1.44)    39.5 and 28.6 ms
    13 x 512, gradient of the weight, 256 samples                     1.06 (0.95 to 1.17)    with warm caches 2.2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import functional

LANES = 8
"""Numbers of a register."""
NARROW = 16
"""A weight with fewer columns is multiplied the other way round."""
LARGE, MANY = 1 << 16, 64
"""The least numbers of a weight, and the least rows to multiply it with, that make widening it worth a copy."""


def add_weight_products(total: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """total [out, in] += grad.T @ input for every (grad [n, out], input [n, in]), one after another."""
    if is_worth_widening(total, sum(grad.shape[0] for grad, _ in pairs)):
        wide = widened(total)
        add_weight_products_reference(wide, ((grad, widened(input)) for grad, input in pairs))
        total.copy_(wide[:, : total.shape[1]])
    elif total.shape[1] < NARROW and total.device.type == "cpu":
        for grad, input in pairs:
            total.add_((input.t() @ grad).t())
    else:
        add_weight_products_reference(total, pairs)


def add_weight_products_reference(total: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """`add_weight_products` as torch does it."""
    for grad, input in pairs:
        total.addmm_(grad.t(), input)


def is_worth_widening(weight: Tensor, rows: int) -> bool:
    """Whether products of `rows` rows with this weight are faster with columns of zeros, the copy included."""
    uneven = weight.shape[1] % LANES != 0 and weight.shape[1] > NARROW
    return uneven and weight.numel() >= LARGE and rows >= MANY and weight.device.type == "cpu"


def widened(matrix: Tensor) -> Tensor:
    """The matrix with columns of zeros up to the next multiple of a register."""
    return functional.pad(matrix, (0, -matrix.shape[1] % LANES))
