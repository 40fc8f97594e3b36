"""Collectives of the simulated device, as NCCL's: on a stream of their own, waited for by streams; gloo carries the bytes.

An operation begins when the issuing stream has come to it.  What arrives is in the output only for those who wait for the
work, `work.wait()`, which orders the current stream and does not stop the host: who forgets it reads poison.  A peer that
is gone or stands still leaves the work unfinished, until gloo has an error or somebody calls `abort`.
"""

from __future__ import annotations

import queue as queues
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nestpipe.device.sim.faults import DeviceMix
from nestpipe.device.sim.machine import MACHINE, Kernel, Transfer, Wait
from nestpipe.device.sim.poison import poison_values
from nestpipe.device.sim.races import note
from nestpipe.device.sim.sites import site
from nestpipe.device.sim.streams import Event, Stream, current_stream
from nestpipe.device.sim.tensor import SimTensor

Carry = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""Takes host copies of the inputs to the peers; returns what arrived for the outputs."""
PATIENCE = 0.002
"""Seconds for which, in late order, an operation does not begin unless a host thread waits for it.  Peers may need it."""
_BACKEND = "simwire"


class WireWork(dist.Work):
    """One operation.  `wait` makes the current stream wait; `is_completed` asks, and never waits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.event = Event()
        self.error: BaseException | None = None
        self.arrived: list[torch.Tensor] = []

    def wait(self, timeout: object = None) -> bool:
        self.event.wait(current_stream())
        return True

    def synchronize(self) -> None:
        self.event.wait(current_stream())

    def is_completed(self) -> bool:
        return self.error is not None or self.event.query()

    def is_success(self) -> bool:
        return self.error is None and self.event.query()

    def exception(self) -> BaseException | None:
        """What went wrong: gloo's error, or that the group was aborted."""
        return self.error


class Wire(dist.ProcessGroup):
    """A group with a stream and a thread of its own.  One thread issues operations, in the same order on all ranks."""

    def __init__(self, rank: int, size: int, gloo: dist.ProcessGroup | None) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._workers = size
        self._stream = Stream()
        self._pending: dict[Transfer, WireWork] = {}
        self._broken: BaseException | None = None
        self._jobs: queues.SimpleQueue[Callable[[], None] | None] = queues.SimpleQueue()
        threading.Thread(target=_serve, args=(self._jobs,), name="sim wire", daemon=True).start()

    def getBackendName(self) -> str:
        return _BACKEND

    def abort(self) -> None:
        """Ends what is pending, and whatever is issued later, with a fault.  Does not wait for peers."""
        with MACHINE.lock:
            if self._broken is None:
                self._broken = RuntimeError("the group was aborted")
            for transfer, work in list(self._pending.items()):
                self._settle(transfer, work, self._broken)

    def shutdown(self) -> None:
        self.abort()
        self._jobs.put(None)

    def __del__(self) -> None:
        self._jobs.put(None)

    # The operations

    def alltoall_base(
        self, output: Any, input: Any, output_split_sizes: list[int], input_split_sizes: list[int], opts: Any = None
    ) -> WireWork:
        to = _bytes(output, output_split_sizes, self._workers, "output")
        of = _bytes(input, input_split_sizes, self._workers, "input")
        shape, dtype = output.shape, output.dtype

        def carry(sent: list[torch.Tensor]) -> list[torch.Tensor]:
            arrived = torch.empty(sum(to), dtype=torch.uint8)
            dist.all_to_all_single(arrived, sent[0].view(-1).view(torch.uint8), to, of, group=self._gloo)
            return [arrived.view(dtype).view(shape)]

        alone: Carry = lambda sent: [sent[0].view(shape)]  # noqa: E731
        return self._issue("all_to_all", [input], [output], carry if self._workers > 1 else alone)

    all_to_all_single = alltoall_base  # what torch 2.13 calls

    def allreduce(self, tensors: list[Any], opts: Any = None) -> WireWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def carry(sent: list[torch.Tensor]) -> list[torch.Tensor]:
            for tensor in sent:
                if tensor.numel():  # as many on every rank
                    dist.all_reduce(tensor, op, group=self._gloo)
            return sent

        return self._issue("all_reduce", tensors, tensors, carry if self._workers > 1 else _kept)

    def broadcast(self, tensors: list[Any], opts: Any) -> WireWork:
        root = opts.rootRank

        def carry(sent: list[torch.Tensor]) -> list[torch.Tensor]:
            for tensor in sent:
                if tensor.numel():
                    dist.broadcast(tensor, group_src=root, group=self._gloo)
            return sent

        return self._issue("broadcast", tensors, tensors, carry if self._workers > 1 else _kept)

    # What they have in common

    def _issue(self, name: str, reads: Sequence[Any], writes: Sequence[Any], carry: Carry) -> WireWork:
        for tensor in (*reads, *writes):
            _check(name, tensor)
        work, place = WireWork(name), site()
        with MACHINE.lock:
            self._stream.wait_stream(current_stream())
            queue = self._stream.queue
            outputs = [tensor.inner for tensor in writes]
            only_written = [t.inner for t in writes if not any(t is other for other in reads)]
            if only_written:
                note(queue, name, place, [t.use(True) for t in writes])
                MACHINE.put(queue, Kernel(name, place, lambda: _poison(only_written)))
            note(queue, name, place, [t.use(False) for t in reads] + [t.use(True) for t in writes])
            transfer = Transfer(name, place, lambda: _finish(work, outputs))
            at = queue.issued
            self._pending[transfer] = work
            MACHINE.launches += 1
            MACHINE.put(queue, transfer)
            work.event.record(self._stream)
            for tensor in (*reads, *writes):
                tensor.block.used_on.add(self._stream.stream_id)
            inputs = [tensor.inner for tensor in reads]
            if self._broken is not None:
                self._settle(transfer, work, self._broken)
            else:
                self._jobs.put(lambda: self._carry(transfer, work, Wait(queue, at), inputs, carry))
        return work

    def _carry(self, transfer: Transfer, work: WireWork, turn: Wait, inputs: list[torch.Tensor], carry: Carry) -> None:
        """On the group's thread: waits for the stream, lets the bytes travel, notes what arrived."""
        error: BaseException | None = None
        try:
            with MACHINE.lock:
                queue, at = turn.queue, turn.at
                if MACHINE.order == "late":
                    MACHINE.needed.wait_for(lambda: queue.done >= at or transfer.settled, PATIENCE)
                MACHINE.advance(queue, at)
                if transfer.settled:
                    return
                MACHINE.tell(queue, at)
                sent = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
            work.arrived = carry(sent)
        except Exception as problem:
            error = problem
        with MACHINE.lock:
            if not transfer.settled:
                if error is not None:
                    self._broken = error  # as a communicator: what comes later fails as well
                self._settle(transfer, work, error)

    def _settle(self, transfer: Transfer, work: WireWork, error: BaseException | None) -> None:
        work.error = error
        self._pending.pop(transfer, None)
        MACHINE.settle(transfer)


