"""Attention by numbers: the region of a plain workload, to plan for it with no model and no graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from numbers import Integral

from fusecomp.errors import PlanError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Score, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product
from fusecomp.planning import units

DTYPES = {name: dtype for name, dtype in units.DTYPES.items() if dtype in ("bfloat16", "float16", "float32")}
"""What Q, K and V may be, under the names that people use. "tf32" is float32 data with tf32 products."""
LONGEST = 1 << 24
"""Keys or queries, at most: a plan looks at every query tile."""


@dataclass(frozen=True)
class Workload:
    """O = softmax(S) V with Q [batch, heads, m, d], K [batch, kv_heads, n, d], V [batch, kv_heads, n, dv].

    With `page_size`, K and V lie in pages [pages, page_size, kv_heads, d or dv] that a block table finds, [batch, n /
    page_size], and each request sees its keys up to its own length. PlanError for sizes that make no attention.
    """

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
    """A query sees the `window` keys up to its own; unless `causal`, as many after it."""
    softcap: float | None = None
    bias: bool = False
    """Add bias[h, q_idx, kv_idx]."""
    page_size: int | None = None
    """Tokens of a page of a paged cache; None: K and V lie as they are."""

    def __post_init__(self) -> None:
        counted = ("n", "d", "heads", "batch", "kv_heads", "dv", "m", "window", "page_size")
        for name in counted:
            number = getattr(self, name)
            if number is None:
                continue
            if not isinstance(number, Integral):
                raise PlanError(f"{name} must be a whole number, not {number!r}")
            if not 1 <= int(number) <= LONGEST:
                limit = "least 1" if int(number) < 1 else f"most {LONGEST}"
                raise PlanError(f"{name} must be at {limit}, not {number}")
        if self.softcap is not None and not (0 < self.softcap < inf):
            raise PlanError(f"softcap must be a positive number, not {self.softcap}")
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
        outer, token = self._held(kv_heads)
        operands = [
            Operand("q", (B.size, H.size, Q_IDX.size, d.size), dtype),
            Operand("k", (*outer, d.size), dtype),
            Operand("v", (*outer, dv_axis.size), dtype),
        ]
        if self.bias:
            operands.append(Operand("bias", (H.size, Q_IDX.size, KV_IDX.size), dtype))
        if self.page_size:
            pages = apply("floordiv", KV_IDX.size, Const(self.page_size))
            operands += [Operand("block_table", (B.size, pages), "int32"), Operand("seq_lens", (B.size,), "int32")]
        product = Product(Access("q", (B, H, Q_IDX, d)), Access("k", (*token(head), d)), d, dtype)
        return AttentionRegion(
            operands=tuple(operands), batch=(B, H), q_idx=Q_IDX, kv_idx=KV_IDX, products=(product,),
            v=Access("v", (*token(head), dv_axis)), dv=dv_axis, score=self._score(dtype), keep=self._keep(),
            pv_dtype=dtype, out_dtype=dtype, precision="tf32" if self.dtype == "tf32" else "ieee", origin="workload",
        )  # fmt: skip

    def _held(self, kv_heads: Expr) -> tuple[tuple[Expr, ...], Callable[[Expr], tuple[Expr, ...]]]:
        """(the axes of K and V but the last, where the key of a head stands on them)."""
        if not self.page_size:
            return (B.size, kv_heads, KV_IDX.size), lambda head: (B, head, KV_IDX)
        page = Const(self.page_size)
        looked_up = Load("block_table", (B, apply("floordiv", KV_IDX, page)), "int32")
        return (Size("pages"), page, kv_heads), lambda head: (looked_up, apply("mod", KV_IDX, page), head)

    def _score(self, dtype: str) -> Expr:
        """c tanh(s / c) + bias with s = score / sqrt(D)."""
        score: Expr = apply("mul", Score(), Const(1 / sqrt(self.d)))
        if self.softcap:
            capped = Apply("tanh", (apply("div", score, Const(float(self.softcap))),))
            score = apply("mul", capped, Const(float(self.softcap)))
        return apply("add", score, Load("bias", (H, Q_IDX, KV_IDX), dtype)) if self.bias else score

    def _keep(self) -> tuple[Expr, ...]:
        """With row = q_idx + N - M: kv_idx <= row if causal, row - kv_idx < window, and else kv_idx - row < window."""
        row = Q_IDX if self.m in (None, self.n) else apply("sub", apply("add", Q_IDX, Size("N")), Size("M"))
        terms = [apply("le", KV_IDX, row)] if self.causal else []
        if self.window:
            terms.append(apply("lt", apply("sub", row, KV_IDX), Const(self.window)))
            terms += [] if self.causal else [apply("lt", apply("sub", KV_IDX, row), Const(self.window))]
        if self.page_size:
            terms.append(apply("lt", KV_IDX, Load("seq_lens", (B,), "int32")))
        return tuple(terms)


B, H = Var("b", Size("B")), Var("h", Size("H"))
Q_IDX, KV_IDX = Var("q_idx", Size("M")), Var("kv_idx", Size("N"))
