"""Models refuse what they cannot train on, and the stand-in for an accelerator computes what it says."""

from __future__ import annotations

import math

import pytest
import torch

import samples
from nestpipe import Batch, KeyedJaggedTensor
from nestpipe.models import timed
from nestpipe.models.dlrm import DenseArch, DLRMConfig
from nestpipe.models.fuxi import DecayTime, FuXi, FuXiConfig
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


def test_parameters_of_fuxi_alpha() -> None:
    """Promise: the blocks have the published number of parameters: 12 d^2, the biases of time and place, and W_0's."""
    blocks = FuXi(FuXiConfig(dim=256, blocks=4, heads=8, max_length=2049)).blocks
    assert sum(p.numel() for p in blocks.parameters()) == 3_163_656


@pytest.mark.parametrize(("variant", "multiple"), [("alpha", 9), ("beta", 5), ("gamma", 5)])
def test_weights_of_fuxi(variant: str, multiple: int) -> None:
    """Promise: matrices of a block have (9 + 3 m) d^2 or (5 + 3 m) d^2 numbers."""
    config = FuXiConfig(dim=16, blocks=1, heads=2, variant=variant, feed_forward=2.0)  # type: ignore[arg-type]
    matrices = [p for p in FuXi(config).blocks.parameters() if p.dim() == 2]
    assert sum(p.numel() for p in matrices) == (multiple + 3 * 2) * 16**2


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"feed_forward": 0.0}, "feed_forward"),
        ({"feed_forward": math.inf}, "feed_forward"),
        ({"time_unit": 0.0}, "time_unit"),
        ({"time_unit": math.inf}, "time_unit"),
        ({"temperature": math.inf}, "temperature"),
    ],
)
def test_fuxi_refuses(keys: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=f"model.{told}"):
        FuXiConfig(**keys)  # type: ignore[arg-type]


def test_gamma_in_seconds_or_days() -> None:
    """Promise: gamma's weight is a g^(D^b) with D in units of time: a day's by default."""
    torch.manual_seed(0)
    time = DecayTime(FuXiConfig(variant="gamma"))
    a, b, rate = time().tolist()
    gap, g = 3 * 86_400.0, float(torch.sigmoid(time.logit_g.detach()))
    assert math.isclose(a * math.exp(-rate * gap**b), a * g ** (3.0**b), rel_tol=1e-5)
    assert 0.5 <= g <= 0.99 and 0.5 <= b <= 2.0


def test_a_variant_with_another_ones_time() -> None:
    """Promise: model.time replaces what a pair weighs by time and nothing else; TurboGR's FuXi is alpha with gamma's."""
    own, other = FuXi(FuXiConfig(dim=8)), FuXi(FuXiConfig(dim=8, time="decay"))
    assert isinstance(other.blocks[0].time, DecayTime) and other.blocks[0].widths == own.blocks[0].widths
    assert other.cost() == own.cost()
