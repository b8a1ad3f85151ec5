"""Generated kernels run in Triton's interpreter, in a process of its own: Triton decides at import how it runs.

    with Interpreter() as interpreter:
        out = interpreter.run(emit(region, plan), out, tensors, sizes)

Tensors travel whole, with the memory around them, so that a test may poison what a kernel must not read.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fusecomp.codegen.emit import emit
from fusecomp.codegen.source import KernelSource
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion, extent
from fusecomp.planning.chunks import chunks
from fusecomp.planning.tile import TilePlan

TOLERANCE = {"float32": 4e-6, "float16": 3e-3, "bfloat16": 2.5e-2}


def tiles(
    region: AttentionRegion, block_m: int = 32, block_n: int = 32, skeleton: str = "prefill", pack: int = 1
) -> TilePlan:
    """A plan by hand."""
    d = tuple(chunks(extent(p.d)) for p in region.products)
    return TilePlan(skeleton, block_m, block_n, d, chunks(extent(region.dv)), warps=4, stages=2, pack=pack)


def _send(message: Any, stream: IO[bytes]) -> None:
    """As torch.save writes it, which knows float8 tensors too."""
    held = io.BytesIO()
    torch.save(message, held)
    pickle.dump(held.getvalue(), stream)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    return torch.load(io.BytesIO(pickle.load(stream)), weights_only=False)


class Interpreter:
    """A process that interprets kernels, one request after another."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__))]
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def run(self, source: KernelSource, out: Tensor, tensors: list[Tensor], sizes: list[int]) -> Tensor:
        """`out` after the launch, with the memory around it."""
        found: Tensor = self.launch(source, out, tensors, sizes)[0]
        return found

    def launch(self, source: KernelSource, *arguments: Any) -> Any:
        """The arguments of `launch` after it, with what it wrote."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        _send((source, arguments), self.process.stdin)
        answer = _receive(self.process.stdout)
        if isinstance(answer, str):
            raise AssertionError(answer)
        return answer

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


def poisoned(x: Tensor, step: int = 1) -> Tensor:
    """x in the middle of memory that holds NaN, or indices far out of range; columns begin at multiples of `step`."""
    room = [n + 3 for n in x.shape[:-1]] + [(n // step + 3) * step for n in x.shape[-1:]]
    begin = [1 for _ in x.shape[:-1]] + [step for _ in x.shape[-1:]]
    around = torch.empty(room, dtype=x.dtype)
    if x.dtype.is_floating_point:
        around.fill_(float("nan"))
    else:
        around.fill_(x.dtype == torch.bool or min(1_000_000_007, torch.iinfo(x.dtype).max))
    inside = around[tuple(slice(first, first + n) for first, n in zip(begin, x.shape, strict=True))]
    return inside.copy_(x)


def agree(
    interpreter: Interpreter,
    region: AttentionRegion,
    args: list[Tensor] | tuple[Tensor, ...],
    sizes: dict[str, int],
    plan: TilePlan | None = None,
    out: Tensor | None = None,
    tolerance: float = 0.0,
) -> KernelSource:
    """Hold the kernel against the dense meaning of its region; what lies around its output stays as it was."""
    expected = evaluate(region, args, sizes)
    source = emit(region, plan or tiles(region))
    if out is None:
        whole = torch.full([n + 2 for n in expected.shape], 123.0, dtype=getattr(torch, region.out_dtype))
        out = whole[tuple(slice(1, n + 1) for n in expected.shape)]
    step = 16 if source.plan.loads == "descriptor" else 1
    got = interpreter.run(source, out, [poisoned(x, step) for x in args], [sizes[name] for name in region.sizes])
    dtypes = (region.out_dtype, region.pv_dtype, *(p.dtype for p in region.products))
    tolerance = tolerance or max(TOLERANCE[t] for t in dtypes)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    whole = torch.empty(0, dtype=got.dtype).set_(got.untyped_storage())
    assert (whole == 123.0).sum() >= whole.numel() - got.numel()
    return source


def _serve() -> None:
    from fusecomp.codegen.backward import BackwardSource
    from fusecomp.running.loader import load
    from fusecomp.running.visits import launcher

    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                source, arguments = _receive(sys.stdin.buffer)
            except EOFError:
                return
            answer: Any = arguments
            try:
                module = load(source, Path(folder))
                launch = module.launch if isinstance(source, BackwardSource) else launcher(module, source)
                launch(*arguments)
            except Exception as error:  # noqa: BLE001 - the test reports it
                answer = f"{type(error).__name__}: {error}"
            _send(answer, sys.stdout.buffer)


if __name__ == "__main__":
    import numpy as np

    np.seterr(all="ignore")
    _serve()
