"""Compiles every Triton kernel ahead of time, with no device: `python ahead.py cuda:80` prints a line of JSON for each.

A launcher is called with tensors of the host.  Instead of running, each kernel is compiled for the target with the types,
sizes and options that the launcher gave it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nestpipe.ops import attention_triton, pooling_triton, row_steps_triton, rows_triton

INTEGERS = {torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}
FLOATS = {torch.float32: "*fp32", torch.float64: "*fp64"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel: its signature, and what of it is known when it is compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclasses.dataclass
class Compiled:
    kernel: str
    floats: str
    seconds: float
    registers: int
    spills: int
    """Bytes on NVIDIA, registers on AMD."""
    approximate: int
    """Instructions that do not round as IEEE 754 says."""
    fused: int
    """Multiplications fused with additions."""
    divisions: int
    roots: int


def launches(calls: Callable[[], None]) -> list[Launch]:
    """The kernels that `calls` would run."""
    found: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        types, constants = {}, {}
        for param, value in zip(self.params, args, strict=True):
            if param.is_constexpr or value is None:
                types[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[param.name] = (INTEGERS | FLOATS)[value.dtype]
            else:
                types[param.name] = param.annotation_type or ("fp32" if isinstance(value, float) else "i32")
        found.append(Launch(self, types, constants, options))

    with mock.patch.object(JITFunction, "run", run):
        calls()
    return found


def rows(dtype: torch.dtype, dim: int) -> None:
    """Every kernel over rows, on rows of `dim` values."""
    values, index, order = torch.zeros(64, dim, dtype=dtype), torch.zeros(64, dtype=torch.int32), torch.arange(64)
    rows_triton.gather(values, index, values)
    rows_triton.copy_rows(values, index, values, index)
    rows_triton.add_sorted_rows(values, order, index, values)
    rows_triton.sum_of_squares(values)


def steps(dtype: torch.dtype, dim: int) -> None:
    """Every optimizer."""
    values, state = torch.zeros(64, dim, dtype=dtype), torch.zeros(64, 2 * dim + 1, dtype=dtype)
    row_steps_triton.sgd(values, values, 0.1)
    row_steps_triton.rowwise_adagrad(values, state, values, 0.1, 1e-8)
    row_steps_triton.adagrad(values, state, values, 0.1, 1e-8)
    row_steps_triton.adam(values, state, values, 0.1, 0.1, 0.001, 1e-8)


def pooling(dtype: torch.dtype, dim: int, weighted: bool, averaged: bool) -> None:
    """Pooling of 2 lookups in 4 samples."""
    values, out, columns = torch.zeros(5, dim, dtype=dtype), torch.zeros(4, 2 * dim, dtype=dtype), torch.tensor([0, dim])
    index, starts = torch.zeros(16, dtype=torch.int32), torch.arange(0, 17, 2)
    weights, means = torch.zeros(16, dtype=dtype) if weighted else None, torch.tensor([True, False]) if averaged else None
    bags = pooling_triton.bags_of(starts, 16)
    order, by_row = pooling_triton.backward_order(index, bags, 4)
    pooling_triton.pool(values, index, starts, weights, means, columns, out)
    pooling_triton.pool_backward(out, order, by_row, bags, starts, weights, means, columns, values)
    if weights is not None:
        pooling_triton.pool_backward_weights(out, values, index, bags, starts, means, columns, weights)


def attention(dtype: torch.dtype, heads: int, width: int) -> None:
    """Forward and backward over 2 samples."""
    lengths, bucket = torch.tensor([40, 10]), torch.zeros(2, 40, 40, dtype=torch.int16)
    mixed, by_place, by_time = (
        torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((50, 4 * heads * width), (399,), (129,))
    )
    attention_triton.gated_attention(mixed, by_place, by_time, bucket, lengths, heads, 1 / 200).sum().backward()


def everything() -> list[Launch]:
    """What the engine would run: recipes have dimensions from 16 to 128 and heads 32 to 64 wide."""
    found: list[Launch] = []
    for dtype in FLOATS:
        for dim in (16, 50, 128):
            found += launches(lambda dim=dim, dtype=dtype: rows(dtype, dim))  # type: ignore[misc]
            found += launches(lambda dim=dim, dtype=dtype: steps(dtype, dim))  # type: ignore[misc]
        for weighted in (False, True):
            found += launches(lambda w=weighted, dtype=dtype: pooling(dtype, 50, w, w))  # type: ignore[misc]
    for heads, width in ((1, 50), (2, 32), (1, 64)):
        found += launches(lambda h=heads, w=width: attention(torch.float32, h, w))  # type: ignore[misc]
    return found


def compile_for(launch: Launch, target: Any) -> Compiled:
    began = time.perf_counter()
    constants = {name: value for name, value in launch.constants.items()}
    compiled = triton.compile(
        ASTSource(launch.kernel, launch.signature, constants), target=target, options=launch.options
    )
    seconds = time.perf_counter() - began
    asm = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    registers, spills = (
        _of_ptxas(asm, compiled.metadata) if target.backend == "cuda" else _of_metadata(asm)
    )
    floats = "fp64" if "*fp64" in launch.signature.values() and "*fp32" not in launch.signature.values() else "fp32"
    return Compiled(
        launch.kernel.__name__,
        floats,
        round(seconds, 2),
        registers,
        spills,
        *(
            len(re.findall(pattern, asm))
            for pattern in (r"\.approx|div\.full|\.ftz", r"\bfma\b", r"\bdiv\.rn", r"\bsqrt\.rn")
        ),
    )


def _of_ptxas(ptx: str, metadata: Any) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, by ptxas with the options that Triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        arch = re.search(r"\.target sm_(\d+)(\w*)", ptx)
        assert arch
        fused = [] if metadata.enable_fp_fusion else ["--fmad=false"]
        command = [get_ptxas(int(arch[1])).path, "-v", "--regAllocOptLevel=2", *fused, f"--gpu-name=sm_{arch[1]}{arch[2]}", str(source), "-o", f"{folder}/out"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    assert used, said
    return int(used[1]), sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def _of_metadata(amdgcn: str) -> tuple[int, int]:
    """Vector registers of a thread and registers spilled, by the compiler's own notes."""
    used = re.search(r"\.vgpr_count:\s+(\d+)", amdgcn)
    assert used
    return int(used[1]), sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", amdgcn)))


def results(target: str) -> Iterator[Compiled]:
    from triton.backends.compiler import GPUTarget

    backend, arch = target.split(":")
    chip = GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
    for launch in everything():
        yield compile_for(launch, chip)


if __name__ == "__main__":
    for one in results(sys.argv[1]):
        print(json.dumps(dataclasses.asdict(one)), flush=True)
