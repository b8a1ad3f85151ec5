"""What the compiler makes of a kernel for a GPU, on a machine that need not have one."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fusecomp.codegen import hopper, hopper_backward
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.descriptors import BYTES
from fusecomp.codegen.frame import Frame
from fusecomp.codegen.interpreter import interpreting
from fusecomp.codegen.source import KernelSource
from fusecomp.codegen.table_ranges import WARPS
from fusecomp.errors import KernelError
from fusecomp.planning.tile import TilePlan

POINTERS = {
    "bool": "*i1", "uint8": "*u8", "int8": "*i8", "int16": "*i16", "int32": "*i32", "int64": "*i64",
    "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64",
    "float8_e4m3fn": "*fp8e4nv", "float8_e5m2": "*fp8e5",
}  # fmt: skip
SCRATCH = {"counter": "int32", "tiles": "int32", "ends": "int64", "states": "int8"}
"""What kernels hand each other; the rest of it is float32."""
Arch = int | str


@dataclass(frozen=True)
class CompiledInfo:
    """One kernel of a generated file, compiled."""

    ptx: str
    """Assembly: PTX, or AMD's for a "gfx..." architecture."""
    shared: int
    """Shared memory of one program, B."""
    registers: int | None
    """32-bit registers of one thread; None where the tool that reads them is missing."""
    spills: int | None
    """Bytes of one thread's stack, which is where registers are spilled to; None as above."""
    seconds: float


def cross_compile(source: KernelSource, arch: Arch, kernel: str = "attention") -> CompiledInfo:
    """`kernel` of the file for compute capability `arch` (80, 90, 100), or for an AMD "gfx942".

    Compiled as for contiguous operands at aligned addresses, with lengths unknown."""
    if interpreting():
        return _elsewhere(source, arch, kernel)
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    with tempfile.TemporaryDirectory() as folder:
        function = getattr(_module(source, Path(folder)), kernel)
        plan = source.plan_of(kernel)
        signature, constants, attributes = _signature(source, plan, function.arg_names)
        table = kernel.endswith(("_ranges", "_ends"))
        options = {"num_warps": WARPS if table else plan.warps, "num_stages": Frame(source.region, plan).stages}
        most = hopper.registers(plan)[0] if plan.consumers else plan.registers
        if most and not table and (kernel == "attention" or plan.consumers) and target.backend == "cuda":
            options["maxnreg"] = most
        if plan.consumers and not table:
            signature = _described(source, signature, kernel)
        begin = time.perf_counter()
        try:
            ast = _language(function)(function, signature, constants, attributes)
            made = triton.compile(ast, target=target, options=options)
        except Exception as error:
            raise KernelError(f"{source.name} does not compile for {arch}: {error}") from error
        seconds = time.perf_counter() - begin
        registers, spills = _resources(made.asm.get("cubin"), Path(folder))
    ptx = made.asm.get("ptx") or made.asm.get("amdgcn", "")
    return CompiledInfo(str(ptx), int(made.metadata.shared), registers, spills, seconds)


def _language(function: Any) -> Any:
    """What reads a kernel: Gluon's front end or Triton's."""
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _module(source: KernelSource, folder: Path) -> ModuleType:
    path = folder / f"{source.name}.py"
    path.write_text(source.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(source.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _signature(
    source: KernelSource, plan: TilePlan, params: list[str]
) -> tuple[dict[str, str], dict[tuple[int], int], dict[Any, Any]]:
    """(types, constants, alignments): innermost strides are 1, pointers and other strides multiples of 16."""
    region = source.region
    dtypes = {**SCRATCH, "out": region.out_dtype, **{o.name: o.dtype for o in region.operands}}
    known = {f"{o.name}_stride_{len(o.shape) - 1}": 1 for o in region.operands}
    known |= {f"out_stride_{region.out_order[-1]}": 1, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n}
    known |= {"TILES": 32, "WHOLE": 1}  # of a table of tiles, and of keys that end with one
    types: dict[str, str] = {}
    for p in params:  # a gradient is like what it is the gradient of
        pointer = POINTERS[dtypes.get(p.removesuffix("_ptr").removeprefix("grad_"), "float32")]
        fixed = "constexpr" if p.removeprefix("grad_") in known else "i32"
        types[p] = pointer if p.endswith("_ptr") else fixed
    constants = {(i,): known[p.removeprefix("grad_")] for i, p in enumerate(params) if types[p] == "constexpr"}
    aligned = [i for i, p in enumerate(params) if p.endswith("_ptr") or ("_stride_" in p and (i,) not in constants)]
    return types, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}


def _described(source: KernelSource, types: dict[str, str], kernel: str) -> dict[str, str]:
    """The types with those of the descriptors."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    dtypes = {o.name: o.dtype for o in source.region.operands}
    for name, block in _blocks(source, kernel).items():
        dtype = "float32" if name == "row" else dtypes.get(name, source.region.out_dtype)
        bits, held = 8 * BYTES[dtype], "u8" if dtype == "bool" else POINTERS[dtype].removeprefix("*")
        width = 0 if name == "row" else min(128, block[-1] * BYTES[dtype])
        layout = NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=len(block))
        if f"{name}_desc" in types:
            types[f"{name}_desc"] = f"tensordesc<{held}{block},{layout!r}>"
    return types


def _blocks(source: KernelSource, kernel: str) -> dict[str, list[int]]:
    plan = source.plan_of(kernel)
    if kernel == "attention":
        return hopper.blocks(Frame(source.region, plan))
    return hopper_backward.blocks(GradientFrame(source.region, plan), kernel)


def _resources(cubin: bytes | None, folder: Path) -> tuple[int | None, int | None]:
    """(registers, stack bytes) of one thread, as the binary that Triton ships reads them from a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if cubin is None or not tool.is_file():
        return None, None
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    shown = subprocess.run([str(tool), "--dump-resource-usage", str(path)], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _elsewhere(source: KernelSource, arch: Arch, kernel: str) -> CompiledInfo:
    """The same in a process of its own: Triton decides at import whether it interprets or compiles."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fusecomp.codegen.compiled"]
    done = subprocess.run(command, input=pickle.dumps((source, arch, kernel)), capture_output=True, env=env)
    if done.returncode:
        raise KernelError(done.stderr.decode().strip().splitlines()[-1])
    made: CompiledInfo = pickle.loads(done.stdout)
    return made


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(cross_compile(*pickle.load(sys.stdin.buffer))))
