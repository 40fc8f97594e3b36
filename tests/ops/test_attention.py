"""Jagged attention: kernels by tiles, blocks through torch, the reference on padded samples, and the oracle."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from comparing import FLOATS, check_close, with_gradients
from histories import some_events
from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops import attention, gemm
from nestpipe.ops.attention import SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS, Attention, jagged_attention
from nestpipe.ops.event_times import BUCKETS, DECAY, PARAMETERS, POWER, TIME_BUCKETS, EventTimes

MODES = st.sampled_from([SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS])
KINDS = st.sampled_from([BUCKETS, POWER, DECAY])
WAYS = {
    "tiled": gemm.tile_gemm,
    "blas": lambda dtype: gemm.found(gemm.NAMES[dtype], False, dtype),
    "blocks": lambda dtype: None,
}
"""Who multiplies.  The first is the second where a machine has no AVX-512."""


def inputs(events: EventTimes, width: int, settings: Attention, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, by_place and by_time, which take gradients."""
    tokens = int(events.lengths.sum())
    vectors = [torch.randn(tokens, settings.heads * width, dtype=dtype) for _ in range(3)]
    by_time = torch.rand(PARAMETERS[settings.kind], dtype=dtype) * 0.9 + 0.05
    return [t.requires_grad_() for t in (*vectors, torch.randn(2 * 70 + 1, dtype=dtype), by_time)]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 20), max_size=5),
    *(st.integers(1, 8), st.integers(1, 9)),
    *(MODES, KINDS),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    *(st.integers(0, 17), st.booleans(), st.sampled_from(sorted(WAYS)), FLOATS, st.integers(0, 2**31 - 1)),
)
@example([9, 1, 4], 2, 3, SCORE_BIAS, BUCKETS, (4, 4), 5, True, "tiled", torch.float64, 0)
@example([20, 0, 1], 8, 5, THREE_CHANNELS, BUCKETS, (4, 7), 3, True, "tiled", torch.float64, 0)
@example([20, 3], 2, 5, TWO_CHANNELS, DECAY, (5, 3), 3, True, "tiled", torch.float64, 0)
@example([], 2, 3, SCORE_BIAS, BUCKETS, (4, 4), 5, True, "tiled", torch.float32, 0)
@example([0], 2, 3, THREE_CHANNELS, POWER, (4, 4), 5, True, "blocks", torch.float32, 0)
def test_kernels_blocks_reference_and_oracle(
    lengths: list[int],
    heads: int,
    width: int,
    mode: int,
    kind: int,
    tile: tuple[int, int],
    spread: int,
    in_order: bool,
    way: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Promise: tiles of any size, blocks of rows, reference and oracle give the same result and the same gradients."""
    torch.manual_seed(seed)
    events, chosen = some_events(lengths, spread, in_order), Attention(heads, 0.1, mode, kind)
    given_ = inputs(events, width, chosen, dtype)
    grad = torch.randn(sum(lengths), chosen.channels * heads * width, dtype=dtype)
    used = given_ if mode != TWO_CHANNELS else given_[2:]
    ways = [attention.jagged_attention_reference, oracle.plain_jagged_attention][: 2 if sum(lengths) else 1]
    with (
        mock.patch.object(attention, "ROWS", tile[0]),
        mock.patch.object(attention, "COLUMNS", tile[1]),
        mock.patch.object(attention, "tile_gemm", WAYS[way]),
    ):
        found = with_gradients(jagged_attention(*given_, events, chosen), used, grad)
    check_close(found, *(with_gradients(each(*given_, events, chosen), used, grad) for each in ways), looser=10)


def test_gradients_of_long_histories_in_float64() -> None:
    """Promise: with several tiles, gradients are the reference's to 1e-9."""
    torch.manual_seed(0)
    events = some_events([300, 0, 1, 129], 6, True)
    for mode, kind in ((SCORE_BIAS, BUCKETS), (THREE_CHANNELS, BUCKETS), (TWO_CHANNELS, POWER), (TWO_CHANNELS, DECAY)):
        chosen = Attention(3, 1 / 300, mode, kind)
        vectors = [torch.randn(430, 21, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        biases = [torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (599, PARAMETERS[kind])]
        used = [*vectors[2 if mode == TWO_CHANNELS else 0 :], *biases]
        grad = torch.randn(430, chosen.channels * 21, dtype=torch.float64)
        ways = jagged_attention, attention.jagged_attention_reference
        found, wanted = (
            [t.detach() for t in with_gradients(way(*vectors, *biases, events, chosen), used, grad)] for way in ways
        )
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() <= 1e-9 * max(1.0, float(other.abs().max()))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=4),
    *(MODES, st.sampled_from(sorted(WAYS)), FLOATS, st.integers(0, 2**31 - 1)),
)
def test_cached_keys_and_values(
    histories: list[tuple[int, int]], mode: int, way: str, dtype: torch.dtype, seed: int
) -> None:
    """Promise: queries of the last places alone have the bits of all places' where the cache ends with a tile, and the
    reference's numbers wherever it ends."""
    torch.manual_seed(seed)
    lengths = [length for length, _ in histories]
    chosen, events = Attention(2, 0.1, mode), some_events(lengths, 5, True)
    given_ = [t.detach() for t in inputs(events, 3, chosen, dtype)]
    whole = given_[0]
    route = mock.patch.object(attention, "tile_gemm", WAYS[way])
    with route, mock.patch.object(attention, "ROWS", 8), mock.patch.object(attention, "COLUMNS", 16):
        wanted = jagged_attention(*given_, events, chosen)
        for exact in (True, False):
            cached = [min(length, 8 * tiles if exact else 7 * tiles) for length, tiles in histories]
            asked = torch.tensor([length - kept for length, kept in zip(lengths, cached, strict=True)])
            _, place = JaggedTensor(whole, lengths=events.lengths).places()
            kept = torch.repeat_interleave(torch.tensor(cached), events.lengths)
            found = jagged_attention(whole[place >= kept], *given_[1:], events, chosen, asked)
            if exact:
                assert torch.equal(found, wanted[place >= kept])
            reference = attention.jagged_attention_reference(whole[place >= kept], *given_[1:], events, chosen, asked)
            check_close([found], [reference], looser=10)


def test_memory_is_linear() -> None:
    """Promise: nothing of the size of all pairs is made, forward or backward."""
    made: list[int] = []
    empty = torch.Tensor.new_empty

    def counted(tensor: torch.Tensor, *size: int) -> torch.Tensor:
        found = empty(tensor, *size)
        made.append(found.numel())
        return found

    events = some_events([700], 6, True)
    vectors = [torch.randn(700, 4, requires_grad=True) for _ in range(3)]
    biases = [torch.zeros(1399, requires_grad=True), torch.zeros(TIME_BUCKETS + 1, requires_grad=True)]
    with mock.patch.object(torch.Tensor, "new_empty", counted):
        jagged_attention(*vectors, *biases, events, Attention(2, 0.1)).sum().backward()
    assert max(made) < 700 * 700 / 4


@pytest.mark.parametrize(
    ("keys", "queries", "places", "buckets", "heads", "told"),
    [
        (4, None, 9, 129, 1, "does not fit times of 2 histories with 5 tokens"),
        (5, [3, 3], 9, 129, 1, "between 0 queries and as many"),
        (5, [-1, 2], 9, 129, 1, "between 0 queries and as many"),
        (5, [1, 1], 9, 129, 1, "needs queries of shape"),
        (5, None, 4, 129, 1, "does not fit 4 biases by place"),
        (5, None, 9, 128, 1, "and 128 by time"),
        (5, None, 9, 129, 3, "do not divide"),
    ],
)
def test_shapes_that_do_not_fit(
    keys: int, queries: list[int] | None, places: int, buckets: int, heads: int, told: str
) -> None:
    """Promise: no kernel reads or writes out of bounds."""
    vectors = torch.zeros(5, 4), torch.zeros(keys, 4), torch.zeros(keys, 4)
    asked = None if queries is None else torch.tensor(queries)
    events = some_events([3, 2], 3, True)
    with pytest.raises(ValueError, match=told):
        jagged_attention(*vectors, torch.zeros(places), torch.zeros(buckets), events, Attention(heads, 0.1), asked)


def test_floats_are_promoted() -> None:
    """Promise: a float64 model on float32 rows computes in float64."""
    biases = torch.zeros(3).double(), torch.zeros(TIME_BUCKETS + 1).double()
    found = attention.gated_attention(torch.randn(2, 8), *biases, some_events([2], 3, True), 1, 0.1)
    assert found.dtype == torch.float64


def test_other_floats_take_the_reference() -> None:
    """Promise: a dtype without a kernel still works."""
    events, biases = some_events([2], 3, True), (torch.zeros(3), torch.zeros(TIME_BUCKETS + 1))
    mixed = torch.randn(2, 8)
    wanted = attention.gated_attention(mixed, *biases, events, 1, 0.1)
    found = attention.gated_attention(mixed.bfloat16(), *(b.bfloat16() for b in biases), events, 1, 0.1)
    assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), wanted, rtol=0.1, atol=0.1)


