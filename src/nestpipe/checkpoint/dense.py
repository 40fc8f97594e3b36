"""The dense side of a pipeline by name: parameters, buffers, optimizer state; as tensors, forth and back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.pipeline.pipeline import TrainPipeline

OPTIMIZER = "optimizer."
NUMBER = "number."
"""Before the name of an optimizer's state that is a plain number."""
RATE = "rate."
"""Before the number of a parameter group: its learning rate, where nothing else sets it."""
MODEL = "model."
"""Before names of the model's own that would look like one of the others, or like this."""


def clone_dense(pipeline: TrainPipeline) -> dict[str, torch.Tensor]:
    """Copies of everything, on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named(pipeline).items()}


def named(pipeline: TrainPipeline) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    names = {}
    for name, parameter in pipeline.model.named_parameters():
        names[parameter] = name
        found[_stored(name)] = parameter
    found.update((_stored(name), buffer) for name, buffer in pipeline.model.named_buffers())
    if pipeline.optimizer is not None:
        for parameter, state in pipeline.optimizer.state.items():
            for entry, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{OPTIMIZER}{names[parameter]}.{entry}"] = value
                elif isinstance(value, int | float):
                    found[f"{NUMBER}{names[parameter]}.{entry}"] = torch.tensor(float(value), dtype=torch.float64)
        if pipeline.dense_rate is None:
            for number, group in enumerate(pipeline.optimizer.param_groups):
                found[f"{RATE}{number}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
    return found


def restore_dense(pipeline: TrainPipeline, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Everything as it was.  CheckpointError, before anything is changed, where the model is another."""
    model = dict(pipeline.model.named_parameters()) | dict(pipeline.model.named_buffers())
    own = {_stored(name): tensor for name, tensor in model.items()}
    saved = {name for name in tensors if not name.startswith((OPTIMIZER, NUMBER, RATE))}
    for name in sorted({*own} ^ saved):
        who, other = ("checkpoint", "model") if name in saved else ("model", "checkpoint")
        raise CheckpointError(
            f"{where}: the {who} has a tensor {name!r} and the {other} has not: it is of another model"
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise CheckpointError(
                f"{where}: {name!r} is {_kind(tensors[name])} in the checkpoint and {_kind(tensor)} in the model: "
                "it is of another model"
            )
    parameters = dict(pipeline.model.named_parameters())
    states = [_entry(name) for name in tensors if name.startswith((OPTIMIZER, NUMBER))]
    if (states and pipeline.optimizer is None) or any(name not in parameters for name, _ in states):
        raise CheckpointError(
            f"{where}: the checkpoint has optimizer state of parameters that this model does not train"
        )
    _check_state(pipeline, tensors, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    if pipeline.optimizer is None:
        return
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            parameter, entry = _entry(name)
            state = pipeline.optimizer.state[parameters[parameter]]
            # Adam's step count is on the host whatever the parameter is on; averages are beside their parameter.
            target = parameters[parameter].device if tensor.dim() else tensor.device
            state[entry] = tensor.to(target)
        elif name.startswith(NUMBER):
            parameter, entry = _entry(name)
            pipeline.optimizer.state[parameters[parameter]][entry] = tensor.item()
        elif name.startswith(RATE):
            pipeline.optimizer.param_groups[int(name.removeprefix(RATE))]["lr"] = tensor.item()


def _check_state(pipeline: TrainPipeline, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Optimizer state is what this optimizer makes of these parameters: all of it, or none at all."""
    groups = [] if pipeline.optimizer is None else pipeline.optimizer.param_groups
    numbers = {name for name in tensors if name.startswith((NUMBER, RATE))}
    if any(tensors[name].shape != () or tensors[name].dtype != torch.float64 for name in numbers):
        raise CheckpointError(f"{where}: a number of the optimizer's is none")
    if not {name for name in numbers if name.startswith(RATE)} <= {f"{RATE}{n}" for n in range(len(groups))}:
        raise CheckpointError(f"{where}: the checkpoint has learning rates of parameter groups that there are not")
    given = {name for name in tensors if name.startswith((OPTIMIZER, NUMBER))}
    made = _made_by(pipeline)
    if made is None or not given:
        return
    for name in sorted(given ^ {*made}):
        who, other = ("checkpoint", "model") if name in given else ("model", "checkpoint")
        raise CheckpointError(f"{where}: the optimizer of the {who} has {name!r} and that of the {other} has not")
    for name, tensor in made.items():
        if name.startswith(OPTIMIZER) and _kind(tensor) != _kind(tensors[name]):
            raise CheckpointError(
                f"{where}: {name!r} is {_kind(tensors[name])} and this model's optimizer has {_kind(tensor)}"
            )


def _made_by(pipeline: TrainPipeline) -> dict[str, torch.Tensor] | None:
    """State by name as a copy of the optimizer makes it in one step; None where it does not step like that."""
    names = {parameter: name for name, parameter in pipeline.model.named_parameters()}
    optimizer = pipeline.optimizer
    if optimizer is None:
        return {}
    copy = deepcopy(optimizer)
    pairs = [
        (names.get(own), one)
        for group, copied in zip(optimizer.param_groups, copy.param_groups)
        for own, one in zip(group["params"], copied["params"])
    ]
    for _, parameter in pairs:
        if parameter.requires_grad:  # others have no state
            parameter.grad = torch.zeros_like(parameter)
    try:
        copy.step()
    except (TypeError, RuntimeError):  # it wants a closure, or gradients of another kind
        return None
    found = {}
    for name, parameter in pairs:
        for entry, value in copy.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"{OPTIMIZER}{name}.{entry}"] = value
            elif isinstance(value, int | float):
                found[f"{NUMBER}{name}.{entry}"] = torch.tensor(float(value))
    return found


def _stored(name: str) -> str:
    """Under which name a tensor of the model's is in a file."""
    return f"{MODEL}{name}" if name.startswith((OPTIMIZER, NUMBER, RATE, MODEL)) else name


def _entry(name: str) -> tuple[str, str]:
    parameter, _, entry = name.partition(".")[2].rpartition(".")
    return parameter, entry


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
