"""Training steps of attention on a Hopper GPU: its own kernels, the portable ones, and cuDNN.

    python examples/bench/hopper_backward.py [OUT.json] [--only "causal D64,full D64"]

Generated files are launched as they are, from CUDA graphs, so that the host takes no part. Gradients are compared with
float64 first, those of the first head. Of a causal mask half the scores count; a step has seven products.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from options import options
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusecomp.bench.inputs import relative
from fusecomp.bench.record import machine
from fusecomp.bench.timing import PROTOCOLS, launch, times
from fusecomp.codegen import hopper, hopper_backward
from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.emit import emit
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Score, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product
from fusecomp.planning.backward import backward_plan
from fusecomp.planning.device import current
from fusecomp.planning.plan import plan
from fusecomp.running.cache import directory
from fusecomp.running.loader import load

NAMES = ("hopper", "atomic", "portable")
"""The kernels for Hopper, those that add to dQ in any order, and the portable ones."""
CLOSE = 6e-3
"""Relative error up to which gradients in bfloat16 are right."""
Step = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    name: str
    d: int
    causal: bool = True
    cap: float | None = None
    b: int = 4
    h: int = 16
    group: int = 1
    n: int = 4096
    portable: bool = False
    """Whether the portable kernels are timed beside it."""

    @property
    def product(self) -> float:
        """FLOP of one product."""
        return 2 * self.b * self.h * self.n**2 * self.d * (0.5 if self.causal else 1)


CASES = [
    Case("causal D128", 128, portable=True), Case("causal D64", 64, portable=True), Case("full D128", 128, False),
    Case("full D64", 64, False), Case("soft cap D64", 64, cap=30.0), Case("soft cap D128", 128, cap=30.0),
    Case("causal D128 N16384", 128, b=1, n=16384), Case("causal D64 N1024", 64, n=1024, portable=True),
    Case("causal D128 N1024", 128, n=1024, portable=True), Case("causal D128 H32/8", 128, b=2, h=32, group=4),
    *(Case(f"causal D{d} B1 N{n}", d, b=1, n=n, portable=True) for d, n in ((64, 2048), (128, 1024), (128, 2048))),
    Case("causal D128 B8 N512", 128, b=8, n=512, portable=True),
]  # fmt: skip


def region(case: Case) -> AttentionRegion:
    """Q [B, H, M, D], K and V [B, H / group, N, D]."""
    sizes = [Size(name) for name in "BHMN"]
    b, h, q_idx, kv_idx = map(Var, ("b", "h", "q_idx", "kv_idx"), sizes)
    d, dv = Var("d", Const(case.d)), Var("dv", Const(case.d))
    heads, head = (apply("floordiv", x, Const(case.group)) if case.group > 1 else x for x in (sizes[1], h))
    shape = (sizes[0], heads, sizes[3], d.size)
    shapes = {"q": (*sizes[:3], d.size), "k": shape, "v": shape}
    operands = tuple(Operand(name, found, "bfloat16") for name, found in shapes.items())
    product = Product(Access("q", (b, h, q_idx, d)), Access("k", (b, head, kv_idx, d)), d, "bfloat16")
    s: Expr = apply("mul", Score(0), Const(1 / math.sqrt(case.d)))
    if case.cap:
        s = apply("mul", apply("tanh", apply("mul", s, Const(1 / case.cap))), Const(case.cap))
    keep = (apply("ge", q_idx, kv_idx),) if case.causal else ()
    value = Access("v", (b, head, kv_idx, dv))
    return AttentionRegion(
        operands, (b, h), q_idx, kv_idx, (product,), value, dv, s, keep, out_axes=("b", "h", "q_idx", "dv"),
        out_order=(0, 1, 2, 3), pv_dtype="bfloat16", out_dtype="bfloat16",
    )  # fmt: skip


def generated(case: Case, args: list[Tensor], up: Tensor, by: str) -> tuple[Step, Step, list[Tensor]]:
    """(forward, backward, gradients)."""
    meaning, sizes = region(case), {"B": case.b, "H": case.h, "M": case.n, "N": case.n}
    tiles = plan(meaning, sizes)
    plans = backward_plan(meaning, current(), sizes)
    if by != "portable":
        tiles = hopper.specialised(meaning, tiles)
        plans = hopper_backward.specialised(meaning, tiles, deterministic=by == "hopper")
    forward = load(emit(meaning, tiles, saves_lse=True), directory("kernels")).launch
    backward = load(emit_backward(meaning, plans), directory("kernels")).launch
    out, lse = torch.empty_like(args[0]), torch.empty(args[0].shape[:3], device="cuda")
    grads, order = [torch.full_like(x, math.nan) for x in args], [sizes[name] for name in meaning.sizes]
    return (
        lambda: forward(out, args, order, lse),
        lambda: backward(grads, out, up, lse, args, order),
        grads,
    )


def cudnn(case: Case, args: list[Tensor], up: Tensor) -> tuple[Step, Step]:
    """(forward, the whole step)."""
    leaves = [x.detach().requires_grad_() for x in args]

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=case.causal)

    return forward, lambda: torch.autograd.grad(forward(), leaves, up)


def exact(case: Case, args: list[Tensor], up: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the first key head and of the query heads that read it, in float64."""
    heads = [x[:1, :n].double().requires_grad_() for x, n in zip(args, (case.group, 1, 1), strict=True)]
    s = heads[0] @ heads[1].mT / math.sqrt(case.d)
    s = case.cap * torch.tanh(s / case.cap) if case.cap else s
    s = s.masked_fill(~torch.ones_like(s[0, 0], dtype=torch.bool).tril(), -math.inf) if case.causal else s
    return torch.autograd.grad(s.softmax(-1) @ heads[2], heads, up[:1, : case.group].double())