def test_buckets_at_the_edges() -> None:
    """Promise: no gap, the largest gap and gaps next to a bucket's edge are in the bucket that the logarithm names, in
    tiles and on padded samples, whether times are in order or not."""
    gaps = [0, 1, 2, 3, 2**31, 2**62, 10**15, 10**16 + 1]
    least, most = -(2**63), 2**63 - 1
    for first, second in [*((5, 5 + gap) for gap in gaps), (least, 0), (least, most), (most, least), (most, 0)]:
        events = EventTimes(JaggedTensor(torch.tensor([first, second]), lengths=torch.tensor([2])))
        wanted = oracle.plain_bucket(abs(second - first))
        assert int(events.buckets) == wanted, second - first
        by_time, one = torch.arange(TIME_BUCKETS + 1.0), torch.ones(1, 1)
        found = jagged_attention(one, one, one, torch.zeros(1), by_time, events, Attention(1, 0.1, THREE_CHANNELS))
        assert found[0, 1] == wanted, second - first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_shows(dtype: torch.dtype) -> None:
    """Promise: a NaN in any input or parameter is in the result."""
    events = some_events([5, 3], 4, True)
    for mode, kind in ((SCORE_BIAS, BUCKETS), (THREE_CHANNELS, POWER), (TWO_CHANNELS, POWER), (TWO_CHANNELS, DECAY)):
        chosen = Attention(2, 0.1, mode, kind)
        given_ = [t.detach() for t in inputs(events, 3, chosen, dtype)]
        used = range(5) if mode != TWO_CHANNELS else range(2, 5)
        for place in used:
            spoiled = [t.clone() for t in given_]
            spoiled[place].view(-1)[len(spoiled[place].view(-1)) // 2 if place < 4 else slice(None)] = torch.nan
            assert jagged_attention(*spoiled, events, chosen).isnan().any(), (mode, kind, place)
        if kind != BUCKETS:
            for parameter in range(PARAMETERS[kind]):
                spoiled = [*given_[:4], given_[4].clone()]
                spoiled[4][parameter] = torch.nan
                assert jagged_attention(*spoiled, events, chosen).isnan().any(), (kind, parameter)


def test_gaps_beyond_int64() -> None:
    """Promise: functions of time take the largest gaps as the reference does."""
    times = torch.tensor([-(2**63), 0, 2**63 - 1])
    events = EventTimes(JaggedTensor(times, lengths=torch.tensor([3])))
    for kind in (POWER, DECAY):
        chosen = Attention(1, 0.1, TWO_CHANNELS, kind)
        given_ = inputs(events, 2, chosen, torch.float64)
        grad = torch.randn(2, 4, dtype=torch.float64)
        ways = jagged_attention, attention.jagged_attention_reference
        check_close(*(with_gradients(way(*given_, events, chosen), given_[2:], grad) for way in ways))
