"""Triton is optional: nothing imports it until a device kernel is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, os, pkgutil, sys
sys.modules.update({name: None for name in sys.argv[1:]})
import nestpipe.ops
for module in pkgutil.iter_modules(nestpipe.ops.__path__, "nestpipe.ops."):
    if not module.name.endswith("_triton") and module.name != "nestpipe.ops.triton_math":
        importlib.import_module(module.name)
import nestpipe.models.hstu, nestpipe.models.dlrm
print("imported" if sys.modules.get("triton") else "not imported")
from nestpipe.ops.triton_support import available
print(available())
os.environ["TRITON_INTERPRET"] = "1"
print(available())
"""


def run(*missing: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, *missing]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
def test_without_triton() -> None:
    """Promise: where Triton is not installed everything imports, and no device kernel is available."""
    assert run("triton") == ["not imported", "False", "False"]


@pytest.mark.slow
def test_with_triton() -> None:
    """Promise: nothing imports Triton by itself; interpreted kernels are available."""
    pytest.importorskip("triton", reason="Triton is not installed")
    imported, _, interpreted = run()
    assert imported == "not imported" and interpreted == "True"
