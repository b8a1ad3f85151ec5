"""How rows of the variants table are written; also for any test that needs a region without a graph.

Operands are q [*batch, M, D], k [*batch, N, D], v [*batch, N, Dv], then load0, load1 ... in the order of `loads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product

INF = float("inf")
MIN = torch.finfo(torch.float32).min
B, H, G, M, N = map(Size, "BHGMN")
b, h, g = Var("b", B), Var("h", H), Var("g", G)
q_idx, kv_idx = Var("q_idx", M), Var("kv_idx", N)
score = Score(0)


def times(x: Expr, c: float) -> Expr:
    return apply("mul", x, Const(c))


def attention(
    s: Expr = score,
    *keep: Expr,
    loads: Sequence[tuple[Sequence[Expr | int], str]] = (),
    d: int = 16,
    dv: int = 0,
    batch: tuple[Var, ...] = (b, h),
    head: Expr | None = None,
    heads: Expr | None = None,
    dtype: str = "float32",
    **more: Any,
) -> AttentionRegion:
    """A region with q [*batch, M, D], k and v [*batch, N, D or Dv]; `head` of `heads` is what the keys are read at."""
    outer, sizes = batch, [v.size for v in batch]
    kv = (*batch[:-1], head) if head is not None else batch
    kv_sizes = [*sizes[:-1], heads] if heads is not None else sizes
    x, y = Var("d", Const(d)), Var("dv", Const(dv or d))
    operands = [
        Operand("q", (*sizes, M, x.size), dtype),
        Operand("k", (*kv_sizes, N, x.size), dtype),
        Operand("v", (*kv_sizes, N, y.size), dtype),
    ]
    for i, (shape, kind) in enumerate(loads):
        operands.append(Operand(f"load{i}", tuple(Const(n) if isinstance(n, int) else n for n in shape), kind))
    product = Product(Access("q", (*outer, q_idx, x)), Access("k", (*kv, kv_idx, x)), x, dtype)
    axes = (*(v.name for v in outer), "q_idx", "dv")
    settings = {"out_axes": axes, "out_order": tuple(range(len(axes))), "pv_dtype": dtype, "out_dtype": dtype, **more}
    value = Access("v", (*kv, kv_idx, y))
    return AttentionRegion(tuple(operands), batch, q_idx, kv_idx, (product,), value, y, s, keep, **settings)


def load(i: int, *index: Expr | int, dtype: str = "float32") -> Load:
    return Load(f"load{i}", tuple(Const(x) if isinstance(x, int) else x for x in index), dtype)


def grouped(size: int, heads: int = 2) -> dict[str, Expr]:
    """Keyword arguments for `size` query heads per key head."""
    return {"head": apply("floordiv", h, Const(size)), "heads": Const(heads)}


def dropout(region: AttentionRegion, p: float = 0.3) -> AttentionRegion:
    """The region with its weights dropped by the words of one more operand, `seed`."""
    batch: Expr = Const(0)
    for v in region.batch:
        batch = apply("add", apply("mul", batch, v.size), v)
    word = Apply("random", (Load("seed", (), "int64"), batch, q_idx, kv_idx))
    kept = apply("where", apply("ge", word, Const(round(p * 2**32))), Const(1 / (1 - p)), Const(0.0))
    operands = (*region.operands, Operand("seed", (), "int64"))
    return replace(region, operands=operands, weight=apply("mul", region.weight, kept))


scaled_score = times(score, 0.25)
"""At D = 16."""
causal = apply("ge", q_idx, kv_idx)
age = apply("sub", q_idx, kv_idx)


def blhd() -> AttentionRegion:
    """Scaled attention with operands and output in [B, L, H, D]."""
    r, p = attention(scaled_score), (0, 2, 1, 3)
    flip = [replace(o, shape=tuple(o.shape[i] for i in p)) for o in r.operands]
    q, k, v = (replace(a, index=tuple(a.index[i] for i in p)) for a in (r.products[0].q, r.products[0].k, r.v))
    product = replace(r.products[0], q=q, k=k)
    return replace(r, operands=tuple(flip), products=(product,), v=v, out_axes=("b", "q_idx", "h", "dv"))


def filled(fill: float, keep: Expr) -> dict[str, Any]:
    return {"fill": fill, "filled_score": apply("where", keep, scaled_score, Const(fill))}


@dataclass(frozen=True)
class Variant:
    """One spelling of attention, small seeded inputs for it, and what it means."""

    name: str
    fn: Callable[..., Tensor]
    make_args: Callable[..., tuple[Tensor, ...]]
    """make_args(dtype=None): the same values each time; `dtype` replaces that of every float."""
    region: AttentionRegion
    tolerance: float = 1e-10
    """Largest error of the dense region against `fn`, both in float64; wider where `fn` names a narrower dtype."""

    def sizes(self, args: Sequence[Tensor]) -> dict[str, int]:
        """The region's lengths, read off the arguments."""
        pairs = [p for o, x in zip(self.region.operands, args, strict=True) for p in zip(o.shape, x.shape, strict=True)]
        return {e.name: n for e, n in pairs if isinstance(e, Size)}


class Draw:
    """A seeded source: `draw(*shape)` is a normal tensor."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def qkv(self, m: int = 37, n: int = 53, heads: int = 3, kv: int = 0, d: int = 16, dv: int = 0) -> list[Tensor]:
        """q [2, heads, m, d], k [2, kv, n, d], v [2, kv, n, dv]; kv = heads and dv = d unless given."""
        return [self(2, heads, m, d), self(2, kv or heads, n, d), self(2, kv or heads, n, dv or d)]


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T / sqrt(D), [..., M, N]."""
    return (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5


def places(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Query positions [M, 1] and key positions [1, N]."""
    i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
    return i[:, None], j[None, :]


def some_keys(draw: Draw, dead: int | None = None) -> Tensor:
    """A random [37, 53] mask in which every row sees key 5, but for row `dead`, which sees none."""
    keep = draw(37, 53) > 0.3
    keep[:, 5] = True
    if dead is not None:
        keep[dead] = False
    return keep


def row(
    fn: Callable[..., Tensor], args: Callable[[Draw], Sequence[Tensor]], region: AttentionRegion, tolerance: float
) -> Variant:
    """`fn` with the tensors that `args(draw)` makes, in the dtypes of the region's operands."""

    def make_args(dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        made = args(Draw())
        own = [x.to(getattr(torch, o.dtype)) for x, o in zip(made, region.operands, strict=True)]
        return tuple(x.to(dtype) if dtype and x.dtype.is_floating_point else x for x in own)

    return Variant(fn.__name__, fn, make_args, region, tolerance)
