"""The dense side of a pipeline by name: parameters, buffers, optimizer state; as tensors, forth and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.pipeline import TrainPipeline

OPTIMIZER = "optimizer."
NUMBER = "number."
"""Before the name of an optimizer's state that is a plain number."""
RATE = "rate."
"""Before the number of a parameter group: its learning rate, where nothing else sets it."""


def clone_dense(pipeline: TrainPipeline) -> dict[str, torch.Tensor]:
    """Copies of everything, on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named(pipeline).items()}


def named(pipeline: TrainPipeline) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    names = {}
    for name, parameter in pipeline.model.named_parameters():
        names[parameter] = name
        found[name] = parameter
    found.update(pipeline.model.named_buffers())
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
    own = dict(pipeline.model.named_parameters()) | dict(pipeline.model.named_buffers())
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


def _entry(name: str) -> tuple[str, str]:
    parameter, _, entry = name.partition(".")[2].rpartition(".")
    return parameter, entry


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
