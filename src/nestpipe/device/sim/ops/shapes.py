"""What shapes an operation will give, before it runs: torch's own rules on tensors without memory, remembered.

Those rules are slow where torch has them in Python: up to a millisecond, and a second to load.  So an answer is kept by
the shapes and numbers that it came from.  For pointwise operations on contiguous tensors the type alone is kept: their
shape is plain.  Operations that often see new shapes have a rule here.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from nestpipe.device.sim.ops.schemas import aten

_MANY = 50_000
"""Answers kept; all are dropped when there are more."""


def _segment_reduce(
    data: torch.Tensor, reduce: str, *, lengths: Any = None, offsets: Any = None, axis: int = 0, **_: Any
) -> torch.Tensor:
    count = lengths.shape[-1] if lengths is not None else offsets.shape[-1] - 1
    return data.new_empty((*data.shape[:axis], count, *data.shape[axis + 1 :]))


def _segment_reduce_backward(grad: Any, output: Any, data: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(data)


def _repeat_interleave(repeats: torch.Tensor, *, output_size: int) -> torch.Tensor:
    return repeats.new_empty((output_size,))


def _cat(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    parts = [t for t in tensors if t.shape != (0,)] or tensors[:1]  # torch skips empty vectors
    shapes = [list(t.shape) for t in parts]
    length = sum(shape.pop(dim) for shape in shapes)
    if any(shape != shapes[0] for shape in shapes):
        raise RuntimeError(f"cat along {dim} got shapes {[list(t.shape) for t in parts]}: the rest must be equal")
    shape = [*shapes[0]]
    shape.insert(dim % (len(shape) + 1), length)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return torch.empty(shape, dtype=dtype, device="meta")


def _layer_norm(values: torch.Tensor, normalized: list[int], weight: Any, bias: Any, eps: float) -> Any:
    outer = values.dim() - len(normalized)
    stats = values.new_empty((*values.shape[:outer], *(1 for _ in normalized)))
    return values.new_empty(values.shape), stats, torch.empty_like(stats)


def _layer_norm_backward(
    grad: Any, values: torch.Tensor, normalized: Any, mean: Any, rstd: Any, weight: Any, bias: Any, wanted: list[bool]
) -> Any:
    likes = (values, weight, bias)
    return tuple(like.new_empty(like.shape) if want and like is not None else None for like, want in zip(likes, wanted))


_RULES = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.cat.default: _cat,
    aten.segment_reduce.default: _segment_reduce,
    aten._segment_reduce_backward.default: _segment_reduce_backward,
    aten.repeat_interleave.Tensor: _repeat_interleave,
}
_answers: dict[Hashable, Any] = {}
_types: dict[Hashable, torch.dtype] = {}


def shapes_of(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Results as meta tensors, of arguments that are meta tensors; raises NotImplementedError where torch has no rule."""
    if torch.Tag.pointwise in func.tags:
        return _pointwise(func, args, kwargs)
    return _exact(func, args, kwargs)


def _exact(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        key = (func, *map(_signature, args), *((name, _signature(value)) for name, value in kwargs.items()))
        found = _answers.get(key)
    except TypeError:  # an argument that cannot be a key
        return _RULES.get(func, func)(*args, **kwargs)
    if found is None:
        found = _RULES.get(func, func)(*args, **kwargs)
        if len(_answers) >= _MANY:
            _answers.clear()
        _answers[key] = found
    return found


def _pointwise(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    plain = len(func._schema.returns) == 1 and all(t.is_contiguous() for t in tensors)
    if not plain or any(isinstance(value, (list, tuple)) for value in args):
        return _exact(func, args, kwargs)
    key = (func, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
    dtype = _types.get(key)
    if dtype is None:
        dtype = _types[key] = func(*map(_tiny, args), **{name: _tiny(value) for name, value in kwargs.items()}).dtype
    shapes = {t.shape for t in tensors}
    shape = shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes, *(t.shape for t in tensors))
    return torch.empty(shape, dtype=dtype, device="meta")


def _tiny(value: Any) -> Any:
    """A host tensor of one element in place of a tensor: torch's rules in Python take seconds to load."""
    return torch.ones((1,) * min(value.dim(), 1), dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _signature(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return (type(value), value)


def _kind(value: Any) -> Hashable:
    """What the type of a pointwise result depends on."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim() == 0)
    return (value,) if isinstance(value, (str, torch.dtype)) else (type(value),)
