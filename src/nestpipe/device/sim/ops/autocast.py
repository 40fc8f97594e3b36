"""`torch.autocast("sim")`: the same operations as on CUDA run in the lower precision, or in float32.

torch knows the lists for its own devices only.  Weights are cast anew at each use; CUDA keeps the cast one for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nestpipe.device.sim.ops.schemas import aten
from nestpipe.device.sim.tensor import SimTensor

KEY = "AutocastPrivateUse1"


def _names(text: str) -> list[str]:
    return text.split()


_LOWER = _names("addbmm addmm addmv addr baddbmm bmm einsum linear matmul mm mv prelu scaled_dot_product_attention")
_FLOAT32 = _names("""
    binary_cross_entropy_with_logits cdist cosine_embedding_loss cosine_similarity cumprod cumsum dist erfinv exp expm1
    group_norm huber_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax.int logsumexp mse_loss
    native_layer_norm nll_loss norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor prod reciprocal rsqrt smooth_l1_loss soft_margin_loss softmax.int softplus sum sum.dim_IntList tan
""")
_WIDEST = _names("addcdiv addcmul atan2 cat cross dot index_put scatter_add stack tensordot")


def register(library: torch.library.Library) -> None:
    for names, cast in ((_LOWER, _to_lower), (_FLOAT32, _to_float32), (_WIDEST, _to_widest)):
        for name in names:
            packet, _, overload = name.partition(".")
            func = getattr(getattr(aten, packet), overload or "default")
            library.impl(name, _casting(func, cast), KEY)


def _casting(func: Any, cast: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return func(*cast(args), **kwargs)

    return call


def _to_lower(args: Any) -> Any:
    return _cast(args, torch.get_autocast_dtype("sim"))


def _to_float32(args: Any) -> Any:
    return _cast(args, torch.float32)


def _to_widest(args: Any) -> Any:
    types = {x.dtype for x in _eligible(args)}
    return _cast(args, torch.float32) if len(types) > 1 else args


def _eligible(value: Any) -> list[SimTensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _eligible(item)]
    good = isinstance(value, SimTensor) and value.is_floating_point() and value.dtype != torch.float64
    return [value] if good else []


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _eligible(value) else value
