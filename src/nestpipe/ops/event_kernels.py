"""Numba kernels: what the pairs of a tile weigh by time and by place, and the gradients of these weights' parameters.

A tile has `r` places from `low` on that look back, by `c` places from `left` on that they look at.  `events` is (the times
of a history and of what follows, whether they are in order, thresholds of buckets, how time gives a weight, by_place,
by_time).
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.ops.event_times import BUCKETS, POWER
from nestpipe.ops.register_math import exp, log

_MOST = np.uint64(2**63 - 1)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def in_order(times):  # type: ignore[no-untyped-def]
    """Whether no time is before the one that precedes it."""
    found = True
    for i in range(1, times.shape[0]):
        found &= times[i] >= times[i - 1]
    return found


@numba.njit(nogil=True, error_model="numpy")
def _gap(now, then):  # type: ignore[no-untyped-def]
    """Unsigned: int64 cannot hold the largest gaps."""
    return np.uint64(max(now, then)) - np.uint64(min(now, then))


@numba.njit(nogil=True, error_model="numpy")
def _seconds(now, then):  # type: ignore[no-untyped-def]
    """The gap as far as an int64 can hold it, as on padded samples."""
    return min(_gap(now, then), _MOST)


@numba.njit(nogil=True, error_model="numpy")
def _bucket(gap, thresholds):  # type: ignore[no-untyped-def]
    """How many thresholds are at most `gap`."""
    low, high = 0, thresholds.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if gap >= thresholds[middle]:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(nogil=True, error_model="numpy")
def _run_end(now, then, at, least):  # type: ignore[no-untyped-def]
    """The first place after `at` whose gap is below `least`, of times in order: by steps that double, then halve."""
    count, step = then.shape[0], 1
    low, high = at, at + 1
    while high < count and _gap(now, then[high]) >= least:
        low = high
        step += step
        high = min(count, high + step)
    while high - low > 1:
        middle = (low + high) >> 1
        if _gap(now, then[middle]) >= least:
            low = middle
        else:
            high = middle
    return high


@numba.njit(nogil=True, error_model="numpy")
def _bucket_weights(now, then, ordered, thresholds, by_time, out):  # type: ignore[no-untyped-def]
    """out[j] = the weight of the bucket of the time from then[j] to now.  In order, places of one bucket are a run."""
    count, j = then.shape[0], 0
    if not ordered:
        for j in range(count):
            out[j] = by_time[_bucket(_gap(now, then[j]), thresholds)]
        return
    while j < count:
        bucket = _bucket(_gap(now, then[j]), thresholds)
        end = _run_end(now, then, j, thresholds[bucket - 1]) if bucket else count
        out[j:end] = by_time[bucket]
        j = end


@numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _sum(values):  # type: ignore[no-untyped-def]
    total = values.dtype.type(0)
    for j in range(values.shape[0]):
        total += values[j]
    return total


@numba.njit(nogil=True, error_model="numpy")
def _bucket_weights_backward(now, then, ordered, thresholds, grad, by_time):  # type: ignore[no-untyped-def]
    """Adds grad[j] to its bucket's gradient."""
    count, j = then.shape[0], 0
    if not ordered:
        for j in range(count):
            by_time[_bucket(_gap(now, then[j]), thresholds)] += grad[j]
        return
    while j < count:
        bucket = _bucket(_gap(now, then[j]), thresholds)
        end = _run_end(now, then, j, thresholds[bucket - 1]) if bucket else count
        by_time[bucket] += _sum(grad[j:end])
        j = end


@numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _functions(now, then, kind, by_time, out):  # type: ignore[no-untyped-def]
    """out[j] = the weight of the time from then[j] to now; by_time is [a, b] or [a, b, c]."""
    real = out.dtype.type
    one, a, b = real(1), by_time[0], by_time[1]
    if kind == POWER:
        for j in range(then.shape[0]):
            out[j] = a * exp(-b * log(one + real(_seconds(now, then[j]))))
    else:
        c, none = by_time[2], real(0)
        for j in range(then.shape[0]):
            gap = real(_seconds(now, then[j]))  # whole seconds: none, or at least one
            power = exp(b * log(max(gap, one)))
            out[j] = a * exp(-c * (power if gap > none else none))


@numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _derivatives(now, then, kind, by_time, out):  # type: ignore[no-untyped-def]
    """out[p, j] = the derivative of j's weight by parameter p."""
    real = out.dtype.type
    one, a, b = real(1), by_time[0], by_time[1]
    if kind == POWER:
        for j in range(then.shape[0]):
            logarithm = log(one + real(_seconds(now, then[j])))
            falls = exp(-b * logarithm)
            out[0, j] = falls
            out[1, j] = -a * falls * logarithm
    else:
        c, none = by_time[2], real(0)
        for j in range(then.shape[0]):
            gap = real(_seconds(now, then[j]))
            logarithm = log(max(gap, one))
            power = exp(b * logarithm) if gap > none else none
            falls = exp(-c * power)
            out[0, j] = falls
            out[1, j] = -a * falls * c * power * logarithm
            out[2, j] = -a * falls * power


@numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = a.dtype.type(0)
    for j in range(a.shape[0]):
        total += a[j] * b[j]
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def biases(low, left, r, c, events, of_time, of_place):  # type: ignore[no-untyped-def]
    """Fills what the pairs of a tile weigh by time and by place; 0 where a place would look ahead."""
    times, ordered, thresholds, kind, by_place, by_time = events
    centre = (by_place.shape[0] - 1) // 2
    for a in range(r):
        i = low + a
        seen = max(0, min(c, i - left + 1))
        t, p, then = of_time[a * c : (a + 1) * c], of_place[a * c : (a + 1) * c], times[left : left + seen]
        if kind == BUCKETS:
            _bucket_weights(times[i + 1], then, ordered, thresholds, by_time, t)
        else:
            _functions(times[i + 1], then, kind, by_time, t[:seen])
        near = by_place[centre + left - i : centre + left - i + seen]
        for z in range(seen):
            p[z] = near[z]
        t[seen:] = 0
        p[seen:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def biases_backward(low, left, r, c, events, by_t, by_p, room, place_grad, time_grad):  # type: ignore[no-untyped-def]
    """Adds a tile's gradients by time and by place to those of the parameters, which are float64: millions of terms go
    into a hundred numbers.  Terms of one distance are added up by tile first.  room [4, c + r]."""
    times, ordered, thresholds, kind, _, by_time = events
    distances = room[3]
    distances[: r + c] = 0
    for a in range(r):
        i = low + a
        seen = max(0, min(c, i - left + 1))
        to, grad = distances[r - 1 - a : r - 1 - a + seen], by_p[a * c : a * c + seen]
        for z in range(seen):
            to[z] += grad[z]
        then, grad = times[left : left + seen], by_t[a * c : a * c + seen]
        if kind == BUCKETS:
            _bucket_weights_backward(times[i + 1], then, ordered, thresholds, grad, time_grad)
        else:
            _derivatives(times[i + 1], then, kind, by_time, room)
            for parameter in range(by_time.shape[0]):
                time_grad[parameter] += _dot(grad, room[parameter, :seen])
    first = (place_grad.shape[0] - 1) // 2 + left - low - (r - 1)  # of the last row's first pair
    for z in range(max(0, -first), min(r + c, place_grad.shape[0] - first)):
        place_grad[first + z] += distances[z]