def _serve(jobs: queues.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _finish(work: WireWork, outputs: list[torch.Tensor]) -> None:
    """In stream order, when the transfer is settled."""
    if work.error is not None:
        raise work.error
    for output, value in zip(outputs, work.arrived):
        output.copy_(value)


def _poison(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        poison_values(tensor)


def _kept(sent: list[torch.Tensor]) -> list[torch.Tensor]:
    return sent


def _check(name: str, tensor: Any) -> None:
    if not isinstance(tensor, SimTensor):
        raise DeviceMix(f"{name} on a device group got a tensor on {tensor.device}: use a gloo group, or move it")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} needs contiguous tensors: call contiguous() first")


def _bytes(tensor: Any, splits: list[int], workers: int, what: str) -> list[int]:
    """How many bytes go to or come from each rank."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % workers:
            raise ValueError(f"all_to_all {what} has {rows} rows, no multiple of {workers} workers: give split sizes")
        splits = [rows // workers] * workers
    if sum(splits) != rows or len(splits) != workers:
        raise ValueError(f"all_to_all {what} has {rows} rows, its split sizes {splits} for {workers} workers differ")
    row = tensor.element_size()
    for width in tensor.shape[1:]:
        row *= width
    return [count * row for count in splits]


_gloo_groups: list[dist.ProcessGroup] = []


def _create(store: Any, rank: int, size: int, timeout: Any) -> Wire:
    return Wire(rank, size, _gloo_groups.pop())


def new_wire_group(gloo_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A device group over a gloo group that nobody else uses; None for a single worker without torch.distributed.

    All ranks of the gloo group call it together, and in the same order as other calls that make groups.
    """
    if gloo_group is None:
        return Wire(0, 1, None)
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _create, devices=["sim"])
    _gloo_groups.append(gloo_group)
    ranks = dist.get_process_group_ranks(gloo_group)
    return dist.new_group(ranks, backend=_BACKEND, use_local_synchronization=True)
