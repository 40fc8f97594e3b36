"""Operations that make device tensors from no device tensor: torch.empty, arange and their like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nestpipe.device.sim.machine import MACHINE, Kernel
from nestpipe.device.sim.ops.copies import copy
from nestpipe.device.sim.ops.dispatch import dispatch
from nestpipe.device.sim.ops.schemas import aten, facts_of
from nestpipe.device.sim.ops.seeds import seeded
from nestpipe.device.sim.races import note
from nestpipe.device.sim.sites import site
from nestpipe.device.sim.tensor import SimTensor, new_tensor

_FILLED = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "logspace",
    "randperm",
    "randperm.generator",
    "tril_indices",
    "triu_indices",
)
"""Elsewhere torch makes them by resizing what they return."""


def _empty(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_: Any) -> SimTensor:
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return _empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_: Any) -> SimTensor:
    with MACHINE.lock:
        return new_tensor(MACHINE.current(), size, stride, dtype or torch.get_default_dtype(), "empty", site())


def _filled(name: str) -> Callable[..., SimTensor]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(aten, packet), overload or "default")
    facts = facts_of(func)

    def fill(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> SimTensor:
        shape = func(*args, device=torch.device("meta"), **kwargs)
        options = {**kwargs, "device": torch.device("cpu")}
        with MACHINE.lock:
            queue, place = MACHINE.current(), site()
            made = new_tensor(queue, shape.shape, shape.stride(), shape.dtype, packet, place)
            inner = made.inner
            run = seeded(func, facts, list(args), options) if facts.seeded else (lambda: func(*args, **options))
            note(queue, packet, place, [made.use(True)])
            MACHINE.launches += 1
            MACHINE.put(queue, Kernel(packet, place, lambda: inner.copy_(run())))
        return made

    return fill


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy(target, source, non_blocking)


def _item(tensor: torch.Tensor) -> Any:
    return dispatch(aten._local_scalar_dense.default, (tensor,), {})


def _whole(name: str) -> Callable[..., Any]:
    func = getattr(aten, name).default
    return lambda *args, **kwargs: dispatch(func, args, kwargs)


def register(library: torch.library.Library) -> None:
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")  # torch.tensor() keeps the two from our dispatch
    library.impl("_local_scalar_dense", _item, "PrivateUse1")
    for name in (
        "silu_backward",
        "mish_backward",
    ):  # kernels on CPU and CUDA; for unknown devices torch takes them apart
        library.impl(name, _whole(name), "PrivateUse1")
    for name in _FILLED:
        library.impl(name, _filled(name), "PrivateUse1")
