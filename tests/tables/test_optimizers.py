"""Each sparse optimizer against torch's, in float64, over steps that touch different rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer

ROWS, DIM, STEPS = 40, 7, 12


def steps(seed: int = 0) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(step, touched rows, their summed gradients); every row is left out in some steps."""
    rng = np.random.default_rng(seed)
    for step in range(1, STEPS + 1):
        touched = np.flatnonzero(rng.random(ROWS) < 0.4)
        yield step, touched, rng.standard_normal((len(touched), DIM)) * 10.0 ** rng.integers(-3, 2)


def start() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, DIM))


def run(optimizer: SparseOptimizer) -> np.ndarray:
    values = start()
    state = np.zeros((ROWS, optimizer.state_width(DIM)))
    for step, touched, grads in steps():
        rows, rows_state = values[touched], state[touched]
        optimizer.apply(rows, rows_state, grads, optimizer.lr, step)
        values[touched], state[touched] = rows, rows_state
    return values


def run_torch(kind: type[torch.optim.Optimizer], *, sparse: bool, **settings: object) -> np.ndarray:
    weight = torch.nn.Parameter(torch.from_numpy(start()))
    optimizer = kind([weight], **settings)  # type: ignore[call-arg]
    for _, touched, grads in steps():
        index, rows = torch.from_numpy(touched), torch.from_numpy(grads)
        weight.grad = torch.sparse_coo_tensor(index[None], rows, weight.shape, check_invariants=True).coalesce()
        if not sparse:
            weight.grad = weight.grad.to_dense()
        optimizer.step()
    return weight.detach().numpy()


def same(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_sgd() -> None:
    """SGD equals torch's."""
    same(run(SGD(lr=0.1)), run_torch(torch.optim.SGD, sparse=True, lr=0.1))


@pytest.mark.filterwarnings("ignore:Sparse invariant")  # of the tensors that torch's Adagrad makes
@pytest.mark.parametrize("sparse", [True, False])
def test_adagrad(sparse: bool) -> None:
    """Adagrad equals torch's, which does not change untouched rows whether its gradient is sparse or dense."""
    same(run(Adagrad(lr=0.1, eps=1e-6)), run_torch(torch.optim.Adagrad, sparse=sparse, lr=0.1, eps=1e-6))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adam(betas: tuple[float, float]) -> None:
    """Adam equals torch's SparseAdam: lazy moments, bias corrected by the number of steps."""
    theirs = run_torch(torch.optim.SparseAdam, sparse=True, lr=0.01, betas=betas, eps=1e-7)
    same(run(Adam(lr=0.01, betas=betas, eps=1e-7)), theirs)


def test_rowwise_adagrad() -> None:
    """Row-wise Adagrad keeps one number per row, the summed mean squared gradient (FBGEMM's definition)."""
    values, sums = start(), np.zeros(ROWS)
    for _, touched, grads in steps():
        sums[touched] += (grads**2).mean(1)
        values[touched] -= 0.1 * grads / (np.sqrt(sums[touched]) + 1e-6)[:, None]
    same(run(RowWiseAdagrad(lr=0.1, eps=1e-6)), values)


OPTIMIZERS = [SGD(0.1), RowWiseAdagrad(0.1), Adagrad(0.1), Adam(0.1)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 3, 16, 64, 67])
def test_a_row_does_not_depend_on_the_others(optimizer: SparseOptimizer, dtype: type, dim: int) -> None:
    """A row's step gives the same bits alone, among others and at any place, so owners may order rows freely."""
    rng = np.random.default_rng(0)
    values, grads = rng.standard_normal((33, dim)).astype(dtype), rng.standard_normal((33, dim)).astype(dtype)
    state = rng.random((33, optimizer.state_width(dim))).astype(dtype)
    together, together_state = values.copy(), state.copy()
    optimizer.apply(together, together_state, grads, 0.1, 3)
    for i in range(33):
        alone, alone_state = values[i : i + 1].copy(), state[i : i + 1].copy()
        optimizer.apply(alone, alone_state, grads[i : i + 1], 0.1, 3)
        np.testing.assert_array_equal(alone[0], together[i])
        np.testing.assert_array_equal(alone_state[0], together_state[i])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_float32_is_close_to_float64(optimizer: SparseOptimizer) -> None:
    """float32 tables compute in float32 and agree with float64 to float32's precision."""
    rng = np.random.default_rng(0)
    values, grads = rng.standard_normal((50, 16)), rng.standard_normal((50, 16))
    state = np.zeros((50, optimizer.state_width(16)))
    small, small_state = values.astype(np.float32), state.astype(np.float32)
    for step in range(1, 6):
        optimizer.apply(values, state, grads, 0.1, step)
        optimizer.apply(small, small_state, grads.astype(np.float32), 0.1, step)
    np.testing.assert_allclose(small, values, rtol=1e-5, atol=1e-5)


def test_learning_rate_of_the_step() -> None:
    """The rate passed to `apply` is used, not the optimizer's own, so rate schedules need no new optimizer."""
    values = np.ones((1, 2))
    SGD(lr=5.0).apply(values, np.empty((1, 0)), np.ones((1, 2)), 0.5, 1)
    assert values.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SGD(lr=-1.0), "SGD.lr"),
        (lambda: Adagrad(eps=float("nan")), "Adagrad.eps"),
        (lambda: RowWiseAdagrad(lr=float("inf")), "RowWiseAdagrad.lr"),
        (lambda: Adam(betas=(0.9, 1.0)), "Adam.betas"),
    ],
)
def test_bad_settings_are_named(make: object, field: str) -> None:
    """An invalid setting is rejected by name when the optimizer is created."""
    with pytest.raises(ValueError, match=field):
        make()  # type: ignore[operator]
