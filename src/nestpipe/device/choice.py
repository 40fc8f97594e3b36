"""Which device trains: what a recipe names, or where a model's parameters are."""

from __future__ import annotations

import os

import torch
from torch import nn

from nestpipe.device.accelerator import Accelerator
from nestpipe.device.backend import Device
from nestpipe.device.host import HostDevice
from nestpipe.errors import NestPipeError

AUTO = ("cuda", "npu", "xpu")
"""What "auto" looks for, in this order, before it takes the host."""


class NoSuchDevice(NestPipeError, ValueError):
    """A device that is not there, or a model on several."""

    exit_code = 2


def device_for(device: torch.device) -> Device:
    """The back end for tensors on this device."""
    return HostDevice() if device.type == "cpu" else Accelerator(device)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the host if it has none."""
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(places) > 1:
        raise NoSuchDevice(
            f"the model is on {' and '.join(sorted(map(str, places)))}: move all of it to one device with model.to(...)"
        )
    return places.pop() if places else torch.device("cpu")


def has_fused_optimizers(device: torch.device) -> bool:
    """Whether torch's optimizers take `fused=True` there."""
    return device.type in ("cpu", "cuda", "xpu")


def named_device(name: str) -> torch.device:
    """The device that `train.device` names: "cpu", "cuda", "npu", "sim", or the best there is for "auto"."""
    if name == "auto":
        name = next((kind for kind in AUTO if _is_there(kind)), "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if name == "sim":
        from nestpipe.device import sim

        sim.enable()
    elif not _is_there(name):
        raise NoSuchDevice(f'train.device = "{name}", but torch finds no such device here: use "cpu" or "auto"')
    return _mine(name)


def _mine(kind: str) -> torch.device:
    """This worker's device among those of its machine."""
    module = torch.get_device_module(kind)
    index = int(os.environ.get("LOCAL_RANK", "0")) % module.device_count()
    module.set_device(index)
    return torch.device(kind, index)


def _is_there(kind: str) -> bool:
    if kind == "npu":
        try:
            __import__("torch_npu")
        except Exception:  # it is not installed, or its driver is missing
            return False
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())
