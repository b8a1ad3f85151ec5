"""Attention by numbers: the region of a plain workload, to plan for it with no model and no graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from fusecomp.errors import PlanError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product

DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "tf32": "float32", "float": "float32",
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float32",
}  # fmt: skip
"""Names that people use. "tf32" is float32 data with tf32 products."""


@dataclass(frozen=True)
class Workload:
    """O = softmax(S) V with Q [batch, heads, m, d], K [batch, kv_heads, n, d], V [batch, kv_heads, n, dv]."""

    n: int
    d: int = 128
    dtype: str = "bf16"
    causal: bool = False
    heads: int = 16
    batch: int = 1
    kv_heads: int | None = None
    """None: as many as heads."""
    dv: int | None = None
    m: int | None = None
    """Query rows; None: n. With `causal`, the last query sees every key."""
    window: int | None = None
    """A query sees the `window` keys up to its own."""
    softcap: float | None = None
    bias: bool = False
    """Add bias[h, q_idx, kv_idx]."""

    def __post_init__(self) -> None:
        given = {k: getattr(self, k) for k in ("n", "d", "heads", "batch", "kv_heads", "dv", "m", "window")}
        for name, number in given.items():
            if number is not None and number < 1:
                raise PlanError(f"{name} must be at least 1, not {number}")
        if self.dtype not in DTYPES:
            raise PlanError(f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        if self.heads % (self.kv_heads or self.heads):
            raise PlanError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")

    @property
    def sizes(self) -> dict[str, int]:
        return {"B": self.batch, "H": self.heads, "M": self.m or self.n, "N": self.n}

    @property
    def region(self) -> AttentionRegion:
        """The workload as a region whose lengths are B, H, M, N."""
        dtype, dv, group = DTYPES[self.dtype], self.dv or self.d, self.heads // (self.kv_heads or self.heads)
        head = apply("floordiv", H, Const(group))
        d, dv_axis, kv_heads = Var("d", Const(self.d)), Var("dv", Const(dv)), apply("floordiv", H.size, Const(group))
        operands = [
            Operand("q", (B.size, H.size, Q_IDX.size, d.size), dtype),
            Operand("k", (B.size, kv_heads, KV_IDX.size, d.size), dtype),
            Operand("v", (B.size, kv_heads, KV_IDX.size, dv_axis.size), dtype),
        ]
        if self.bias:
            operands.append(Operand("bias", (H.size, Q_IDX.size, KV_IDX.size), dtype))
        product = Product(Access("q", (B, H, Q_IDX, d)), Access("k", (B, head, KV_IDX, d)), d, dtype)
        return AttentionRegion(
            operands=tuple(operands), batch=(B, H), q_idx=Q_IDX, kv_idx=KV_IDX, products=(product,),
            v=Access("v", (B, head, KV_IDX, dv_axis)), dv=dv_axis, score=self._score(dtype), keep=self._keep(),
            pv_dtype=dtype, out_dtype=dtype, precision="tf32" if self.dtype == "tf32" else "ieee", origin="workload",
        )  # fmt: skip

    def _score(self, dtype: str) -> Expr:
        """c tanh(s / c) + bias with s = score / sqrt(D)."""
        score: Expr = apply("mul", Score(), Const(1 / sqrt(self.d)))
        if self.softcap:
            capped = Apply("tanh", (apply("div", score, Const(float(self.softcap))),))
            score = apply("mul", capped, Const(float(self.softcap)))
        return apply("add", score, Load("bias", (H, Q_IDX, KV_IDX), dtype)) if self.bias else score

    def _keep(self) -> tuple[Expr, ...]:
        """kv_idx <= q_idx + N - M, and q_idx + N - M - kv_idx < window."""
        row = Q_IDX if self.m in (None, self.n) else apply("sub", apply("add", Q_IDX, Size("N")), Size("M"))
        terms = [apply("le", KV_IDX, row)] if self.causal or self.window else []
        if self.window:
            terms.append(apply("lt", apply("sub", row, KV_IDX), Const(self.window)))
        return tuple(terms)


B, H = Var("b", Size("B")), Var("h", Size("H"))
Q_IDX, KV_IDX = Var("q_idx", Size("M")), Var("kv_idx", Size("N"))
