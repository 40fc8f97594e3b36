"""Numba kernels of relay inference, without the GIL: a block of a history through all layers, and candidates on its blocks.

A block of a layer is the keys of BLOCK places, transposed by head [heads, width, BLOCK], then their values [BLOCK, inner].  A
tile is BLOCK rows by the BLOCK places of one block, read where the block lies.  All products have the shapes of the grid, and
every matrix begins at a cache line: bits depend on a row's own numbers alone, whoever computed the blocks before it and
whatever stands in the rows beside it.  The last layer of a history needs its keys and values only, as nobody reads its tokens.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.infer.history import BLOCK
from nestpipe.ops.attention import SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS
from nestpipe.ops.event_kernels import biases
from nestpipe.ops.event_times import BUCKETS
from nestpipe.ops.gating_kernels import EPS
from nestpipe.ops.gemm import multiply, prepared
from nestpipe.ops.register_math import sigmoid

CHUNKS = 4
"""Tiles of candidates that go through the layers together, so that a block's keys and values are read once for them."""
SIZE = 4
"""Bytes of a float32."""


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _sum(x):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for j in range(x.shape[0]):
        total += x[j]
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _squares(x, mean):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for j in range(x.shape[0]):
        total += (x[j] - mean) * (x[j] - mean)
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for j in range(b.shape[0]):
        total += a[j] * b[j]
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _norm(x, parts, width, wide, centred, gate, gated, out):  # type: ignore[no-untyped-def]
    """out = norm(x), by rows, times `gate` where `gated`: over `parts` runs of `width` numbers, each with room for `wide`."""
    count = np.float32(parts * width)
    for t in range(x.shape[0]):
        mean, squares = np.float32(0), np.float32(0)
        if centred:
            for p in range(parts):
                mean += _sum(x[t, p * wide : p * wide + width])
            mean /= count
        for p in range(parts):
            squares += _squares(x[t, p * wide : p * wide + width], mean)
        scale = np.float32(1) / np.sqrt(squares / count + np.float32(EPS))
        for p in range(parts):
            a, to = x[t, p * wide : p * wide + width], out[t, p * wide : p * wide + width]
            if gated:
                g = gate[t, p * wide : p * wide + width]
                for j in range(width):
                    to[j] = (a[j] - mean) * scale * g[j]
            else:
                for j in range(width):
                    to[j] = (a[j] - mean) * scale
            out[t, p * wide + width : (p + 1) * wide] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _silu(x, columns):  # type: ignore[no-untyped-def]
    for t in range(x.shape[0]):
        a = x[t, :columns]
        for j in range(columns):
            a[j] = a[j] * sigmoid(a[j])


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _add_rows(x, more, bias):  # type: ignore[no-untyped-def]
    for t in range(x.shape[0]):
        a, b = x[t], more[t]
        for j in range(a.shape[0]):
            a[j] += b[j] + bias[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _weigh(scores, of_time, of_place, first, diagonal, scale):  # type: ignore[no-untyped-def]
    """In place: scale * silu(score + bias).  A row's biases by place begin at `first` for row 0, one earlier for each row
    after it; in a diagonal tile a row sees itself and those before."""
    for a in range(BLOCK):
        x, t = scores[a * BLOCK : (a + 1) * BLOCK], of_time[a * BLOCK : (a + 1) * BLOCK]
        p = of_place[first - a : first - a + BLOCK]
        for z in range(BLOCK):
            s = x[z] + (t[z] + p[z])
            x[z] = scale * (s * sigmoid(s))
        if diagonal:
            x[a + 1 :] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _weigh_plain(scores, diagonal, scale):  # type: ignore[no-untyped-def]
    for a in range(BLOCK):
        x = scores[a * BLOCK : (a + 1) * BLOCK]
        for z in range(BLOCK):
            x[z] = scale * (x[z] * sigmoid(x[z]))
        if diagonal:
            x[a + 1 :] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _weigh_columns(scores, bias, seen, scale):  # type: ignore[no-untyped-def]
    """In place: scale * silu(score + bias of its column), 0 from column `seen` on."""
    for a in range(BLOCK):
        x = scores[a * BLOCK : (a + 1) * BLOCK]
        for z in range(BLOCK):
            s = x[z] + bias[z]
            x[z] = scale * (s * sigmoid(s))
        x[seen:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def bucket_ends(times, low, thresholds, ends, tops):  # type: ignore[no-untyped-def]
    """For BLOCK places from `low` on, of times in order: the oldest event's bucket, and for every bucket up to it the first place
    whose bucket is lower.  Both move forward from one place to the next, so nothing is searched."""
    pointers = np.zeros(thresholds.shape[0] + 1, np.int64)
    top = 0
    for a in range(BLOCK):
        i = low + a
        now = times[i + 1]
        while top < thresholds.shape[0] and np.uint64(now - times[0]) >= thresholds[top]:
            top += 1
        tops[a] = top
        for k in range(top, 0, -1):
            at = pointers[k]
            if at == 0 and a == 0 and k < top:
                at = pointers[k + 1]
            while at <= i and np.uint64(now - times[at]) >= thresholds[k - 1]:
                at += 1
            pointers[k] = at
            ends[a, k] = at


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _times_of_tile(left, ends, cursors, by_time, of_time):  # type: ignore[no-untyped-def]
    """Fills what pairs of a tile weigh by time from `bucket_ends`.  Tiles of a row come from left to right."""
    right = left + BLOCK
    for a in range(BLOCK):
        bucket, z = cursors[a], left
        to = of_time[a * BLOCK : (a + 1) * BLOCK]
        while z < right:
            end = min(right, ends[a, bucket]) if bucket else right
            if end > z:
                to[z - left : end - left] = by_time[bucket]
                z = end
            if z < right:
                bucket -= 1
        cursors[a] = bucket


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _finish(products, x, sums, mixed, layer, shape, weights, room):  # type: ignore[no-untyped-def]
    """What a layer does with BLOCK tokens after attention: gate, output, and the feed-forward part where there is one."""
    normed, gated, more, wide_room = room
    parts = shape.channels * shape.heads
    _norm(sums, parts, shape.head, shape.head_wide, shape.centred, mixed, True, gated)
    deep, wide = shape.channels * shape.inner, shape.wide
    multiply(
        products, BLOCK, wide, deep, gated.ctypes.data, deep, weights.out[layer].ctypes.data, wide, False,
        more.ctypes.data, wide,
    )  # fmt: skip
    _add_rows(x, more, weights.out_bias[layer])
    if shape.hidden:
        hidden = shape.hidden
        _norm(x, 1, shape.dim, wide, shape.centred, x, False, normed)
        multiply(
            products, BLOCK, 2 * hidden, wide, normed.ctypes.data, wide, weights.up[layer].ctypes.data, 2 * hidden, False,
            wide_room.ctypes.data, 2 * hidden,
        )  # fmt: skip
        for t in range(BLOCK):
            a, b = wide_room[t, :hidden], wide_room[t, hidden:]
            for j in range(hidden):
                a[j] = a[j] * sigmoid(a[j]) * b[j]
        multiply(
            products, BLOCK, wide, hidden, wide_room.ctypes.data, 2 * hidden, weights.down[layer].ctypes.data, wide, False,
            more.ctypes.data, wide,
        )  # fmt: skip
        for t in range(BLOCK):
            a, b = x[t], more[t]
            for j in range(wide):
                a[j] += b[j]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _keep(mixed, at_v, at_k, shape, own):  # type: ignore[no-untyped-def]
    """Keys, transposed by head, and values of BLOCK tokens into a layer's part of a block."""
    inner = shape.inner
    values = own
    if shape.mode != TWO_CHANNELS:
        values = own[BLOCK * inner :]
        for low in range(0, BLOCK, 16):
            for j in range(inner):
                to = own[j * BLOCK + low : j * BLOCK + low + 16]
                for i in range(16):
                    to[i] = mixed[low + i, at_k + j]
    for t in range(BLOCK):
        values[t * inner : (t + 1) * inner] = mixed[t, at_v : at_v + inner]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def encode(gemm, x, index, times, ordered, thresholds, addresses, own, shape, weights, room):  # type: ignore[no-untyped-def]
    """Fills `own` from the tokens x [BLOCK, wide] of block `index` and the blocks at `addresses`, those before it and its own.

    `times`: of all events up to the block's end, and of the next one; behind a history's end the request's.
    """
    pairs, mixed, sums, ends, finishing = room
    scores, of_time, of_place = pairs[0], pairs[1], pairs[2]
    normed = finishing[0]
    inner, wide, mode = shape.inner, shape.wide, shape.mode
    columns, deep, low = weights.mixed.shape[2], shape.channels * shape.inner, index * BLOCK
    at_v, at_q, at_k = deep, deep + inner, deep + 2 * inner
    layer_floats = own.shape[0] // shape.layers
    keys_floats = 0 if mode == TWO_CHANNELS else BLOCK * inner
    products = prepared(gemm, x)
    quick = ordered and shape.kind == BUCKETS
    tops, cursors = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    if quick and shape.layers > 1:
        bucket_ends(times, low, thresholds, ends, tops)
    for layer in range(shape.layers):
        _norm(x, 1, shape.dim, wide, shape.centred, x, False, normed)
        at_mixed, at_weights = mixed.ctypes.data, weights.mixed[layer].ctypes.data
        mine = own[layer * layer_floats : (layer + 1) * layer_floats]
        if layer == shape.layers - 1:
            multiply(
                products,
                BLOCK,
                inner,
                wide,
                normed.ctypes.data,
                wide,
                at_weights + SIZE * at_v,
                columns,
                False,
                at_mixed + SIZE * at_v,
                columns,
            )
            _silu(mixed[:BLOCK, at_v:], inner)
            if mode != TWO_CHANNELS:
                multiply(
                    products,
                    BLOCK,
                    inner,
                    wide,
                    normed.ctypes.data,
                    wide,
                    at_weights + SIZE * at_k,
                    columns,
                    False,
                    at_mixed + SIZE * at_k,
                    columns,
                )
                _silu(mixed[:BLOCK, at_k:], inner)
            _keep(mixed, at_v, at_k, shape, mine)
            return
        multiply(
            products, BLOCK, columns, wide, normed.ctypes.data, wide, at_weights, columns, False, at_mixed, columns
        )
        _silu(mixed[:BLOCK], columns)
        _keep(mixed, at_v, at_k, shape, mine)
        by_place, by_time = weights.by_place[layer], weights.by_time[layer]
        centre = (by_place.shape[0] - 1) // 2
        events = times, ordered, thresholds, shape.kind, by_place, by_time
        cursors[:] = tops
        to = sums.ctypes.data
        for tile in range(index + 1):
            left, diagonal, add = tile * BLOCK, tile == index, tile > 0
            keys = addresses[tile] + SIZE * layer * layer_floats
            values = keys + SIZE * keys_floats
            if quick:
                _times_of_tile(left, ends, cursors, by_time, of_time)
            else:
                biases(low, left, BLOCK, BLOCK, events, of_time, of_place)
            if mode != TWO_CHANNELS:
                for h in range(shape.heads):
                    across = SIZE * h * shape.head_wide
                    multiply(
                        products,
                        BLOCK,
                        BLOCK,
                        shape.head_wide,
                        at_mixed + SIZE * at_q + across,
                        columns,
                        keys + across * BLOCK,
                        BLOCK,
                        False,
                        scores.ctypes.data,
                        BLOCK,
                    )
                    if mode == SCORE_BIAS:
                        _weigh(scores, of_time, by_place, centre + left - low, diagonal, shape.scale)
                    else:
                        _weigh_plain(scores, diagonal, shape.scale)
                    multiply(
                        products,
                        BLOCK,
                        shape.head_wide,
                        BLOCK,
                        scores.ctypes.data,
                        BLOCK,
                        values + across,
                        inner,
                        add,
                        to + across,
                        deep,
                    )
            if mode != SCORE_BIAS:
                for a in range(BLOCK):
                    seen = a + 1 if diagonal else BLOCK
                    t, p = of_time[a * BLOCK : (a + 1) * BLOCK], of_place[a * BLOCK : (a + 1) * BLOCK]
                    p[:] = by_place[centre + left - low - a : centre + left - low - a + BLOCK]
                    t[seen:] = 0
                    p[seen:] = 0
                channel = to + (SIZE * inner if mode == THREE_CHANNELS else 0)
                multiply(products, BLOCK, inner, BLOCK, of_time.ctypes.data, BLOCK, values, inner, add, channel, deep)
                multiply(
                    products,
                    BLOCK,
                    inner,
                    BLOCK,
                    of_place.ctypes.data,
                    BLOCK,
                    values,
                    inner,
                    add,
                    channel + SIZE * inner,
                    deep,
                )
        _finish(products, x, sums[:BLOCK], mixed[:BLOCK], layer, shape, weights, finishing)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def open_request(gemm, times, ordered, thresholds, addresses, layer_floats, shape, weights, of_pairs, shared):  # type: ignore[no-untyped-def]
    """What all candidates of a request have in common: biases [layers, 2, tiles * BLOCK + 1], the last one of a candidate and
    itself, and with channels of their own, what these sum up to over the history: shared [layers, 2, inner]."""
    tiles = addresses.shape[0]
    n = times.shape[0] - 2
    products = prepared(gemm, shared)
    keys_floats = 0 if shape.mode == TWO_CHANNELS else BLOCK * shape.inner
    of_time, of_place = np.empty(n + 1, np.float32), np.empty(n + 1, np.float32)
    few = np.empty(2 * BLOCK + 16, np.float32)
    start = (-few.ctypes.data % 64) // SIZE
    rows = few[start : start + 2 * BLOCK].reshape(2, BLOCK)
    for layer in range(shape.layers):
        events = times, ordered, thresholds, shape.kind, weights.by_place[layer], weights.by_time[layer]
        biases(n, 0, 1, n + 1, events, of_time, of_place)
        of_pairs[layer] = 0
        of_pairs[layer, 0, :n], of_pairs[layer, 1, :n] = of_time[:n], of_place[:n]
        of_pairs[layer, 0, tiles * BLOCK], of_pairs[layer, 1, tiles * BLOCK] = of_time[n], of_place[n]
        shared[layer] = 0
        if shape.mode != SCORE_BIAS:
            for tile in range(tiles):
                rows[:] = of_pairs[layer, :, tile * BLOCK : (tile + 1) * BLOCK]
                values = addresses[tile] + SIZE * (layer * layer_floats + keys_floats)
                multiply(
                    products,
                    2,
                    shape.inner,
                    BLOCK,
                    rows.ctypes.data,
                    BLOCK,
                    values,
                    shape.inner,
                    True,
                    shared[layer].ctypes.data,
                    shape.inner,
                )


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def score(gemm, x, chunks, n, addresses, layer_floats, shape, weights, of_pairs, shared, room, logits):  # type: ignore[no-untyped-def]
    """logits [chunks * BLOCK, actions] of the candidates x [chunks * BLOCK, wide] after a history of n events."""
    pairs, mixed, sums, _, finishing = room
    scores, normed = pairs[0], finishing[0]
    inner, wide, mode = shape.inner, shape.wide, shape.mode
    columns, deep, tiles = weights.mixed.shape[2], shape.channels * shape.inner, addresses.shape[0]
    at_v, at_q, at_k = deep, deep + inner, deep + 2 * inner
    keys_floats = 0 if mode == TWO_CHANNELS else BLOCK * inner
    products = prepared(gemm, x)
    bias = np.zeros(tiles * BLOCK + 1, np.float32)
    for layer in range(shape.layers):
        for chunk in range(chunks):
            part = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
            _norm(x[part], 1, shape.dim, wide, shape.centred, x, False, normed)
            multiply(
                products,
                BLOCK,
                columns,
                wide,
                normed.ctypes.data,
                wide,
                weights.mixed[layer].ctypes.data,
                columns,
                False,
                mixed[part].ctypes.data,
                columns,
            )
            _silu(mixed[part], columns)
        of_time, of_place = of_pairs[layer, 0], of_pairs[layer, 1]
        if mode == SCORE_BIAS:
            for z in range(bias.shape[0]):
                bias[z] = of_time[z] + of_place[z]
        sums[: chunks * BLOCK] = 0
        if mode != TWO_CHANNELS:
            for tile in range(tiles):
                keys = addresses[tile] + SIZE * layer * layer_floats
                values = keys + SIZE * keys_floats
                seen = min(BLOCK, n - tile * BLOCK)
                for chunk in range(chunks):
                    asked = mixed[chunk * BLOCK].ctypes.data + SIZE * at_q
                    to = sums[chunk * BLOCK].ctypes.data
                    for h in range(shape.heads):
                        across = SIZE * h * shape.head_wide
                        multiply(
                            products,
                            BLOCK,
                            BLOCK,
                            shape.head_wide,
                            asked + across,
                            columns,
                            keys + across * BLOCK,
                            BLOCK,
                            False,
                            scores.ctypes.data,
                            BLOCK,
                        )
                        _weigh_columns(scores, bias[tile * BLOCK :], seen, shape.scale)
                        multiply(
                            products,
                            BLOCK,
                            shape.head_wide,
                            BLOCK,
                            scores.ctypes.data,
                            BLOCK,
                            values + across,
                            inner,
                            True,
                            to + across,
                            deep,
                        )
            for i in range(chunks * BLOCK):
                for h in range(shape.heads):
                    at = h * shape.head_wide
                    q, k = (
                        mixed[i, at_q + at : at_q + at + shape.head_wide],
                        mixed[i, at_k + at : at_k + at + shape.head_wide],
                    )
                    s = _dot(q, k) + bias[tiles * BLOCK]
                    weight, v, total = shape.scale * (s * sigmoid(s)), mixed[i, at_v + at :], sums[i, at:]
                    for j in range(shape.head_wide):
                        total[j] += weight * v[j]
        if mode != SCORE_BIAS:
            channel = inner if mode == THREE_CHANNELS else 0
            t, p = of_time[tiles * BLOCK], of_place[tiles * BLOCK]
            for i in range(chunks * BLOCK):
                v = mixed[i, at_v : at_v + inner]
                a, b = sums[i, channel : channel + inner], sums[i, channel + inner : channel + 2 * inner]
                for j in range(inner):
                    a[j] = shared[layer, 0, j] + t * v[j]
                    b[j] = shared[layer, 1, j] + p * v[j]
        for chunk in range(chunks):
            part = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
            _finish(products, x[part], sums[part], mixed[part], layer, shape, weights, finishing)
    for chunk in range(chunks):
        _norm(x[chunk * BLOCK : (chunk + 1) * BLOCK], 1, shape.dim, wide, True, x, False, normed)
        for a in range(BLOCK):
            for action in range(logits.shape[1]):
                found = _dot(normed[a], weights.head[action])
                logits[chunk * BLOCK + a, action] = found + weights.head_bias[action]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def history_tokens(rows, masks, first_place, factor, weights, x):  # type: ignore[no-untyped-def]
    """x [BLOCK, wide]: rows with places and actions; zeros where there are no rows."""
    x[:] = 0
    for t in range(rows.shape[0]):
        to, row, place = x[t], rows[t], weights.places[first_place + t]
        for j in range(row.shape[0]):
            to[j] = row[j] * factor + place[j]
        for action in range(weights.actions.shape[0]):
            if (masks[t] >> action) & 1:
                vector = weights.actions[action]
                for j in range(row.shape[0]):
                    to[j] += vector[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def candidate_tokens(rows, n, factor, weights, x):  # type: ignore[no-untyped-def]
    x[:] = 0
    place, own = weights.places[n], weights.candidate
    for t in range(rows.shape[0]):
        to, row = x[t], rows[t]
        for j in range(row.shape[0]):
            to[j] = row[j] * factor + place[j] + own[j]
