"""Triton kernels run interpreted here, on tensors of the host, with every load and store checked.

Whether a kernel is interpreted is decided when its file is imported.  So the files are imported here, with
TRITON_INTERPRET set; afterwards it is set during these tests only, and other tests see nothing of it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

import pytest

INTERPRETED = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"})

if importlib.util.find_spec("triton") is not None:
    with INTERPRETED:
        import faulty_kernels  # noqa: F401
        from nestpipe.ops import attention_triton, pooling_triton, row_steps_triton, rows_triton  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests are interpreted, and within bounds."""
    from triton.backends import backends

    from interpreting import within_bounds

    if "ascend" in backends and "ahead" not in request.module.__name__:
        pytest.skip("triton-ascend does not interpret float64: here it only lowers kernels")
    with INTERPRETED, within_bounds():
        yield
