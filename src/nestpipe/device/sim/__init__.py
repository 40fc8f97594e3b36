"""A simulated asynchronous accelerator: device "sim", in pure Python, to find missing waits without hardware.

Operations are queued on streams and run as late as possible, or in an order drawn from a seed.  Memory that nobody has
written holds NaN, and changes hands as in CUDA's caching allocator.  A race detector compares accesses by byte ranges, and
every wait of the host is counted by place.  Importing this costs nothing; `enable` loads the rest.

    sim.enable()
    sim.configure(order="random", seed=3)
    model.to("sim")
    ...
    print(sim.report().races)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from nestpipe.device.sim.disjoint import disjoint
from nestpipe.device.sim.faults import DeviceFault, DeviceMix
from nestpipe.device.sim.report import Report

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.distributed import ProcessGroup

__all__ = [
    "DeviceFault",
    "DeviceMix",
    "Report",
    "configure",
    "disjoint",
    "enable",
    "launch",
    "new_wire_group",
    "report",
    "reset_counts",
]


def enable() -> None:
    """Registers the device "sim" with torch.  May be called again."""
    from nestpipe.device.sim import registration

    registration.enable()


def configure(
    order: Literal["late", "random", "eager"] = "late",
    seed: int = 0,
    races: bool = True,
    shuffle_atomics: bool = False,
) -> None:
    """Finishes what is queued, forgets streams' pasts, faults, findings and counts, and goes on by these rules.

    `order`: "late" runs nothing until somebody must wait for it, "random" also runs pieces of streams at moments drawn
    from `seed`, "eager" runs everything at once.  `races`: compare accesses.  `shuffle_atomics`: operations that add by
    atomics on CUDA add in an order drawn from `seed`.
    """
    from nestpipe.device.sim import registration

    registration.enable()
    registration.configure(order, seed, races, shuffle_atomics)


def report() -> Report:
    """Races, host syncs and launches since `configure` or `reset_counts`."""
    from nestpipe.device.sim import registration

    return registration.report()


def reset_counts() -> None:
    """Host syncs and launches start from zero; races and annotations stay."""
    from nestpipe.device.sim import registration

    registration.reset_counts()


def new_wire_group(gloo_group: ProcessGroup | None) -> ProcessGroup:
    """Device collectives over a gloo group that nobody else uses; None for a single worker.

    All ranks of the gloo group call it together, and in the same order as other calls that make groups.
    """
    enable()
    from nestpipe.device.sim import wire

    return wire.new_wire_group(gloo_group)


def launch(kernel: Any, grid: Any, args: Sequence[Any], writes: Collection[int], **options: Any) -> None:
    """Queues kernel[grid](*args, **options), an interpreted Triton kernel, on the current stream.

    `writes` has the places of the arguments that the kernel writes.
    """
    from nestpipe.device.sim import kernels

    kernels.launch(kernel, grid, args, writes, options)
