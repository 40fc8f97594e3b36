"""Checks before operations that the host's kernels run without any, and with wrong values would write past the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nestpipe.device.sim.ops.schemas import aten


def _repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> None:
    if _outside(repeats, output_size) or (output_size is not None and int(repeats.sum()) != output_size):
        raise IndexError(f"repeats do not add up to output_size {output_size}, or one is negative")


def _outside(counts: torch.Tensor, most: int | None) -> bool:
    """Whether a count alone is wrong: a sum of poison may wrap around and look right."""
    return bool((counts < 0).any()) or (most is not None and bool((counts > most).any()))


def _fits(lengths: torch.Tensor | None, offsets: torch.Tensor | None, rows: int) -> None:
    if lengths is not None and (_outside(lengths, rows) or bool((lengths.sum(-1) > rows).any())):
        raise IndexError(f"lengths add up to more than {rows}, or one is negative")
    if offsets is not None and bool(((offsets < 0) | (offsets > rows)).any()):
        raise IndexError(f"an offset is not in 0 to {rows}")


def _segment_reduce(data: torch.Tensor, reduce: str, **kwargs: Any) -> None:
    _fits(kwargs.get("lengths"), kwargs.get("offsets"), data.shape[kwargs.get("axis", 0)])


def _segment_reduce_backward(grad: Any, output: Any, data: torch.Tensor, reduce: str, **kwargs: Any) -> None:
    _segment_reduce(data, reduce, **kwargs)


_GUARDS: dict[Any, Callable[..., None]] = {
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.segment_reduce.default: _segment_reduce,
    aten._segment_reduce_backward.default: _segment_reduce_backward,
}


def guarded(func: Any, run: Callable[[], Any], args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    check = _GUARDS.get(func)
    if check is None:
        return run

    def checked() -> Any:
        check(*args, **kwargs)
        return run()

    return checked
