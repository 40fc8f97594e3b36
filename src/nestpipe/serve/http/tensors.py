"""Tensors of the Open Inference Protocol v2, as JSON and as raw bytes behind the JSON.  Both sides use it; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from nestpipe.errors import NestPipeError

HEADER_LENGTH = "inference-header-content-length"
DTYPES: dict[str, np.dtype[Any]] = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


class BadRequest(NestPipeError, ValueError):
    """A request that cannot be served; the message is one line that names what to change."""

    exit_code = 2


def encode(
    head: dict[str, Any], kind: str, tensors: Mapping[str, np.ndarray], binary: bool = True
) -> tuple[bytes, int | None]:
    """A body with `tensors` under `kind` (inputs or outputs), and the length of its JSON if raw bytes follow that."""
    listed = []
    for name, tensor in tensors.items():
        entry: dict[str, Any] = {"name": name, "shape": list(tensor.shape), "datatype": NAMES[tensor.dtype]}
        if binary:
            entry["parameters"] = {"binary_data_size": tensor.nbytes}
        else:
            entry["data"] = _numbers(tensor)
        listed.append(entry)
    text = json.dumps({**head, kind: listed}, separators=(",", ":")).encode()
    if not binary:
        return text, None
    return b"".join([text, *(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())]), len(text)


def _numbers(tensor: np.ndarray) -> list[Any]:
    flat: list[Any] = tensor.ravel().tolist()
    if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
        flat = [number if np.isfinite(number) else None for number in flat]  # JSON has no NaN
    return flat


def decode(body: bytes, json_length: int | None, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON of a body, and its tensors by name, each in memory of its own.  BadRequest names what is wrong."""
    if json_length is not None and not 0 <= json_length <= len(body):
        raise BadRequest(f"the body has {len(body)} bytes, but Inference-Header-Content-Length says {json_length}")
    try:
        head = json.loads(body if json_length is None else body[:json_length])
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON, or was cut off ({error})") from None
    listed = head.get(kind) if isinstance(head, dict) else None
    if not isinstance(listed, list):
        raise BadRequest(f"the body has no list '{kind}'")
    at = len(body) if json_length is None else json_length
    tensors = {}
    for entry in listed:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise BadRequest(f"every entry of '{kind}' must be an object with a name")
        name = entry["name"]
        dtype, shape = DTYPES.get(str(entry.get("datatype"))), entry.get("shape")
        if dtype is None:
            raise BadRequest(f"'{name}' must have a datatype of {', '.join(DTYPES)}, not {entry.get('datatype')!r}")
        if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
            raise BadRequest(f"'{name}' must have a shape of whole numbers, not {shape!r}")
        count = 1
        for n in shape:
            count *= n
        parameters = entry.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if size is None:
            tensor = _from_json(name, entry.get("data"), dtype, count)
        else:
            if type(size) is not int or size != count * dtype.itemsize:
                raise BadRequest(f"'{name}' says {size} bytes, but its shape takes {count * dtype.itemsize}")
            if at + size > len(body):
                raise BadRequest(f"'{name}' needs {size} bytes, but the body ends after {len(body) - at}")
            tensor = np.frombuffer(body, dtype, count, at).copy()
            at += size
        tensors[name] = tensor.reshape(shape)
    if at != len(body):
        raise BadRequest(f"{len(body) - at} bytes follow the last tensor")
    return head, tensors


def _from_json(name: str, data: Any, dtype: np.dtype, count: int) -> np.ndarray:
    kinds = (int,) if dtype.kind == "i" else (int, float, type(None))
    flat = data if isinstance(data, list) else None
    while flat and isinstance(flat[0], list):  # the protocol allows nested lists
        if not all(isinstance(part, list) for part in flat):
            flat = None
        else:
            flat = [number for part in flat for number in part]
    if flat is None or not all(type(number) in kinds for number in flat):
        raise BadRequest(f"'{name}' must have 'data', a list of {'whole ' if dtype.kind == 'i' else ''}numbers")
    if len(flat) != count:
        raise BadRequest(f"'{name}' has {len(flat)} numbers, but its shape takes {count}")
    try:
        return np.array([np.nan if number is None else number for number in flat], dtype)
    except OverflowError:
        raise BadRequest(f"'{name}' has a number that {NAMES[dtype]} cannot hold") from None
