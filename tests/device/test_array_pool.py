"""Memory that is used again when nobody holds it."""

from __future__ import annotations

import numpy as np
import torch

from nestpipe.device.array_pool import PATIENCE, ArrayPool


def test_a_block_is_used_again_only_when_nobody_holds_any_part_of_it() -> None:
    """Promise: arrays, tensors and views of them keep a block; without them it is the next one given."""
    blocks = ArrayPool()
    first = blocks.take((100, 8), np.float32)
    place = first.ctypes.data
    view = torch.from_numpy(first)[10:20, 1]
    del first
    second = blocks.take((100, 8), np.float32)
    assert second.ctypes.data != place
    kept = view.numpy()[:2]
    del view
    assert blocks.take((90, 8), np.float32).ctypes.data not in (place, second.ctypes.data)
    del kept
    assert blocks.take((70, 8), np.float32).ctypes.data == place


def test_shapes_and_types() -> None:
    blocks = ArrayPool()
    for shape, dtype in (
        ((0, 5), np.float32),
        ((3,), np.float64),
        ((7, 2), np.uint8),
        ((1000, np.int64(64)), np.float32),
    ):
        array = blocks.take(shape, dtype)
        assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous
        array[:] = 1


def test_blocks_that_nobody_uses_any_more_are_given_back() -> None:
    """Promise: neither a size that is not asked for nor many blocks of one size at a time are kept for ever."""
    blocks = ArrayPool()
    blocks.take((1 << 20,), np.uint8)
    several = [blocks.take((1 << 16,), np.uint8) for _ in range(8)]
    del several
    held = blocks.take((1 << 18,), np.uint8)
    for _ in range(2 * PATIENCE):
        blocks.take((1 << 16,), np.uint8)
    assert blocks.bytes == (1 << 16) + (1 << 18)
    del held
    for _ in range(2 * PATIENCE):
        blocks.take((1 << 16,), np.uint8)
    assert blocks.bytes == 1 << 16
