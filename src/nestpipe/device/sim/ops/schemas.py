"""What an operation's schema says: what it writes, what it returns, whether it needs the host to know values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

VALUES = frozenset(
    (
        aten._local_scalar_dense.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten._unique.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.unique_dim_consecutive.default,
        aten.bincount.default,
    )
)
"""The shape or the Python value that they return depends on values: the host must wait."""
MASKED = frozenset((aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default))
"""They need the host to know values if an index is a mask; and they take indices from the host."""
HOST_LISTS = frozenset(
    getattr(aten, f"_foreach_{name}").Tensor for name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_")
)
"""They take a host tensor of scalars, one for each tensor of a list."""
MEMORY_ONLY = frozenset((aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default))
"""They take memory and launch nothing."""
RESIZING = frozenset((aten.resize_.default, aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset))


@dataclass(frozen=True, slots=True)
class Facts:
    name: str
    view: bool
    written: tuple[tuple[int, str], ...]
    """Place and name of the arguments that are written."""
    returned: tuple[int | None, ...]
    """For each result, which argument it is; None for a new tensor."""
    seeded: bool
    generator: bool
    """Whether a generator can be given."""
    makes: bool
    """Takes a device: it may make a tensor elsewhere."""
    composite: bool
    """Made of other operations; arrives whole only in inference mode."""
    reshapes: bool
    """Changes shape or memory of its argument in place."""


_facts: dict[Any, Facts] = {}


def facts_of(func: Any) -> Facts:
    found = _facts.get(func)
    if found is None:
        found = _facts[func] = _read(func)
    return found


def _has_kernel(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _read(func: Any) -> Facts:
    arguments = func._schema.arguments
    written = tuple((n, a.name) for n, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    view = func.is_view or func in (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
    returned = []
    for result in func._schema.returns:
        names = result.alias_info.before_set if result.alias_info is not None and result.alias_info.is_write else set()
        same = [n for n, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.before_set & names]
        returned.append(same[0] if same else None)
    return Facts(
        name=str(func).removesuffix(".default"),
        view=view,
        written=written,
        returned=tuple(returned),
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        generator=any(a.name == "generator" for a in arguments),
        makes=any(a.name == "device" for a in arguments),
        composite=_has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, "CPU"),
        reshapes=torch.Tag.inplace_view in func.tags or func in RESIZING,
    )
