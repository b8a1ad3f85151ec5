"""Generated host functions call their backward kernels as they are declared, on a machine without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from golden_kernels import BACKWARD
from test_backward_codegen import REGIONS
from test_hopper_backward import HAS, made, written_in
from torch import Tensor

from fusecomp.codegen.backward import BackwardSource, emit_backward
from fusecomp.codegen.compiled import _module
from fusecomp.codegen.logsumexp import saved
from fusecomp.ir.algebra import substitute
from fusecomp.ir.expr import Const, Expr, Size
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import backward_plan
from fusecomp.running.launching import launched

LENGTHS = {"B": 2, "H": 24, "G": 2, "M": 23, "N": 37}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def number(e: Expr) -> int:
    found = substitute(e, {Size(name): Const(n) for name, n in LENGTHS.items()})
    assert isinstance(found, Const)
    return int(found.value)


class Called:
    """Stands for a kernel: kernel[grid](...) is bound to its parameters."""

    def __init__(self, kernel: Any, tensors: dict[str, Tensor]) -> None:
        self.signature, self.tensors, self.count = inspect.signature(kernel.fn), tensors, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return self.call

    def call(self, *args: Any, **options: Any) -> None:
        given = {name: x for name, x in options.items() if name not in OPTIONS}
        self.count += 1
        for name, x in self.signature.bind(*args, **given).arguments.items():
            if name.endswith("_ptr"):
                assert isinstance(x, Tensor), name
            elif name.endswith("_desc"):
                assert isinstance(x.base, Tensor), name
            else:
                assert isinstance(x, int), name
                tensor, _, axis = name.partition("_stride_")
                assert tensor not in self.tensors or x == self.tensors[tensor].stride(int(axis)), name


def run(source: BackwardSource, folder: Path, learned: frozenset[str] = frozenset()) -> dict[str, int]:
    """How often each kernel is called where everything that learns wants its gradient."""
    region, module = source.region, _module(source, folder)
    tensors = [torch.zeros([number(n) for n in o.shape], dtype=getattr(torch, o.dtype)) for o in region.operands]
    named = dict(zip([o.name for o in region.operands], tensors, strict=True))
    axes = {v.name: number(v.size) for v in (*region.batch, region.q_idx, region.dv)}
    out = torch.zeros([axes[name] for name in region.out_axes], dtype=getattr(torch, region.out_dtype))
    rows = [number(v.size) for v in (*region.batch, region.q_idx)]
    lse, more = torch.zeros([*rows, *saved(region)]), [torch.zeros(rows)] if region.lse else []
    wanted = {a.operand for p in region.products for a in (p.q, p.k)} | {region.v.operand} | learned
    grads = [torch.zeros_like(x) if name in wanted else None for name, x in named.items()]
    kernels = replaced(module, source.text, {**named, "out": out, "grad_out": out})
    module.launch(grads, out, torch.zeros_like(out), lse, *more, tensors, [LENGTHS[s] for s in region.sizes])
    return {name: kernel.count for name, kernel in kernels.items()}


def replaced(module: ModuleType, text: str, tensors: dict[str, Tensor]) -> dict[str, Called]:
    kernels = {name: Called(getattr(module, name), tensors) for name in launched(text)}
    for name, kernel in kernels.items():
        setattr(module, name, kernel)
    return kernels


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_portable_kernels_are_called_as_declared(region: AttentionRegion, tmp_path: Path) -> None:
    called = run(emit_backward(region, backward_plan(region)), tmp_path)
    assert called == dict.fromkeys(("row_products", "query_gradient", "key_gradients"), 1)


@pytest.mark.parametrize("name", BACKWARD)
@written_in
def test_kernels_of_what_learns_are_called_as_declared(name: str, tmp_path: Path) -> None:
    region, plan, learned = BACKWARD[name]
    assert set(run(emit_backward(region, plan, learned), tmp_path, learned).values()) == {1}


@written_in
@pytest.mark.parametrize("region", HAS.values(), ids=HAS)
def test_kernels_for_hopper_are_called_as_declared(region: AttentionRegion, tmp_path: Path) -> None:
    called = run(made(region), tmp_path)
    assert called == dict.fromkeys(("row_products", "query_gradient", "key_gradients"), 1)
