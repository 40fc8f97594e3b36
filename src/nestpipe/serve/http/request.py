"""From a body to a history and candidates.  Whatever cannot be served is one line that names the input to change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nestpipe.config.serving import ServingConfig
from nestpipe.infer.contract import History
from nestpipe.serve.http.tensors import BadRequest, decode

INPUTS = {
    "history_items": "INT64",
    "history_actions": "INT32",
    "history_times": "INT64",
    "candidates": "INT64",
    "now": "INT64",
    "history_start": "INT64",
}
CONTEXT = "context_"
"""Before the name of a context feature of the model: an input as long as the history."""
_DTYPES = {"INT64": np.dtype("<i8"), "INT32": np.dtype("<i4")}
OUTPUT = "scores"
MAX_USER = 512


@dataclass(frozen=True)
class ParsedRequest:
    """What a request asks for."""

    id: str | None
    user: str
    history: History
    now: int
    candidates: np.ndarray
    binary: bool
    """Whether scores go back as raw bytes."""
    deadline_ms: float
    due_ms: float


def parse(
    body: bytes,
    headers: dict[bytes, bytes],
    config: ServingConfig,
    actions: int,
    ranks: bool = True,
    features: tuple[str, ...] = (),
) -> ParsedRequest:
    """BadRequest for what cannot be served; a pre-inference (`ranks` false) has no candidates and no time."""
    length = headers.get(b"inference-header-content-length")
    head, tensors = decode(body, None if length is None else whole("Inference-Header-Content-Length", length), "inputs")
    known = {**INPUTS, **{CONTEXT + name: "INT64" for name in features}} if features else INPUTS
    unknown = sorted(tensors.keys() - known.keys())
    if unknown:
        raise BadRequest(f"unknown input '{unknown[0]}': inputs are {', '.join(known)}")
    parameters = head.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    items = _vector(tensors, "history_items")
    marks = _vector(tensors, "history_actions")
    times = _vector(tensors, "history_times")
    if not len(items) == len(marks) == len(times):
        raise BadRequest(
            f"history_items, history_actions and history_times must have one length, not {len(items)}, {len(marks)}"
            f" and {len(times)}"
        )
    if len(marks) and not 0 <= int(marks.min()) <= int(marks.max()) < 2**actions:
        raise BadRequest(
            f"history_actions must be from 0 to {2**actions - 1}: a bit for each of the model's {actions} actions"
        )
    if len(times) > 1 and bool((times[1:] < times[:-1]).any()):
        raise BadRequest("history_times must ascend: the oldest event comes first")
    context = {name: _vector(tensors, CONTEXT + name) for name in features if CONTEXT + name in tensors}
    for name, values in context.items():
        if len(values) != len(items):
            raise BadRequest(
                f"'{CONTEXT}{name}' must have {len(items)} numbers, as history_items has, not {len(values)}"
            )
    start = _number(tensors, "history_start", 0)
    if start < 0:
        raise BadRequest(f"history_start must be at least 0, not {start}")
    candidates, now = np.empty(0, np.int64), 0
    if ranks:
        candidates = _vector(tensors, "candidates")
        now = _number(tensors, "now")
        if len(candidates) > config.max_candidates:
            raise BadRequest(f"candidates must be at most {config.max_candidates}, not {len(candidates)}")
        if len(times) and now < int(times[-1]):
            raise BadRequest(f"now ({now}) must not be before the last of history_times ({int(times[-1])})")
    identity = head.get("id")
    return ParsedRequest(
        identity if isinstance(identity, str) else None,
        user_of(headers, parameters),
        History(items, marks, times, start, context),
        now,
        candidates,
        _wants_binary(head, parameters),
        milliseconds("X-Deadline-Ms", headers.get(b"x-deadline-ms"), config.deadline_ms),
        milliseconds("X-Due-Ms", headers.get(b"x-due-ms"), 100.0),
    )


def user_of(headers: dict[bytes, bytes], parameters: dict[str, Any]) -> str:
    """X-User, or the parameter `user`; empty for nobody."""
    header = headers.get(b"x-user")
    user = header.decode("utf-8", "replace") if header is not None else parameters.get("user", "")
    if isinstance(user, int) and not isinstance(user, bool):
        user = str(user)
    if not isinstance(user, str) or len(user) > MAX_USER:
        raise BadRequest(f"the user (X-User, or the parameter 'user') must be text of at most {MAX_USER} characters")
    return user


def whole(name: str, value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise BadRequest(f"{name} must be a whole number, not {value.decode('latin-1')!r}") from None


def milliseconds(name: str, value: bytes | None, default: float) -> float:
    try:
        found = default if value is None else float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise BadRequest(f"{name} must be a number of milliseconds, not {(value or b'').decode('latin-1')!r}")
    return min(found, 3_600_000.0)


def _vector(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    tensor = tensors.get(name)
    if tensor is None:
        raise BadRequest(f"input '{name}' is missing")
    wanted = INPUTS.get(name, "INT64")
    if tensor.ndim != 1 or tensor.dtype != _DTYPES[wanted]:
        raise BadRequest(f"'{name}' must be {wanted} with a shape [n], not {tensor.dtype} with {list(tensor.shape)}")
    return tensor


def _number(tensors: dict[str, np.ndarray], name: str, default: int | None = None) -> int:
    if name not in tensors and default is not None:
        return default
    tensor = _vector(tensors, name)
    if len(tensor) != 1:
        raise BadRequest(f"'{name}' must have one number, not {len(tensor)}")
    return int(tensor[0])


def _wants_binary(head: dict[str, Any], parameters: dict[str, Any]) -> bool:
    outputs = head.get("outputs")
    if not outputs:
        return parameters.get("binary_data_output") is True
    if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):
        raise BadRequest("'outputs' must be a list of objects")
    if [one.get("name") for one in outputs] != [OUTPUT]:
        raise BadRequest(f"the only output is '{OUTPUT}'")
    wishes = outputs[0].get("parameters")
    if isinstance(wishes, dict) and "binary_data" in wishes:
        return wishes["binary_data"] is True
    return parameters.get("binary_data_output") is True
