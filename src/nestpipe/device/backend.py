"""The seam between the engine and the memory that it trains in: the host's, or a device's.

On the host a lane is a thread, rows of a batch are numpy arrays, and an action that is done has finished.  On a device a
lane is a stream, rows are tensors, and an action that is done has been issued: whoever waits for it lets a stream wait.
Everything above this room is written once, for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.device.one_shot_event import OneShotEvent

Array = Any
"""np.ndarray on the host, Tensor on a device."""
Mark = Any
"""A point in the work of a lane."""


class Staged(NamedTuple):
    """Host arrays on their way to or from a device."""

    arrays: list[np.ndarray]
    block: Any = None


class Device(Protocol):
    """What the engine and the stages need of the memory they train in."""

    torch_device: torch.device

    # Lanes and events

    def lane(self, name: str) -> AbstractContextManager[Any]:
        """Around the work of a lane on this thread."""

    def thread_of(self, lane: str) -> str:
        """The lane on whose thread the actions of `lane` are issued."""

    def begin_step(self) -> None:
        """On the caller's thread, before its actions are issued."""

    def event(self) -> OneShotEvent:
        """What an action tells those that wait for it."""

    def compute_clock(self) -> float:
        """Seconds that this thread has computed, waits and other threads left out; NaN where the host does not see it."""

    def mark(self) -> Mark:
        """The work that this lane has issued so far."""

    def after(self, mark: Mark) -> None:
        """What this lane issues from now on runs after what was marked."""

    # Memory

    def allocate(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Array:
        """Memory that lives for many batches and that every lane may use."""

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike, *lanes: str) -> Array:
        """Memory of one batch, that this lane and `lanes` use.  It is reused when nothing refers to it any more."""

    def tensor(self, array: Array) -> Tensor:
        """The array as the model sees it.  No copy."""

    def upload(self, arrays: Sequence[np.ndarray], *lanes: str) -> list[Array]:
        """The arrays where row operations of this lane and of `lanes` can read them.  Nobody changes them afterwards."""

    def stage(self, arrays: Sequence[Array]) -> Staged:
        """Host arrays of the same shapes, for the host to fill.  On the host the arrays themselves."""

    def send_up(self, staged: Staged, arrays: Sequence[Array]) -> None:
        """Copies what the host filled to `arrays`, on this lane.  `staged` is not to be used any more."""

    def bring_down(self, arrays: Sequence[Array]) -> Staged:
        """Host copies of `arrays`, complete.  On the host the arrays themselves.  To be given back with `give_back`."""

    def give_back(self, staged: Staged) -> None:
        """The host is done with what was brought down."""

    def read(self, values: Sequence[float | Tensor]) -> list[float]:
        """Numbers that were computed here.  On a device the host waits for them, once for all of them."""

    def figures(self) -> dict[str, Any]:
        """Of a device: its name, bytes now and at their peak, and the waits of the host for it by stage.  Empty on the host."""

    # Wire

    def new_group(self, seconds: float, ranks: Sequence[int] | None = None) -> dist.ProcessGroup | None:
        """A process group for tensors of this device, of all workers or of some.  All workers call it together, each for
        ranks that it is among.  None: gloo's groups carry them."""
