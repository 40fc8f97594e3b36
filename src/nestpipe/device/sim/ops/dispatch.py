"""Where every operation on a device tensor arrives: views at once, everything else at the end of the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nestpipe.device.sim.faults import DeviceMix
from nestpipe.device.sim.machine import MACHINE, Kernel, Queue
from nestpipe.device.sim.ops.atomics import shuffled
from nestpipe.device.sim.ops.copies import copy, to_copy
from nestpipe.device.sim.ops.guards import guarded
from nestpipe.device.sim.ops.schemas import HOST_LISTS, MASKED, MEMORY_ONLY, VALUES, Facts, aten, facts_of
from nestpipe.device.sim.ops.seeds import seeded
from nestpipe.device.sim.ops.shapes import shapes_of
from nestpipe.device.sim.races import note
from nestpipe.device.sim.sites import Site, site
from nestpipe.device.sim.tensor import SimTensor, new_tensor


class Call:
    """One call of an operation, with the host tensors behind its arguments."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.facts: Facts = facts_of(func)
        self.args = args
        self.kwargs = kwargs
        self.tensors: list[SimTensor] = []
        self.hosts: list[torch.Tensor] = []
        self.inner_args = [self._inner(value) for value in args]
        self.inner_kwargs = {name: self._inner(value) for name, value in kwargs.items()}

    def _inner(self, value: Any) -> Any:
        if isinstance(value, SimTensor):
            self.tensors.append(value)
            return value.inner
        if isinstance(value, torch.Tensor):
            self.hosts.append(value)
            return value.detach().clone() if value.dim() == 0 else value  # a scalar is read at the launch
        if isinstance(value, (list, tuple)):
            return [self._inner(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    @property
    def device(self) -> torch.device:
        """Where the results are."""
        device = self.kwargs.get("device")
        return torch.device("sim") if device is None else torch.device(device)

    def argument(self, place: int, name: str) -> Any:
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def written(self) -> list[SimTensor]:
        found: list[SimTensor] = []
        for place, name in self.facts.written:
            value = self.argument(place, name)
            found += [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, SimTensor)]
        return found


def dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        return copy(*args, **kwargs)
    if func is aten._copy_from.default:
        return copy(args[1], args[0], *args[2:], **kwargs)
    if func is aten._to_copy.default:
        return to_copy(*args, **kwargs)
    if func is aten.record_stream.default:
        with MACHINE.lock:
            args[0].block.used_on.add(args[1].stream_id)
        return None
    call = Call(func, args, kwargs)
    if call.facts.reshapes:
        raise NotImplementedError(f"{call.facts.name} is not simulated: use the form that gives a new tensor")
    if call.facts.composite:
        return func.decompose(*args, **kwargs)
    if call.facts.view:
        return _view(call)
    if call.facts.makes and call.device.type != "sim":
        return func(*(_tree(args, _meta)), **_tree(kwargs, _meta))  # only shapes count
    with MACHINE.lock:
        _refuse_mixing(call)
        if func in MASKED:
            call = _upload_indices(call)
        if _needs_values(call):
            return _now(call)
        return _later(call)


def _view(call: Call) -> Any:
    block = call.tensors[0].block
    result = call.func(*call.inner_args, **call.inner_kwargs)
    if isinstance(result, torch.Tensor):
        return SimTensor(result, block)
    return [SimTensor(part, block) for part in result]


def _refuse_mixing(call: Call) -> None:
    if call.func in MASKED or call.func in HOST_LISTS:
        return
    for host in call.hosts:
        if host.dim() and host.device.type != "meta":
            shape = list(host.shape)
            raise DeviceMix(f"{call.facts.name} got tensors on sim:0 and on {host.device} (shape {shape}): move one")


def _upload_indices(call: Call) -> Call:
    """Indices on the host go up first, as on CUDA: a blocking copy each."""
    indices = call.args[1]
    if not any(isinstance(index, torch.Tensor) and not isinstance(index, SimTensor) for index in indices):
        return call
    moved = [index.to("sim") if isinstance(index, torch.Tensor) else index for index in indices]
    return Call(call.func, (call.args[0], moved, *call.args[2:]), call.kwargs)


def _needs_values(call: Call) -> bool:
    if call.func in MASKED:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in call.args[1])
    if call.func is aten.repeat_interleave.Tensor:
        return call.kwargs.get("output_size") is None
    return call.func in VALUES


