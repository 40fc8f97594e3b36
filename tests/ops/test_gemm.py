"""Products inside numba kernels: which function multiplies, and what its bits depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.ops import gemm


def placed(matrix: np.ndarray, skip: int) -> np.ndarray:
    """A copy that begins so many bytes after a cache line."""
    room = torch.empty(matrix.nbytes + 64, dtype=torch.uint8).numpy()
    found = room[skip : skip + matrix.nbytes].view(matrix.dtype).reshape(matrix.shape)
    found[:] = matrix
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_numpys(dtype: torch.dtype) -> None:
    """Promise: every function that a kernel may be given multiplies any shape, also parts of larger matrices."""
    draw, kind = np.random.default_rng(1), np.float32 if dtype == torch.float32 else np.float64
    a, b = draw.integers(-4, 5, (2, 70, 70)).astype(kind)
    chosen = gemm.tile_gemm(dtype)
    assert chosen is not None
    for function in {chosen, gemm.found(gemm.NAMES[dtype], False, dtype)} - {None}:
        for m, n, k in draw.integers(1, 70, (60, 3)).tolist():
            for add in (False, True):
                found = np.ones((70, 70), kind)
                gemm._multiply_once(function, (m, n, k), a, b, add, found)
                wanted = np.ones((70, 70), kind)
                wanted[:m, :n] = add + a[:m, :k] @ b[:k, :n]
                assert np.array_equal(found, wanted), (m, n, k, add)


def test_bits_of_tiles() -> None:
    """Promise: an element's bits depend on its row, its column and the terms' number, not on place or size of a matrix."""
    chosen = gemm.tile_gemm(torch.float32)
    assert chosen is not None
    if not chosen[1]:
        pytest.skip("no AVX-512: a BLAS gives no such promise")
    a, b = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    for k in (1, 7, 50, 64):
        whole = np.zeros((64, 64), np.float32)
        gemm._multiply_once(chosen, (64, 64, k), a, b, False, whole)
        for skip, m, n in ((4, 64, 64), (8, 5, 64), (36, 64, 3), (0, 1, 1), (60, 17, 33)):
            found = placed(np.zeros((64, 64), np.float32), skip)
            gemm._multiply_once(chosen, (m, n, k), placed(a, skip), placed(b, (skip + 12) % 64), False, found)
            assert np.array_equal(found[:m, :n], whole[:m, :n])


def test_what_leaves_brgemm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: where oneDNN may not use AVX-512, or somebody asks for it, `brgemm` is never called: it would end the process."""
    for name, value in ((gemm.ONEDNN_LIMITS[0], "AVX2"), (gemm.ONEDNN_LIMITS[1], "AVX2"), (gemm.SWITCH, "blas")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            chosen = gemm.tile_gemm.__wrapped__(torch.float32)
            assert chosen is not None and not chosen[1]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    chosen = gemm.tile_gemm.__wrapped__(torch.float32)
    assert chosen is not None and not chosen[1]
    monkeypatch.setenv(gemm.SWITCH, "torch")
    assert gemm.tile_gemm.__wrapped__(torch.float32) is None
    assert gemm.tile_gemm(torch.bfloat16) is None
