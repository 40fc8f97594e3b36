"""The parser of Criteo's text, from bytes to arrays.  Releases the GIL; says what is wrong, and where, by numbers."""

from __future__ import annotations

import numba
import numpy as np

COLUMNS = 40
INTEGERS = 13
IDS = 26
GOOD, BAD_COLUMNS, BAD_LABEL, BAD_INTEGER, BAD_ID = range(5)
_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = 9, 10, 13, 45, 48


@numba.njit(nogil=True, cache=True)
def _integer(text, start, stop):  # type: ignore[no-untyped-def]
    """(value, whether it is an integer of at most 18 digits)."""
    sign = start < stop and text[start] == _MINUS
    if sign:
        start += 1
    if start == stop or stop - start > 18:
        return 0, False
    value = 0
    for p in range(start, stop):
        digit = np.int64(text[p]) - _ZERO
        if digit < 0 or digit > 9:
            return 0, False
        value = value * 10 + digit  # type: ignore[assignment]
    return (-value if sign else value), True


@numba.njit(nogil=True, cache=True)
def _hexadecimal(text, start, stop):  # type: ignore[no-untyped-def]
    """The value of 1 to 8 hexadecimal digits, or -1."""
    if stop - start > 8:
        return -1
    value = 0
    for p in range(start, stop):
        c = np.int64(text[p])
        if 48 <= c <= 57:
            digit = c - 48
        elif 97 <= c <= 102:
            digit = c - 87
        elif 65 <= c <= 70:
            digit = c - 55
        else:
            return -1
        value = value * 16 + digit  # type: ignore[assignment]
    return value


@numba.njit(nogil=True, cache=True)
def parse_lines(text, limit, last):  # type: ignore[no-untyped-def]
    """The whole lines of `text` that begin before `limit`; `last` says that the file ends with the text.

    Returns ends (the place after each line), labels, dense [n, 13], ids [n, 26] (-1: missing), and what is wrong first:
    (kind, place of the line, column or number of columns, start and stop of the value).
    """
    lines = 0
    start = 0
    for p in range(text.shape[0]):
        if start < limit and (text[p] == _NEWLINE or (last and p + 1 == text.shape[0])):
            lines += 1
            start = p + 1
    ends = np.empty(lines, np.int64)
    labels = np.empty(lines, np.float32)
    dense = np.empty((lines, INTEGERS), np.float32)
    ids = np.empty((lines, IDS), np.int64)
    bad = (GOOD, 0, 0, 0, 0)
    start = 0
    for row in range(lines):
        column = 0
        value_start = start
        p = start
        while True:
            ended = p == text.shape[0] or text[p] == _NEWLINE
            if ended or text[p] == _TAB:
                stop = p
                if ended and stop > value_start and text[stop - 1] == _RETURN:
                    stop -= 1
                wrong = GOOD
                if column == 0:
                    value, good = _integer(text, value_start, stop)
                    labels[row] = value
                    if not good or value < 0 or value > 1:
                        wrong = BAD_LABEL
                elif column <= INTEGERS:
                    value = 0
                    if stop > value_start:
                        value, good = _integer(text, value_start, stop)
                        if not good:
                            wrong = BAD_INTEGER
                    dense[row, column - 1] = np.log1p(np.float64(max(value, 0)))
                elif column < COLUMNS:
                    value = _hexadecimal(text, value_start, stop) if stop > value_start else -1
                    ids[row, column - 1 - INTEGERS] = value
                    if value < 0 and stop > value_start:
                        wrong = BAD_ID
                column += 1
                if wrong and not bad[0]:
                    bad = (wrong, start, column, value_start, stop)
                value_start = p + 1
                if ended:
                    break
            p += 1
        if column != COLUMNS:  # says more than a value that is wrong because it is in the wrong column
            bad = (BAD_COLUMNS, start, column, 0, 0)
        if bad[0]:
            break
        start = min(p + 1, text.shape[0])
        ends[row] = start
    return ends, labels, dense, ids, bad


@numba.njit(nogil=True, cache=True)
def by_feature(ids):  # type: ignore[no-untyped-def]
    """Lengths and values, feature-major, of ids [n, F] of which -1 is none."""
    count, features = ids.shape
    lengths = np.empty(features * count, np.int64)
    values = np.empty(features * count, np.int64)
    at = 0
    for f in range(features):
        for i in range(count):
            there = ids[i, f] >= 0
            lengths[f * count + i] = there
            if there:
                values[at] = ids[i, f]
                at += 1
    return lengths, values[:at].copy()
