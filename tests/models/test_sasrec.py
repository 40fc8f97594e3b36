"""SASRec: against torch's own attention, and the same bits under every schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from commands import nestpipe
from nestpipe.models.sasrec import EPS, Block, SASRecConfig, causal_attention


def plain(block: Block, x: Tensor, heads: int) -> Tensor:
    """One history through the block's equations, in torch's own modules with the block's weights."""
    dim = x.shape[1]
    q = nn.functional.layer_norm(x, (dim,), block.attention_norm.weight, block.attention_norm.bias, EPS)
    weight = torch.cat([block.query.weight, block.key_value.weight])
    bias = torch.cat([block.query.bias, block.key_value.bias])
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed, _ = nn.functional.multi_head_attention_forward(
        q[:, None], x[:, None], x[:, None], dim, heads, weight, bias, None, None, False, 0.0,
        block.out.weight, block.out.bias, attn_mask=future, training=False,
    )  # fmt: skip
    y = nn.functional.layer_norm(q + mixed[:, 0], (dim,), block.forward_norm.weight, block.forward_norm.bias, EPS)
    return y + block.narrow(torch.relu(block.widen(y)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(2, 4), st.integers(0, 9))
@settings(max_examples=30)
def test_a_block_is_that_of_plain_torch(lengths: list[int], heads: int, width: int, seed: int) -> None:
    """Promise: outputs and all gradients in float64, for histories of any lengths, one by one."""
    torch.manual_seed(seed)
    config = SASRecConfig(dim=heads * width, heads=heads, hidden=5, dropout=0.0)
    block = Block(config).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    x = torch.randn(sum(lengths), config.dim, dtype=torch.float64, requires_grad=True)
    ours = block(x, lengths)
    theirs = torch.cat([plain(block, part, heads) for part in x.split(lengths)])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(ours)
    inputs = [x, *block.parameters()]
    for a, b in zip(torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(theirs, inputs, weights)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_histories_do_not_see_each_other_or_the_future() -> None:
    """A change of one token changes this token and later ones of its history, and nothing else."""
    torch.manual_seed(0)
    lengths = [3, 5, 3, 1]
    q, k, v = (torch.randn(12, 2, 4) for _ in range(3))
    before = causal_attention(q, k, v, lengths, 0.0)
    k[4], v[4] = 7.0, 7.0  # the second token of the second history
    changed = (causal_attention(q, k, v, lengths, 0.0) != before).any(dim=2).any(dim=1)
    assert changed.tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_dropout_is_only_for_training() -> None:
    torch.manual_seed(0)
    block, x = Block(SASRecConfig(dim=6, dropout=0.5)), torch.randn(7, 6)
    assert not torch.equal(block(x, [3, 4]), block(x, [3, 4]))
    block.eval()
    assert torch.equal(block(x, [3, 4]), block(x, [3, 4]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 0}, r"model\.hidden must be at least 1, not 0"),
        ({"attention_dropout": 1.0}, r"model\.attention_dropout must be in \[0, 1\), not 1"),
        ({"heads": 3}, r"model\.dim \(50\) must be a multiple of model\.heads \(3\)"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    """One line that says what to change."""
    with pytest.raises(ValueError, match=message):
        replace(SASRecConfig(), **changes)


RECIPE = """
[data]
kind = "{data}"
users = 300
items = 100
groups = 5
max_length = 20
negatives = 8
{length}
[model]
kind = "sasrec"
dim = 8
heads = 2
max_length = 20
[train]
batch_size = 12
[pipeline]
micro_batches = 3
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "workers", "device"),
    [("dbp", 1, "cpu"), ("fwp", 2, "cpu"), ("nested", 3, "cpu"), ("nested", 2, "sim"), ("fwp", 1, "sim")],
)
def test_every_schedule_gives_the_bits_of_serial(tmp_path: Path, schedule: str, workers: int, device: str) -> None:
    """Promise: rows, state, dense parameters and losses, on the host and on the simulated device."""
    data, length = ("sequences", "mean_length = 12.0") if workers != 3 else ("histories", "median_length = 12")
    (tmp_path / "my.toml").write_text(RECIPE.format(data=data, length=length))
    arguments = ["--schedule", schedule, "--workers", str(workers), "--steps", "5"]
    arguments += ["--device", "sim"] if device == "sim" else []
    ended = nestpipe(tmp_path, "verify", "my.toml", *arguments)
    assert ended.code == 0 and "equal" in ended.out + ended.err, ended
