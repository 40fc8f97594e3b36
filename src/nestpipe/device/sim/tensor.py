"""Tensors of the simulated device.  The values lie in a host tensor that only queued items touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from nestpipe.device.sim.machine import Queue
from nestpipe.device.sim.memory import ALLOCATOR, Block, span_of, strided, use_of
from nestpipe.device.sim.races import Use
from nestpipe.device.sim.sites import Site


class SimTensor(torch.Tensor):
    """`inner` holds the values once the stream has come so far; `block` is the memory that it lies in."""

    is_plain = True
    """Operations mean what they mean for any tensor of a device."""

    inner: torch.Tensor
    block: Block
    meta: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, block: Block, meta: torch.Tensor | None = None) -> SimTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="sim:0",
        )
        tensor.inner, tensor.block, tensor.meta = inner, block, meta
        return tensor

    def __init__(self, inner: torch.Tensor, block: Block, meta: torch.Tensor | None = None) -> None: ...

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def like_on_meta(self) -> torch.Tensor:
        """A tensor of the same shape without memory, to learn from what shapes operations give."""
        if self.meta is None:
            inner = self.inner
            self.meta = torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device="meta")
        return self.meta

    def use(self, writes: bool) -> Use:
        """The bytes, as the race detector takes them."""
        return use_of(self.inner, self.block.memory, writes)

    # What torch.Tensor does in C++ with memory or metadata that a wrapper does not have.

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: SimTensor) -> None:
        torch.Tensor.data.__set__(self, value)
        self.inner, self.block, self.meta = value.inner, value.block, value.meta

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().cpu().numpy() if force else self.__array__()

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a tensor on sim:0 has no numpy array: use Tensor.cpu() first")

    def is_pinned(self, device: object = None) -> bool:
        return False

    def __repr__(self, *, tensor_contents: object = None) -> str:
        text = repr(self.detach().cpu())
        end = f", grad_fn={self.grad_fn})" if self.grad_fn else ", requires_grad=True)" if self.requires_grad else ")"
        return text[:-1] + ", device='sim:0'" + end

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if self.dim() == 0 else format(repr(self), form)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only tensors that a user made can be deep-copied: detach() this one first")
        with torch.no_grad():
            copy = self.clone()
        copy.requires_grad_(self.requires_grad)
        if hasattr(self, "_is_param"):
            copy._is_param = self._is_param
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.detach().cpu(), self.requires_grad, hasattr(self, "_is_param"))

    # nn.Module.to() swaps tensors of such classes in place, so that optimizers made before still know their parameters.

    def __tensor_flatten__(self) -> tuple[list[str], Block]:
        return ["inner"], self.block

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], block: Block, shape: Any, stride: Any) -> SimTensor:
        return SimTensor(inner["inner"], block)


def _rebuild(value: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    tensor = value.to("sim").requires_grad_(requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


def new_tensor(
    queue: Queue, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, name: str, site: Site
) -> SimTensor:
    """Poisoned, in memory of the queue's stream.  Callers hold the machine's lock."""
    shape, stride = tuple(shape), tuple(stride)
    block = ALLOCATOR.take(span_of(shape, stride) * dtype.itemsize, queue, name, site)
    return SimTensor(strided(block, shape, stride, dtype), block)


def _not_enabled(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError("call nestpipe.device.sim.enable() first")


dispatch: Callable[[Any, Sequence[Any], dict[str, Any]], Any] = _not_enabled
"""What an operation does; `enable` sets it."""
