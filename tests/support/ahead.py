"""Compiles Triton kernels ahead of time, with no device: `python ahead.py cuda:80 steps` prints a line of JSON for each.

Launchers are called with tensors of the host.  Instead of running, each kernel is compiled for the target with the types,
sizes and options that its launcher gave it.  Targets: cuda:80, cuda:90, hip:gfx942, and with triton-ascend instead of
Triton npu:Ascend910B2, which is lowered as far as that goes without its vendor's compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops import attention_triton, pooling_triton, row_steps_triton, rows_triton
from nestpipe.ops.event_times import EventTimes

TYPES = {
    torch.bool: "*i1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: its signature, and what of it is known when it is compiled."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    kernel: str
    floats: list[str]
    """Types of the tensors."""
    seconds: float
    registers: int = 0
    spills: int = 0
    """Bytes on NVIDIA, registers on AMD."""
    inexact: tuple[str, ...] = ()
    """PTX instructions that do not round as IEEE 754 says, or flush small numbers to zero, or fuse two roundings."""
    divisions: int = 0
    roots: int = 0
    """IEEE divisions and roots in PTX."""


def launches(calls: Callable[[], None]) -> list[Launch]:
    """The kernels that `calls` would run."""
    found: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        for param, value in zip(self.params, args, strict=True):
            if param.is_constexpr or value is None:
                types[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[param.name] = TYPES[value.dtype]
            else:
                types[param.name] = param.annotation_type or ("fp32" if isinstance(value, float) else "i32")
        found.append(Launch(self, types, constants, options))

    with mock.patch.object(JITFunction, "run", run):
        calls()
    return found


def rows(dtype: torch.dtype) -> None:
    """Every kernel over rows."""
    for dim in (16, 50, 128):
        values, index = torch.zeros(64, dim, dtype=dtype), torch.zeros(64, dtype=torch.int32)
        rows_triton.gather(values, index, values)
        rows_triton.copy_rows(values, index, values, index)
        rows_triton.add_sorted_rows(values, index.long(), index, values)
        rows_triton.sum_of_squares(values)


def steps(dtype: torch.dtype) -> None:
    """Every optimizer."""
    for dim in (16, 50, 128):
        values, state = torch.zeros(64, dim, dtype=dtype), torch.zeros(64, 2 * dim + 1, dtype=dtype)
        row_steps_triton.sgd(values, values, 0.1)
        row_steps_triton.rowwise_adagrad(values, state, values, 0.1, 1e-8)
        row_steps_triton.adagrad(values, state, values, 0.1, 1e-8)
        row_steps_triton.adam(values, state, values, 0.1, 0.1, 0.001, 1e-8)


def pooling(dtype: torch.dtype) -> None:
    """Pooling of 2 lookups in 4 samples, plain and with weights and means."""
    index, starts, columns = torch.zeros(16, dtype=torch.int32), torch.arange(0, 17, 2), torch.tensor([0, 50])
    values, out, weights = (torch.zeros(size, dtype=dtype) for size in ((5, 50), (4, 100), (16,)))
    bags = pooling_triton.bags_of(starts, 16)
    order, by_row = pooling_triton.backward_order(index, bags, 4)
    for factors in ((None, None), (weights, torch.tensor([True, False]))):
        pooling_triton.pool(values, index, starts, *factors, columns, out)
        pooling_triton.pool_backward(out, order, by_row, bags, starts, *factors, columns, values)
    pooling_triton.pool_backward_weights(out, values, index, bags, starts, factors[1], columns, weights)


def attention(dtype: torch.dtype) -> None:
    """Forward and backward over 2 samples: heads of the public HSTU recipe, of several small heads, and of wide ones."""
    events = EventTimes(JaggedTensor(torch.zeros(52, dtype=torch.int64), lengths=torch.tensor([41, 11])))
    for heads, width in ((1, 50), (4, 16), (1, 128)):
        inputs = [
            torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((50, 4 * heads * width), (399,), (129,))
        ]
        attention_triton.gated_attention(*inputs, events, heads, 1 / 200).sum().backward()


GROUPS: dict[str, tuple[Callable[[torch.dtype], None], tuple[torch.dtype, ...]]] = {
    "rows": (rows, (torch.float32, torch.float64)),
    "steps": (steps, (torch.float32, torch.float64)),
    "pooling": (pooling, (torch.float32, torch.float64)),
    "attention": (attention, (torch.float32,)),
}


def compile_group(target: str, group: str) -> list[Compiled]:
    """All kernels of a group, each set of types and sizes once."""
    backend, arch = target.split(":")
    calls, dtypes = GROUPS[group]
    if backend == "npu":
        modules = (attention_triton, pooling_triton, row_steps_triton, rows_triton)
        for module in modules:
            module.wide_type = lambda like: tl.float32  # type: ignore[attr-defined]  # as for a tensor on that device
        return [lower(launch, arch) for launch in launches(lambda: calls(torch.float32))]
    chip = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64)
    return [compile_for(launch, chip) for dtype in dtypes for launch in launches(lambda: calls(dtype))]  # noqa: B023


def compile_for(launch: Launch, target: Any) -> Compiled:
    began = time.perf_counter()
    source = ASTSource(launch.kernel, launch.signature, dict(launch.constants))
    compiled = triton.compile(source, target=target, options=launch.options)
    seconds = time.perf_counter() - began
    if target.backend != "cuda":
        return Compiled(*_facts(launch, seconds), *_of_metadata(compiled.asm["amdgcn"]))
    ptx = compiled.asm["ptx"]
    return Compiled(
        *_facts(launch, seconds),
        *_of_ptxas(ptx, launch.options["enable_fp_fusion"]),
        tuple(re.findall(r"\b\w+(?:\.\w+)*\.(?:approx|full|ftz)\S*|\bfma\S*", ptx)),
        len(re.findall(r"\bdiv\.rn\b", ptx)),
        len(re.findall(r"\bsqrt\.rn\b", ptx)),
    )


def _facts(launch: Launch, seconds: float) -> tuple[str, list[str], float]:
    floats = {kind for kind in launch.signature.values() if kind.startswith("*fp")}
    return launch.kernel.__name__, sorted(floats), round(seconds, 2)


def _of_ptxas(ptx: str, fused: bool) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, by ptxas with the options that Triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"\.target sm_(\d+)(\w*)", ptx)
    assert arch
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", "--regAllocOptLevel=2", f"--gpu-name=sm_{arch[1]}{arch[2]}", "-o", f"{folder}/kernel.cubin"]
        command = [get_ptxas(int(arch[1])).path, *options, *([] if fused else ["--fmad=false"]), str(source)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    assert used, said
    return int(used[1]), sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def _of_metadata(amdgcn: str) -> tuple[int, int]:
    """Vector registers of a thread and registers spilled, by the compiler's own notes."""
    used = re.search(r"\.vgpr_count:\s+(\d+)", amdgcn)
    assert used
    return int(used[1]), sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", amdgcn)))


def lower(launch: Launch, arch: str) -> Compiled:
    """Through triton-ascend's own stages, up to the one that needs the vendor's compiler."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    began = time.perf_counter()
    target = GPUTarget("npu", arch, 0)
    backend = make_backend(target)
    signature = {name: kind for name, kind in launch.signature.items() if kind != "constexpr"}
    source = ASTSource(launch.kernel, signature, dict(launch.constants))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(dict(launch.options))
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, {"target": target, "hash": "none", **options.__dict__})
    return Compiled(*_facts(launch, time.perf_counter() - began))


if __name__ == "__main__":
    for one in compile_group(*sys.argv[1:]):
        print(json.dumps(asdict(one)), flush=True)
