"""Dense state as named tensors, to and from a checkpoint: parameters, buffers, optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import nn

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.train_state import TrainState

OPTIMIZER = "optimizer."
NUMBER = "number."
"""Prefix of optimizer state that is a plain number."""
RATE = "rate."
"""Prefix of a parameter group's number: its learning rate, unless `dense_rate` sets it."""
MODEL = "model."
"""Prefix of those names in the model that begin with one of the four prefixes."""


def clone_dense(state: TrainState) -> dict[str, torch.Tensor]:
    """Copies of all dense state, on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named_dense(state).items()}


def named_dense(state: TrainState) -> dict[str, torch.Tensor]:
    """All dense state by its name in a checkpoint.  Parameters, buffers and optimizer tensors are not copied."""
    found: dict[str, torch.Tensor] = {}
    names = {}
    for name, parameter in state.model.named_parameters():
        names[parameter] = name
        found[_stored(name)] = parameter
    found.update((_stored(name), buffer) for name, buffer in state.model.named_buffers())
    if state.optimizer is not None:
        for parameter, entries in state.optimizer.state.items():
            for entry, value in entries.items():
                if isinstance(value, torch.Tensor):
                    found[f"{OPTIMIZER}{names[parameter]}.{entry}"] = value
                elif isinstance(value, int | float):
                    found[f"{NUMBER}{names[parameter]}.{entry}"] = torch.tensor(float(value), dtype=torch.float64)
        if state.dense_rate is None:
            for number, group in enumerate(state.optimizer.param_groups):
                found[f"{RATE}{number}"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
    return found


def check_model(model: nn.Module, tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """The model's own tensors by their name in a file.  CheckpointError if those of the file are of another model."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    own = {_stored(name): tensor for name, tensor in named.items()}
    saved = {name for name in tensors if not name.startswith((OPTIMIZER, NUMBER, RATE))}
    for name in sorted({*own} ^ saved):
        who, other = ("checkpoint", "model") if name in saved else ("model", "checkpoint")
        raise CheckpointError(
            f"{where}: the {who} has a tensor {name!r} and the {other} does not: it belongs to another model"
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise CheckpointError(
                f"{where}: {name!r} is {_kind(tensors[name])} in the checkpoint and {_kind(tensor)} in the model: "
                "it belongs to another model"
            )
    return own


def load_model(model: nn.Module, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Loads parameters and buffers only, for a model that is not trained.  CheckpointError before anything changes."""
    own = check_model(model, tensors, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def model_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a dense file that belong to the model, without the optimizer's."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith((OPTIMIZER, NUMBER, RATE))}


def restore_dense(state: TrainState, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Restores all dense state.  Raises CheckpointError, before it changes anything, if the model is another one."""
    own = check_model(state.model, tensors, where)
    parameters = dict(state.model.named_parameters())
    entries = [_entry(name) for name in tensors if name.startswith((OPTIMIZER, NUMBER))]
    if (entries and state.optimizer is None) or any(name not in parameters for name, _ in entries):
        raise CheckpointError(
            f"{where}: the checkpoint has optimizer state for parameters that this model does not train"
        )
    _check_state(state, tensors, where)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    if state.optimizer is None:
        return
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            parameter, entry = _entry(name)
            # Adam's step count stays on the host.  Averages go to the device of their parameter.
            target = parameters[parameter].device if tensor.dim() else tensor.device
            state.optimizer.state[parameters[parameter]][entry] = tensor.to(target)
        elif name.startswith(NUMBER):
            parameter, entry = _entry(name)
            state.optimizer.state[parameters[parameter]][entry] = tensor.item()
        elif name.startswith(RATE):
            state.optimizer.param_groups[int(name.removeprefix(RATE))]["lr"] = tensor.item()


def _check_state(state: TrainState, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises CheckpointError unless optimizer state is absent, or what this optimizer makes for these parameters."""
    groups = [] if state.optimizer is None else state.optimizer.param_groups
    numbers = {name for name in tensors if name.startswith((NUMBER, RATE))}
    if any(tensors[name].shape != () or tensors[name].dtype != torch.float64 for name in numbers):
        raise CheckpointError(f"{where}: a number of optimizer state must be a float64 scalar")
    if not {name for name in numbers if name.startswith(RATE)} <= {f"{RATE}{n}" for n in range(len(groups))}:
        raise CheckpointError(
            f"{where}: the checkpoint has learning rates for parameter groups that the optimizer does not have"
        )
    given = {name for name in tensors if name.startswith((OPTIMIZER, NUMBER))}
    made = _made_by(state)
    if made is None or not given:
        return
    for name in sorted(given ^ {*made}):
        who, other = ("checkpoint", "model") if name in given else ("model", "checkpoint")
        raise CheckpointError(f"{where}: the optimizer of the {who} has {name!r} and that of the {other} does not")
    for name, tensor in made.items():
        if name.startswith(OPTIMIZER) and _kind(tensor) != _kind(tensors[name]):
            raise CheckpointError(
                f"{where}: {name!r} is {_kind(tensors[name])} and this model's optimizer has {_kind(tensor)}"
            )


def _made_by(state: TrainState) -> dict[str, torch.Tensor] | None:
    """The state, by name, that one step with zero gradients makes; None if the optimizer cannot step that way."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    optimizer = state.optimizer
    if optimizer is None:
        return {}
    copy = deepcopy(optimizer)
    pairs = [
        (names.get(own), one)
        for group, copied in zip(optimizer.param_groups, copy.param_groups)
        for own, one in zip(group["params"], copied["params"])
    ]
    for _, parameter in pairs:
        if parameter.requires_grad:  # the others have no state
            parameter.grad = torch.zeros_like(parameter)
    try:
        copy.step()
    except (TypeError, RuntimeError):  # it needs a closure, or other gradients
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
    """The name of one of the model's tensors in a file."""
    return f"{MODEL}{name}" if name.startswith((OPTIMIZER, NUMBER, RATE, MODEL)) else name


def _entry(name: str) -> tuple[str, str]:
    parameter, _, entry = name.partition(".")[2].rpartition(".")
    return parameter, entry


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
