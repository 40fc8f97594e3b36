"""Models refuse what they cannot train on, and the stand-in for an accelerator computes what it says."""

from __future__ import annotations

import pytest
import torch

import samples
from nestpipe import Batch, KeyedJaggedTensor
from nestpipe.models import timed
from nestpipe.models.dlrm import DenseArch, DLRMConfig
from oracle import distance

CLOSE = 1e-12


def test_a_dlrm_without_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="make no pairs"):
        DenseArch(DLRMConfig(), sparse_features=1, dense_features=0)


@pytest.mark.parametrize("parameters", [0, 7])
def test_timed_loss_by_hand(parameters: int) -> None:
    """Promise: the stand-in's loss and its gradients are those of plain torch."""
    torch.manual_seed(parameters)
    pooled = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    dense = torch.randn(parameters, dtype=torch.float64, requires_grad=True)
    target = torch.randn(5, dtype=torch.float64)
    loss, score = timed.Loss.apply(pooled, target, dense)
    wanted = (pooled.mean(1) - target).square().mean()
    if parameters:
        wanted = wanted + 0.5 * (dense - pooled.detach().mean()).square().mean()
    assert distance(loss.detach().numpy(), wanted.detach().numpy()) <= CLOSE
    assert torch.equal(score, pooled.mean(1)) and not score.requires_grad
    ours, theirs = (torch.autograd.grad(3 * x, [pooled, dense], allow_unused=True) for x in (loss, wanted))
    for a, b in zip(ours, theirs):
        assert b is None or distance(a.numpy(), b.numpy()) <= CLOSE


@pytest.mark.parametrize("times", [[1, 2], [1, 2, 3, 4, 5]])
def test_hstu_needs_one_time_more_than_items(times: list[int]) -> None:
    """Promise: a batch whose times do not fit its histories is refused; the kernel would read or write out of bounds."""
    lengths = torch.tensor([2, 2, 2 * samples.NEGATIVES, len(times)])
    values = torch.tensor([1, 2, 2, 3, *range(2 * samples.NEGATIVES), *times])
    with pytest.raises(ValueError, match="'time' must have one entry more than 'history'"):
        samples.model("hstu", "float32")(Batch(KeyedJaggedTensor(samples.FEATURES["hstu"], values, lengths=lengths)))


@pytest.mark.parametrize(
    ("targets", "negatives", "said"),
    [
        ([2, 3], [3, 2], "one target per history position"),
        ([3, 2], [2, 3], "the same number of negatives"),
        ([3, 2], [0, 0], "at least one"),
        ([3, 2], [5, 3], "the same number of negatives"),
    ],
)
def test_hstu_pairs_targets_and_negatives_with_places(targets: list[int], negatives: list[int], said: str) -> None:
    """Promise: samples whose parts do not fit are refused, even if the totals do."""
    lengths = torch.tensor([3, 2, *targets, *negatives, 4, 3])
    kjt = KeyedJaggedTensor(samples.FEATURES["hstu"], torch.arange(int(lengths.sum())) % 7, lengths=lengths)
    with pytest.raises(ValueError, match=said):
        samples.model("hstu", "float32")(Batch(kjt))