def measure(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = [(case.b, heads, case.n, case.d) for heads in (case.h, case.h // case.group, case.h // case.group)]
    args = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    up, steps, off = torch.randn_like(args[0]), {}, {}
    right = exact(case, args, up)
    for name in NAMES if case.portable else NAMES[:2]:
        forward, backward, grads = generated(case, args, up, name)
        forward(), backward()
        off[name] = max(float(relative(g[:1, : e.shape[1]], e)) for g, e in zip(grads, right, strict=True))
        if off[name] <= CLOSE:
            steps |= {f"{name} forward": forward, f"{name} backward": backward}
            steps[name] = lambda forward=forward, backward=backward: (forward(), backward())
    ms = timed(steps)
    print(case.name, ms, flush=True)
    if not case.cap and case.group == 1:
        forward, step = cudnn(case, args, up)
        ms |= timed({"cudnn forward": forward, "cudnn": step})
    rates = {name: round(7 * case.product / ms[name] / 1e9) for name in (*NAMES, "cudnn") if name in ms}
    print(case.name, rates, ms, {name: f"{x:.1e}" for name, x in off.items()}, flush=True)
    return {"case": case.name, "shape": shapes[:2], "tflops": rates, "ms": ms, "error": off}


def timed(steps: dict[str, Step]) -> dict[str, float]:
    """ms of each, replayed."""
    launches = {name: launch([go], "graph") for name, go in steps.items()}
    found = times(launches, PROTOCOLS["graph"], torch.device("cuda"))
    return {name: round(t.median, 4) for name, t in found.items()}


def main() -> None:
    chosen = options(__doc__)
    if chosen is None:
        return
    about = machine() | {"command": "python examples/bench/hopper_backward.py", "protocol": "CUDA graphs, both orders"}
    rows = []
    for case in CASES:
        if not chosen.only or case.name in chosen.only.split(","):
            rows.append(measure(case))
            if chosen.out:
                Path(chosen.out).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
