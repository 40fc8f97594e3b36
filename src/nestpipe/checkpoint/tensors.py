"""Tensor files in the safetensors format: written as a stream with a digest, read whole after the digest is checked.

Writing is our own, because training continues meanwhile: it holds no GIL and makes no second copy.  Reading is the
library's, which executes nothing and trusts no number in a header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import safetensors
import safetensors.torch
import torch

from nestpipe.checkpoint.direct_file import DirectFile
from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.plain_file import Place, Written, plain_size, read_plain
from nestpipe.checkpoint.uploaded_file import UploadedFile
from nestpipe.files import Location

Array: TypeAlias = "np.ndarray | torch.Tensor"
Read: TypeAlias = "Callable[[Any, Written], dict[str, torch.Tensor]]"
"""From a place to the tensors of a file whose digest was checked."""
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "float32": "F32", "float64": "F64", "int64": "I64",
}  # fmt: skip


def check_kinds(tensors: Mapping[str, Array]) -> None:
    """Raises CheckpointError for a dtype that files cannot hold: at the start of a run, not at its first checkpoint."""
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _CODES:
            raise CheckpointError(
                f"{name!r} of the model is {kind}, which checkpoints do not support: use {', '.join(_CODES)}"
            )


def write_tensors(path: Place, tensors: Mapping[str, Array]) -> Written:
    """Writes and syncs a new file.  Raises OSError for a full disk, missing permission or an existing file."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.nbytes
        code = _CODES[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    name, new = (path.leaf, UploadedFile(path)) if isinstance(path, Location) else (path.name, DirectFile(path))
    with new as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_raw(tensor))
        sha256 = file.end()
    return Written(name, 8 + len(text) + at, sha256)


def read_tensors(path: Place, written: Written) -> dict[str, torch.Tensor]:
    """The tensors of a file, after its size and digest are checked."""
    return parse_tensors(path, read_checked(path, written))


def read_arrays(path: Place, written: Written, read: Read | None = None) -> dict[str, np.ndarray]:
    """`read`: in place of `read_tensors`."""
    tensors = (read or read_tensors)(path, written)
    try:
        return {name: tensor.numpy() for name, tensor in tensors.items()}
    except TypeError as error:
        raise CheckpointError(f"{path} has a dtype that checkpoints do not use ({error}); {RECOVERY_HINT}") from None


def read_checked(path: Place, written: Written) -> bytes:
    """The contents of a file, after its size and digest are checked."""
    try:
        size = plain_size(path)
        data = read_plain(path, size) if size == written.bytes else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {RECOVERY_HINT}") from None
    if size != written.bytes:
        raise CheckpointError(f"{path} has {size:,} bytes instead of {written.bytes:,}; {RECOVERY_HINT}")
    check_data(path, written, data)
    return data


def check_data(path: Place, written: Written, data: bytes | memoryview) -> None:
    """CheckpointError unless the contents of a file have its digest."""
    if hashlib.sha256(data).hexdigest() != written.sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in the manifest; {RECOVERY_HINT}")


def parse_tensors(path: Place, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is not a valid safetensors file ({reason}); {RECOVERY_HINT}") from None


def _raw(tensor: Array) -> memoryview:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    flat: Any = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return memoryview(flat)
