"""What `tiles.py` times: attention by numbers, each as the keywords that a record keeps.

forward   a tile of queries walks its keys
decode    a query or a few against many keys, which are split over programs
queries   of the backward pass, the kernel of dQ; keys: that of dK and dV
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Load, Size
from fusecomp.ir.region import Access, AttentionRegion, Operand
from fusecomp.planning.workload import KV_IDX, Q_IDX, B, H, Workload


@dataclass(frozen=True)
class Case(Workload):
    """One workload and the kernel of it that is timed."""

    kind: str = "forward"
    alibi: bool = False
    """Add slope(h) (kv_idx - q_idx)."""
    bias_axes: str = "h"
    """Of the bias, beside the queries and the keys: "", "h" or "bh"."""
    prefix: int = 0
    """So many keys that every query sees, beside those up to its own."""
    documents: bool = False
    """Packed: a query sees the keys up to its own whose label is its own."""
    page: int = 0
    """K and V in pages of so many keys, found through a table; 0: dense."""
    latent: bool = False
    """In pages: V is the first columns of K."""

    @property
    def given(self) -> dict[str, Any]:
        """The keywords that make it."""
        return {f.name: asdict(self)[f.name] for f in fields(self) if asdict(self)[f.name] != f.default}

    @property
    def name(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self.given.items())

    @property
    def region(self) -> AttentionRegion:
        made = super().region
        if self.alibi:
            slope = apply("exp2", apply("mul", apply("add", H, Const(1)), Const(-8 / self.heads)))
            score = apply("add", made.score, apply("mul", slope, apply("sub", KV_IDX, Q_IDX)))
            made = replace(made, score=score)
        made = self._biased(made) if self.bias else made
        made = self._packed(made) if self.documents else made
        if self.prefix:
            seen = apply("or", apply("lt", KV_IDX, Const(self.prefix)), apply("le", KV_IDX, Q_IDX))
            made = replace(made, keep=(seen,))
        return self._paged(made) if self.page else made

    @property
    def sizes(self) -> dict[str, int]:
        columns = -(-self.n // self.page) if self.page else 0
        paged = {"P": self.batch * columns, "W": -(-columns // 16) * 16} if self.page else {}
        return {**super().sizes, **paged}

    def _biased(self, made: AttentionRegion) -> AttentionRegion:
        """With the bias over other axes."""
        axes = tuple({"b": B, "h": H}[name] for name in self.bias_axes)
        index = (*axes, Q_IDX, KV_IDX)
        bias = Operand("bias", tuple(v.size for v in index), made.pv_dtype)
        score = apply("add", super()._score(made.pv_dtype).args[0], Load("bias", index, made.pv_dtype))
        return replace(made, operands=(*made.operands[:3], bias), score=score)

    def _packed(self, made: AttentionRegion) -> AttentionRegion:
        """labels[b, q_idx] == labels[b, kv_idx], which only the run knows."""
        labels = Operand("labels", (B.size, KV_IDX.size), "int32")
        same = apply("eq", *(Load("labels", (B, place), "int32") for place in (Q_IDX, KV_IDX)))
        return replace(made, operands=(*made.operands, labels), keep=(*made.keep, same))

    def _paged(self, dense: AttentionRegion) -> AttentionRegion:
        """K and V from pools [P, page, KV heads, D], at table[b, kv_idx // page]; keys up to lengths[b]."""
        number = Load("table", (B, apply("floordiv", KV_IDX, Const(self.page))), "int32")
        at = (number, apply("mod", KV_IDX, Const(self.page)), apply("floordiv", H, Const(self.heads // self._kv)))
        (product,), dtype = dense.products, dense.pv_dtype
        pools = [(product.k.operand, product.d), (dense.v.operand, dense.dv)][: 1 if self.latent else 2]
        shape = (Size("P"), Const(self.page), Const(self._kv))
        operands = [
            dense.operand("q"),
            *(Operand(name, (*shape, d.size), dtype) for name, d in pools),
            Operand("table", (B.size, Size("W")), "int32"),
            Operand("lengths", (B.size,), "int32"),
        ]
        k, v = (Access(pools[i][0], (*at, d)) for i, d in ((0, product.d), (-1, dense.dv)))
        seen: Expr = apply("lt", KV_IDX, Load("lengths", (B,), "int32"))
        return replace(dense, operands=tuple(operands), products=(replace(product, k=k),), v=v, keep=(seen,))

    @property
    def _kv(self) -> int:
        return self.kv_heads or self.heads


def _forward() -> list[Case]:
    causal, full = {"causal": True}, {"causal": False}
    rows: list[tuple[dict[str, Any], list[tuple[int, int, int]]]] = [
        # what they share, and (batch, heads, N) of each
        ({"d": 64, **causal}, [(4, 16, 4096), (1, 16, 512), (8, 16, 1024), (1, 16, 16384), (64, 16, 512)]),
        ({"d": 64, **full}, [(4, 16, 4096), (8, 16, 1024), (1, 16, 2048)]),
        ({"d": 128, **causal}, [(4, 16, 4096), (1, 32, 512), (8, 16, 1024), (1, 8, 18000), (1, 16, 32768)]),
        ({"d": 128, **full}, [(4, 16, 4096), (2, 16, 1024), (1, 16, 8192)]),
        ({"d": 64, "window": 256}, [(4, 16, 4096), (1, 16, 32768)]),
        ({"d": 128, "window": 256}, [(1, 16, 16384)]),
        ({"d": 64, "softcap": 30.0, **causal}, [(4, 16, 4096), (1, 16, 2048)]),
        ({"d": 64, "alibi": True, **causal}, [(4, 16, 4096), (1, 16, 2048)]),
        ({"d": 64, "bias": True}, [(4, 16, 2048), (1, 16, 4096)]),
        ({"d": 80, **causal}, [(4, 16, 4096), (1, 16, 2048)]),
        ({"d": 96, **causal}, [(4, 16, 4096), (2, 32, 1024)]),
        ({"d": 192, "dv": 128, **causal}, [(2, 16, 4096), (1, 16, 16384)]),
        ({"d": 256, **causal}, [(2, 8, 4096), (1, 8, 1024)]),
        ({"d": 128, "dtype": "fp16", **causal}, [(4, 16, 4096), (8, 16, 512)]),
        ({"d": 64, "dtype": "fp32", **causal}, [(4, 16, 2048), (1, 16, 1024)]),
        ({"d": 64, "dtype": "tf32", **full}, [(4, 16, 2048), (1, 16, 4096)]),
        ({"d": 128, "dtype": "tf32", **causal}, [(1, 16, 4096)]),
        ({"d": 128, "kv_heads": 8, **causal}, [(4, 32, 2048), (1, 32, 8192)]),
        ({"d": 128, "kv_heads": 8, "m": 256, **causal}, [(4, 32, 8192), (1, 32, 65536)]),
    ]
    return [Case(n=n, batch=b, heads=h, **held) for held, shapes in rows for b, h, n in shapes]


def _decode() -> list[Case]:
    held: dict[str, Any] = {"kind": "decode", "m": 1, "heads": 32}
    grouped, dense, paged = {**held, "kv_heads": 8}, {}, {"page": 16}
    shapes = [(1, 1024), (1, 4096), (1, 16384), (1, 65536), (1, 131072), (8, 2048), (8, 16384), (64, 1024), (64, 4096)]
    rows = [(grouped, how, shape) for how in (dense, paged) for shape in shapes]
    rows += [({**grouped, "d": 64}, paged, (64, 4096)), ({**grouped, "d": 64}, dense, (1, 32768))]
    rows += [(held, dense, (16, 8192)), (held, dense, (1, 4096)), ({**grouped, "m": 4}, dense, (16, 4096))]
    rows += [({**grouped, "heads": 16, "d": 256}, dense, (8, 4096))]
    rows += [(grouped, how, (256, 256)) for how in (dense, paged)]
    latent = {"kind": "decode", "m": 1, "d": 576, "dv": 512, "kv_heads": 1, "page": 64, "latent": True}
    wide = [(128, (32, 4096)), (16, (32, 4096)), (128, (4, 16384))]
    rows += [({**latent, "heads": h}, dense, shape) for h, shape in wide]
    return [Case(n=n, batch=b, **{**what, **how}) for what, how, (b, n) in rows]


def _backward() -> list[Case]:
    rows: list[tuple[dict[str, Any], list[tuple[int, int, int]]]] = [
        ({"d": 64, "causal": True}, [(4, 16, 4096), (8, 16, 1024), (1, 16, 1024)]),
        ({"d": 128, "causal": True}, [(4, 16, 4096), (1, 8, 16384), (8, 16, 1024)]),
        ({"d": 64}, [(4, 16, 2048)]),
        ({"d": 128, "kv_heads": 8, "causal": True}, [(1, 32, 4096)]),
        ({"d": 64, "softcap": 30.0, "causal": True}, [(4, 16, 2048)]),
        ({"d": 256, "causal": True}, [(1, 8, 4096)]),
    ]
    shapes = [(held, shape) for held, found in rows for shape in found]
    pairs = [(kind, held, shape) for held, shape in shapes for kind in ("queries", "keys")]
    return [Case(n=n, batch=b, heads=h, kind=kind, **held) for kind, held, (b, h, n) in pairs]


def _in_turn(*lists: list[Case]) -> list[Case]:
    """Some of each kind at any time: a run that ends early has all kinds."""
    places = [((i + 0.5) / len(cases), case) for cases in lists for i, case in enumerate(cases)]
    return [case for _, case in sorted(places, key=lambda x: x[0])]


CASES = _in_turn(_forward(), _decode(), _backward())
