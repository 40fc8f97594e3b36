"""Tensor files: we and safetensors read what was written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.tensors import Written, read_arrays, read_tensors, write_tensors

TORCH = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.float32,
    torch.float64, torch.int64,
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for name in draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), max_size=5, unique=True)):
        if name == "__metadata__":
            continue
        dtype, shape = draw(st.sampled_from(TORCH)), draw(SHAPES)
        width = torch.empty((), dtype=dtype).element_size()
        count = int(np.prod(shape, dtype=np.int64)) * width
        data = bytearray(draw(st.binary(min_size=count, max_size=count)))
        if dtype is torch.bool:
            data = bytearray(byte & 1 for byte in data)
        flat = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        found[name] = tensor.T if len(shape) == 2 and draw(st.booleans()) else tensor
    return found


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=150)
@given(tensors())
def test_tensors_round_trip_bit_for_bit(given: dict[str, torch.Tensor]) -> None:
    """Any tensors, also empty, zero-width and transposed ones: we and safetensors read the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        written = write_tensors(path, given)
        assert written.bytes == path.stat().st_size and written.name == path.name
        wanted = {name: bits(tensor) for name, tensor in given.items()}
        assert {name: bits(tensor) for name, tensor in read_tensors(path, written).items()} == wanted
        assert {name: bits(tensor) for name, tensor in safetensors.torch.load_file(path).items()} == wanted


def test_numpy_arrays_round_trip(tmp_path: Path) -> None:
    """Columns of a larger array, and rows of width zero, as the writer has them."""
    state = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = {"keys": np.array([-1, 2, 1 << 62]), "state": state[:, :2], "none": state[:, :0], "empty": state[:0]}
    written = write_tensors(tmp_path / "x", given)
    found = read_arrays(tmp_path / "x", written)
    assert all(np.array_equal(found[name], given[name]) and found[name].dtype == given[name].dtype for name in given)


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    """Of two writers of one name the second fails, and the first one's bytes stay."""
    written = write_tensors(tmp_path / "x", {"a": torch.ones(3)})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "x", {"a": torch.zeros(3)})
    assert torch.equal(read_tensors(tmp_path / "x", written)["a"], torch.ones(3))


def test_a_file_that_does_not_match_is_refused(tmp_path: Path) -> None:
    """Wrong size, wrong digest, no file: each is one line that names the file."""
    written = write_tensors(tmp_path / "x", {"a": torch.ones(3)})
    for other in (Written("x", written.bytes + 1, written.sha256), Written("x", written.bytes, "0" * 64)):
        with pytest.raises(CheckpointError, match=r"^[^\n]*/x [^\n]*--from STEP$"):
            read_tensors(tmp_path / "x", other)
    with pytest.raises(CheckpointError, match="/y cannot be read"):
        read_tensors(tmp_path / "y", written)
