"""The tools with which Triton kernels are tested notice what they are for."""

from __future__ import annotations

import pytest
import torch

from interpreting import Surrounded, same_bits, same_bits_in_any_order

faulty = pytest.importorskip("faulty_kernels", reason="Triton is not installed")


@pytest.mark.parametrize("kernel", ["reads_past_the_end", "writes_past_the_end"])
def test_an_access_beyond_a_tensor_is_an_error(kernel: str) -> None:
    """Promise: no interpreted kernel reads or writes out of bounds unnoticed."""
    x, out = Surrounded(torch.ones(10)), Surrounded(torch.zeros(10))
    with pytest.raises(Exception, match="beyond every tensor"):
        getattr(faulty, kernel)[(2,)](x.tensor, out.tensor, 10, 8)


def test_the_order_of_programs_matters_to_atomics() -> None:
    """Promise: a sum that depends on the order of programs is noticed."""
    x = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0])

    def total() -> list[torch.Tensor]:
        out = torch.zeros(1)
        faulty.adds_in_any_order[(5,)](x, out)
        return [out]

    with pytest.raises(AssertionError):
        same_bits_in_any_order(total)


def test_surroundings() -> None:
    """Promise: a write beside a tensor is noticed, and -0.0 is not 0.0."""
    surrounded = Surrounded(torch.zeros(2, 2))
    assert surrounded.intact()
    surrounded.tensor.as_strided((1,), (1,), surrounded.tensor.storage_offset() + 2)[0] = 1
    assert not surrounded.intact()
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
