"""Triton kernels compiled ahead of time for devices that are not here."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
SPILLED = 0 if triton.__version__ == "3.9.0" else 64
"""Bytes that may spill.  With the version that we pin none do; with 3.7.1 four kernels of attention spill 8 to 40."""
GROUPS = ("rows", "steps", "pooling", "attention")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@functools.cache
def compiled(cache: Path, target: str, group: str) -> list[dict[str, Any]]:
    """In a process of its own: in this one kernels are interpreted."""
    backend = "ascend" if target.startswith("npu") else {"cuda": "nvidia", "hip": "amd"}[target.split(":")[0]]
    if backend not in triton.backends.backends:
        pytest.skip(f"this Triton does not compile for {backend}: it has {', '.join(triton.backends.backends)}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).parents[2] / "support" / "ahead.py"), target, group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found
    for one in found:
        print(target, *one.values())
    return found


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills(cache: Path, target: str, group: str) -> None:
    """Promise: kernels compile for NVIDIA and AMD, and keep all they work on in registers."""
    found = compiled(cache, target, group)
    assert not [one for one in found if one["spills"] > SPILLED]


@pytest.mark.parametrize("group", ["steps", "rows", "pooling"])
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
def test_arithmetic_is_ieee(cache: Path, target: str, group: str) -> None:
    """Promise: no approximate or fused instruction where bits must be the host's, and real divisions and roots."""
    found = compiled(cache, target, group)
    assert not [one for one in found if one["inexact"]]
    if group == "steps":
        for one in found:
            divides = "sgd" not in one["kernel"]
            assert (one["divisions"] > 0) == divides and (one["roots"] > 0) == divides


def test_the_check_finds_inexact_instructions(cache: Path) -> None:
    """The test above is able to fail: attention has approximate exponentials and fused products."""
    found = {one["kernel"]: one["inexact"] for one in compiled(cache, "cuda:80", "attention")}
    assert any("ex2.approx" in word for word in found["_attend"]) and any("fma" in word for word in found["_attend"])


@pytest.mark.parametrize("group", GROUPS)
def test_lowered_for_ascend(cache: Path, group: str) -> None:
    """Promise: triton-ascend, where that is the installed Triton, lowers every kernel."""
    compiled(cache, "npu:Ascend910B2", group)
