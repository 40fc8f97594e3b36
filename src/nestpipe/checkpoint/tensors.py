"""Files of tensors in safetensors' format: written in a stream with a digest, read whole and only if the digest is right.

Writing is our own because it must hold neither the GIL nor a second copy while training goes on; reading is the library's, which
executes nothing and trusts no number of a header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors
import safetensors.torch
import torch

from nestpipe.checkpoint.direct_file import DirectFile
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.plain_file import plain_size, read_plain

Array: TypeAlias = "np.ndarray | torch.Tensor"
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "float32": "F32", "float64": "F64", "int64": "I64",
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A file as it was written: what must be found again."""

    name: str
    bytes: int
    sha256: str


def check_kinds(tensors: Mapping[str, Array]) -> None:
    """CheckpointError where a tensor is of a kind that files cannot hold: when a run begins, not at its first checkpoint."""
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _CODES:
            raise CheckpointError(
                f"{name!r} of the model is {kind}, which a checkpoint cannot hold: use {', '.join(_CODES)}"
            )


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> Written:
    """Writes and syncs the file, which must not be there yet.  OSError as it comes: a full disk, no permission."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        code = _CODES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with DirectFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_raw(tensor))
        sha256 = file.end()
    return Written(path.name, 8 + len(text) + at, sha256)


def read_tensors(path: Path, written: Written) -> dict[str, torch.Tensor]:
    """The tensors of a file that is, to the bit, the one that was written."""
    return parse_tensors(path, read_checked(path, written))


def read_arrays(path: Path, written: Written) -> dict[str, np.ndarray]:
    tensors = read_tensors(path, written)
    try:
        return {name: tensor.numpy() for name, tensor in tensors.items()}
    except TypeError as error:
        raise CheckpointError(f"{path} has numbers that are not of ours ({error}); {OTHERWISE}") from None


def read_checked(path: Path, written: Written) -> bytes:
    """All bytes of a file, whose size and digest are what they must be."""
    try:
        size = plain_size(path)
        data = read_plain(path, size) if size == written.bytes else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {OTHERWISE}") from None
    if size != written.bytes:
        raise CheckpointError(f"{path} has {size:,} bytes instead of {written.bytes:,}; {OTHERWISE}")
    if hashlib.sha256(data).hexdigest() != written.sha256:
        raise CheckpointError(f"{path} is not what was written (its SHA-256 differs); {OTHERWISE}")
    return data


OTHERWISE = "restore it from a copy, or resume from another checkpoint with --from STEP"


def parse_tensors(path: Path, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is not a file of tensors ({reason}); {OTHERWISE}") from None


def _raw(tensor: Array) -> memoryview:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    flat: Any = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return memoryview(flat)
