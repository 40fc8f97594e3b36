"""The sum of a row's squares, and row-wise Adagrad, which divides by its root."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nestpipe.ops import row_steps, row_steps_kernels
from nestpipe.ops.row_squares import row_sum_of_squares
from nestpipe.ops.rows_kernels import sum_of_squares


def halves(x: np.ndarray) -> np.ndarray:
    while x.shape[1] > 1:
        middle = x.shape[1] // 2
        x = x[:, :middle] + x[:, middle:]
    return x[:, 0]


def in_order(squares: np.ndarray) -> np.ndarray:
    """The sums of rows, one addition after another as the file says."""
    width = 32 // squares.itemsize
    dim = squares.shape[1]
    sums = [np.zeros((len(squares), width), squares.dtype) for _ in range(4)]
    at = 0
    while at + 4 * width <= dim:
        for part in sums:
            part += squares[:, at : at + width]
            at += width
    rest = np.zeros((len(squares), 4), squares.dtype)
    rest[:, 0] = halves(((sums[0] + sums[1]) + sums[2]) + sums[3])
    while at + 4 <= dim:
        rest += squares[:, at : at + 4]
        at += 4
    total = halves(rest)
    for d in range(at, dim):
        total = total + squares[:, d]
    return total


@given(st.integers(0, 150), st.sampled_from([np.float32, np.float64]), st.sampled_from([np.float32, np.float64]))
@example(64, np.float32, np.float32)
@example(31, np.float32, np.float64)
def test_the_order_is_the_documented_one(dim: int, dtype: type, sums: type) -> None:
    """Promise: bit for bit the written order of additions, also of rows that are part of wider ones."""
    generator = np.random.default_rng(dim)
    rows = (generator.standard_normal((5, dim + 3)) * 10.0 ** generator.integers(-5, 5, (5, dim + 3))).astype(dtype)
    sums = np.float64 if dtype == np.float64 else sums
    for part in (rows[:, :dim], np.ascontiguousarray(rows[:, :dim])):
        found = np.array([row_sum_of_squares(part, i, sums(0)) for i in range(5)], sums)
        wanted = in_order(part.astype(sums) ** 2)
        assert found.tobytes() == wanted.tobytes()
    tensor = torch.from_numpy(rows[:, :dim].astype(dtype) ** 2)
    assert row_steps._row_sums(tensor).numpy().tobytes() == in_order(tensor.numpy()).tobytes()


def test_not_finite() -> None:
    """Promise: the sum of all squares is finite if and only if every gradient is."""
    for dim in (3, 16, 64, 70):
        for bad in (np.nan, np.inf, -np.inf):
            for at in (0, dim // 2, dim - 1):
                rows = np.ones((2, dim), np.float32)
                rows[1, at] = bad
                assert not np.isfinite(sum_of_squares(rows))
        assert np.isfinite(sum_of_squares(np.full((2, dim), 3e38, np.float32)))


STEP = """
import hashlib, numpy as np
from nestpipe.ops import row_steps_kernels, rows_kernels
found = hashlib.sha256()
for dim in (3, 16, 50, 64, 100):
    for dtype in (np.float32, np.float64):
        grads = np.random.default_rng(dim).standard_normal((200, dim)).astype(dtype)
        values, state = grads.copy(), np.zeros((200, 1), dtype)
        row_steps_kernels.rowwise_adagrad(values, state, grads, np.array([0.1, 1e-8, 1], dtype))
        found.update(values.tobytes() + state.tobytes() + np.float64(rows_kernels.sum_of_squares(grads)).tobytes())
print(found.hexdigest())
"""


@pytest.mark.slow
def test_every_cpu_has_the_same_bits(tmp_path: object) -> None:
    """Promise: compiled for other CPUs (SSE only, AVX2, this one), a step and a norm have the same bits."""
    found = set()
    for cpu in ({}, {"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_NAME": "haswell"}):
        features = {"NUMBA_CPU_FEATURES": ""} if cpu else {}
        env = {**os.environ, **cpu, **features, "NUMBA_CACHE_DIR": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1


def test_a_step_divides_by_the_root_of_that_sum() -> None:
    """Promise: state and values of row-wise Adagrad, in plain numpy, bit for bit."""
    for dtype in (np.float32, np.float64):
        grads = np.random.default_rng(1).standard_normal((9, 50)).astype(dtype)
        values, state = grads * dtype(0.5), np.abs(grads[:, :2]).copy()
        sums = (state[:, :1].astype(np.float64) + in_order(grads * grads)[:, None].astype(np.float64) / 50).astype(
            dtype
        )
        wanted = values - dtype(0.1) / (np.sqrt(sums) + dtype(1e-8)) * grads
        row_steps_kernels.rowwise_adagrad(values, state, grads, np.array([0.1, 1e-8, 1], dtype))
        assert state[:, :1].tobytes() == sums.tobytes() and values.tobytes() == wanted.tobytes()