def _now(call: Call) -> Any:
    """The host waits for the arguments, then looks at them."""
    queue, place = MACHINE.current(), site()
    note(queue, call.facts.name, place, [t.use(False) for t in call.tensors])
    MACHINE.put(queue, Kernel(call.facts.name, place, _nothing))  # the access needs an item
    MACHINE.wait_for(queue, call.facts.name)
    if call.facts.written:
        return _later(call)
    result = guarded(call.func, lambda: call.func(*call.inner_args, **call.inner_kwargs), *_inputs(call))()
    return _tree(result, lambda value: _uploaded(value, queue, call.facts.name, place))


def _nothing() -> None: ...


def _uploaded(value: torch.Tensor, queue: Queue, name: str, place: Site) -> SimTensor:
    made = new_tensor(queue, value.shape, value.stride(), value.dtype, name, place)
    note(queue, name, place, [made.use(True)])
    MACHINE.launches += 1
    inner = made.inner
    MACHINE.put(queue, Kernel(name, place, lambda: inner.copy_(value)))
    return made


def _later(call: Call) -> Any:
    """Results have memory at once, and values when the stream has come so far."""
    queue, place, name = MACHINE.current(), site(), call.facts.name
    written = call.written()
    made = [] if None not in call.facts.returned else _make(call, queue, place)
    flat = _flat(made)
    if call.func not in MEMORY_ONLY:
        uses = [t.use(any(t is w for w in written)) for t in call.tensors]
        note(queue, name, place, uses + [t.use(True) for t in flat if t is not None])
        MACHINE.launches += 1
        targets = [None if t is None else t.inner for t in flat]
        MACHINE.put(queue, Kernel(name, place, _job(_run_of(call), targets, call.facts)))
    return _returned(call, made)


def _make(call: Call, queue: Queue, place: Site) -> Any:
    """New tensors for the results that are not arguments."""
    shapes = shapes_of(call.func, _tree(list(call.args), _meta), _tree(call.kwargs, _meta))
    if len(call.facts.returned) > 1:
        shapes = [None if at is not None else shape for at, shape in zip(call.facts.returned, shapes)]

    def make(shape: torch.Tensor) -> SimTensor:
        made = new_tensor(queue, shape.shape, shape.stride(), shape.dtype, call.facts.name, place)
        made.meta = shape
        return made

    return _tree(shapes, make)


def _returned(call: Call, made: Any) -> Any:
    places = call.facts.returned
    if not places:
        return None
    if all(place is None for place in places):
        return made
    arguments = call.func._schema.arguments
    results = [
        call.argument(place, arguments[place].name) if place is not None else made[n] for n, place in enumerate(places)
    ]
    return results[0] if len(results) == 1 else tuple(results)


def _run_of(call: Call) -> Callable[[], Any]:
    func, args, kwargs = call.func, *_inputs(call)
    if call.facts.seeded and kwargs.get("generator") is None:
        return seeded(func, call.facts, args, kwargs)
    if MACHINE.shuffle_atomics:
        run = shuffled(func, args, kwargs, MACHINE.shuffles.getrandbits(40))
        if run is not None:
            return run
    return guarded(func, lambda: func(*args, **kwargs), args, kwargs)


def _inputs(call: Call) -> tuple[list[Any], dict[str, Any]]:
    return call.inner_args, call.inner_kwargs


def _job(run: Callable[[], Any], targets: list[torch.Tensor | None], facts: Facts) -> Callable[[], None]:
    if not targets:
        return run

    def job() -> None:
        for target, value in zip(targets, _flat(run())):
            if target is not None:
                target.copy_(value)

    return job


def _meta(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, SimTensor):
        return value.like_on_meta()
    return value if value.dim() == 0 else value.to("meta")


def _tree(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with its tensors changed; devices become meta."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_tree(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _tree(item, change) for name, item in value.items()}
    if isinstance(value, torch.device) and value.type == "sim":
        return torch.device("meta")
    return value


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
