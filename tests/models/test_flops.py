"""FLOPs by formula: beside torch's own counter, hand counts and published figures."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from histories import some_events
from nestpipe.data.jagged import JaggedTensor
from nestpipe.models.flops import Cost, Trained, measured_peak
from nestpipe.models.fuxi import FuXi, FuXiConfig
from nestpipe.models.hstu import HSTU, HSTUConfig
from nestpipe.models.next_item import NextItemModel
from nestpipe.models.sasrec import SASRec, SASRecConfig
from nestpipe.train.utilisation import utilisation_in_words

COMMON: dict[str, Any] = {"dim": 12, "blocks": 3, "heads": 2, "max_length": 7, "dropout": 0.0}
MODELS: dict[str, NextItemModel] = {
    "hstu": HSTU(HSTUConfig(**COMMON)),
    "hstu, wide heads": HSTU(HSTUConfig(**COMMON, head_dim=10)),
    "alpha": FuXi(FuXiConfig(**COMMON)),
    "alpha, wide": FuXi(FuXiConfig(**COMMON, feed_forward=2.5)),
    "beta": FuXi(FuXiConfig(**COMMON, variant="beta")),
    "gamma": FuXi(FuXiConfig(**COMMON, variant="gamma")),
}


@pytest.mark.parametrize("name", MODELS)
def test_beside_torchs_counter(name: str) -> None:
    """Promise: histories of full length on padded samples cost what torch counts, forward and backward."""
    model, time = MODELS[name], some_events([7] * 4, 5, True).time
    x = torch.randn(28, 12, requires_grad=True)
    history = JaggedTensor(x, lengths=torch.tensor([7] * 4))
    counter = FlopCounterMode(display=False)
    with mock.patch("nestpipe.ops.attention.has_kernels", lambda tensor: False), counter:
        model.encode(x, history, time).sum().backward()
    trained = Trained()
    trained.add(torch.tensor([7] * 4))
    assert counter.get_total_flops() == model.cost().padded(trained)


def test_sasrec() -> None:
    """By hand: torch does not count its own softmax attention on a host.  q, k, v, out, and two layers of 9; two products."""
    cost = SASRec(SASRecConfig(**COMMON, hidden=9)).cost()
    assert cost == Cost(3 * (4 * 12 * 12 + 2 * 12 * 9), 3 * 2 * 12, 7)


@given(st.lists(st.integers(1, 9), max_size=6))
def test_by_hand(lengths: list[int]) -> None:
    """Promise: jagged FLOPs are those of the tokens and pairs that there are."""
    trained = Trained()
    trained.add(torch.tensor(lengths, dtype=torch.int64))
    pairs = sum(1 for n in lengths for i in range(n) for j in range(n) if j <= i)
    a, b, c = Cost(100, 7, 9).of_history()
    assert sum(a + b * n + c * n**2 for n in lengths) == Cost(100, 7, 9).jagged(trained)
    assert Cost(100, 7, 9).jagged(trained) == 6 * (100 * sum(lengths) + 7 * pairs)
    assert Cost(100, 7, 9).padded(trained) == 6 * len(lengths) * (100 * 9 + 7 * 81)


@pytest.mark.parametrize(
    ("kind", "dim", "blocks", "length", "published"),
    [("fuxi", 1024, 16, 2048, 4.126e12), ("hstu", 1024, 16, 2048, 1.857e12), ("fuxi", 1024, 16, 4096, 11.55e12)],
)
def test_published_figures(kind: str, dim: int, blocks: int, length: int, published: float) -> None:
    """Promise: the padded convention is that of the TurboGR paper, whose large models these are."""
    weights, products = ((12 if kind == "fuxi" else 5) * dim**2 * blocks), ((4 if kind == "fuxi" else 2) * dim * blocks)
    assert Cost(weights, products, length).padded(Trained(samples=1)) == pytest.approx(published, rel=1e-3)


def test_words() -> None:
    """Promise: a padded figure above 100 % is explained where it is printed."""
    found = {"jagged": 2e9, "padded": 9e9, "peak": 1e11, "peak_is": "measured", "mfu_jagged": 0.4, "mfu_padded": 1.8}
    assert ["40.0% MFU" in line or "can pass 100 %" in line for line in utilisation_in_words(found)] == [True, True]
    assert len(utilisation_in_words(found | {"mfu_padded": 0.9})) == 1
    assert "train.peak_tflops" in utilisation_in_words({"jagged": 2e9, "padded": 9e9})[0]
    assert measured_peak(torch.device("cpu"), size=64) > 0 and measured_peak(torch.device("meta")) == 0
