"""Workers of our commands start without torch's compiler, and their optimizers do what torch's do."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAME = """
import sys, torch
from torch.optim import SGD, Adagrad, Adam, AdamW
from nestpipe.launch.quick_start import leave_out_compiler

def trained(kind, **settings):
    weight = torch.nn.Parameter(torch.arange(4.0))
    optimizer = kind([weight], lr=0.1, **settings)
    for _ in range(3):
        optimizer.zero_grad()
        (weight**3).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
    return weight.detach()

kinds = [(SGD, {"momentum": 0.9}), (Adagrad, {}), (Adam, {"fused": True}), (AdamW, {"fused": True})]
leave_out_compiler()
without = [trained(kind, **settings) for kind, settings in kinds]
assert "torch._dynamo" not in sys.modules, "torch's compiler was loaded"
print(torch.stack(without).tolist())
"""


@pytest.mark.slow
def test_optimizers_without_the_compiler() -> None:
    plain = SAME.replace("\nleave_out_compiler()", "").replace('assert "torch._dynamo" not', 'assert "torch._dynamo"')
    said = [subprocess.run([sys.executable, "-c", text], capture_output=True, text=True) for text in (SAME, plain)]
    assert said[0].returncode == said[1].returncode == 0, said
    assert said[0].stdout == said[1].stdout
