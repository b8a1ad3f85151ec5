"""Generated backward kernels beside autograd of their regions' dense meaning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernels import TOLERANCE, Interpreter, poisoned, tiles
from test_codegen import normal
from torch import Tensor

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.backward_exact import Fixed
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_launcher import learned
from fusecomp.codegen.emit import emit
from fusecomp.codegen.logsumexp import saved
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import BackwardPlan

SIZES = {"B": 2, "H": 3, "M": 23, "N": 37}


def qkv(
    d: int, dv: int = 0, m: int = 23, n: int = 37, heads: int = 3, kv: int = 0, dtype: str = "float32"
) -> list[Tensor]:
    shapes = [(2, heads, m, d), (2, kv or heads, n, d), (2, kv or heads, n, dv or d)]
    return [normal(*shape, dtype=getattr(torch, dtype)) for shape in shapes]


def small(region: AttentionRegion, block_m: int = 16, block_n: int = 32) -> BackwardPlan:
    return BackwardPlan(tiles(region, block_m, block_n), tiles(region, block_m, block_n))


def agree(
    interpreter: Interpreter,
    region: AttentionRegion,
    args: list[Tensor] | tuple[Tensor, ...],
    sizes: dict[str, int],
    plan: BackwardPlan | None = None,
    wanted: tuple[str, ...] | None = None,
    learn: Sequence[str] = (),
    fixed: Fixed = (),
    tolerance: float = 0.0,
) -> None:
    """Hold dQ, dK, dV and the gradients of what else learns against autograd of the dense meaning, in float64."""
    names = learned(GradientFrame(region, tiles(region), learned=frozenset(learn)))
    asked = names if wanted is None else wanted
    places = [i for i, o in enumerate(region.operands) if o.name in asked]
    leaves = [x.detach().clone().requires_grad_(i in places) for i, x in enumerate(args)]
    out = evaluate(region, leaves, sizes)
    grad_out = normal(*out.shape, dtype=getattr(torch, region.out_dtype))
    expected = torch.autograd.grad(out, [leaves[i] for i in places], grad_out.double())

    lengths = [sizes[name] for name in region.sizes]
    batch = [sizes[str(v.size)] if str(v.size) in sizes else int(str(v.size)) for v in (*region.batch, region.q_idx)]
    lse = torch.full([*batch, *saved(region)], 123.0)
    held = torch.empty(out.shape, dtype=grad_out.dtype)
    inputs = [poisoned(x) for x in args]
    got, *_, lse = interpreter.launch(emit(region, tiles(region), saves_lse=True), held, inputs, lengths, lse)

    grads = [torch.full_like(x, float("nan")) if i in places else None for i, x in enumerate(args)]
    source = emit_backward(region, plan or small(region), frozenset(learn), fixed)
    found, *_ = interpreter.launch(source, grads, got, poisoned(grad_out), lse, inputs, lengths)
    dtypes = (region.out_dtype, region.pv_dtype, *(p.dtype for p in region.products))
    tolerance = tolerance or 3 * max(TOLERANCE[t] for t in dtypes)
    for place, want in zip(places, expected, strict=True):
        atol = tolerance * max(1.0, want.abs().max().item())
        torch.testing.assert_close(found[place].double(), want.double(), rtol=tolerance, atol=atol)


def inputs_of(region: AttentionRegion, sizes: dict[str, int]) -> list[Tensor]:
    made = []
    for o in region.operands:
        shape = [sizes.get(str(e), 0) or int(str(e)) for e in o.shape]
        made.append(normal(*shape) > -0.5 if o.dtype == "bool" else normal(*shape, dtype=getattr(torch, o.dtype)))
    return made
