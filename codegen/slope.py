"""A part of the score that grows evenly along the keys, as ALiBi does: a tile adds one row of numbers to its scores.

    S = score + slope kv_idx + rest = (score + slope n) + shift        kv_idx = k_start + n, shift = S's part at n = 0

`shift` is one number for each row of a tile. A softmax over the row needs it only where tiles meet, in the maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from fusecomp.codegen.base2 import Exponent
from fusecomp.ir.algebra import apply, depends_on_score
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Var, kind, variables

PLACED = Load("slope_n", (), "float32")
"""slope n, [1, BLOCK_N]."""


@dataclass(frozen=True)
class Slope:
    """S as above."""

    score: Expr
    """score + PLACED."""
    slope: Expr
    """The same for all queries."""
    shift: Expr
    """At kv_idx = k_start."""


def sloped(e: Exponent, q_idx: Var, kv_idx: Var, moving: frozenset[str]) -> Slope | None:
    """S in these parts; None where none of its summands rises with kv_idx alone."""
    if e.scale != 1.0:
        return None
    along = Along(q_idx, kv_idx, moving)
    parts = list(_summands(e.score, 1))
    even = [(sign, x, rise) for sign, x in parts if (rise := along.rise(x)) is not None]
    rest = [(sign, x) for sign, x in parts if along.rise(x) is None]
    slope = _sum([(sign, rise) for sign, _, rise in even])
    if slope in (None, Const(0)) or not rest:
        return None
    score, shift = _sum(rest), _sum([(sign, x) for sign, x, _ in even])
    assert slope is not None
    assert score is not None
    assert shift is not None
    return Slope(apply("add", score, PLACED), slope, shift)


@dataclass(frozen=True)
class Along:
    """How expressions grow with kv_idx."""

    q_idx: Var
    kv_idx: Var
    moving: frozenset[str]

    def rise(self, e: Expr) -> Expr | None:
        """d e / d kv_idx where it is a number of the batch axes, and e one of the row at each key; else None."""
        if not variables(e) & self.moving:
            return None if depends_on_score(e) else Const(0)
        match e:
            case Var():
                return Const(1) if e == self.kv_idx else Const(0) if e == self.q_idx else None
            case Cast(x, "float32") if kind(x) == "int":
                return self.rise(x)
            case Apply("neg", (x,)):
                found = self.rise(x)
                return None if found is None else apply("neg", found)
            case Apply("add" | "sub" as op, (x, y)):
                one, other = self.rise(x), self.rise(y)
                return None if one is None or other is None else apply(op, one, other)
            case Apply("mul", (x, y)):
                return self._product(x, y) or self._product(y, x)
        return None

    def _product(self, fixed: Expr, x: Expr) -> Expr | None:
        if variables(fixed) & self.moving or depends_on_score(fixed):
            return None
        found = self.rise(x)
        return None if found is None else Const(0) if found == Const(0) else apply("mul", fixed, found)


def _summands(e: Expr, sign: int) -> Iterator[tuple[int, Expr]]:
    match e:
        case Apply("add" | "sub" as op, (x, y)) if depends_on_score(e):
            yield from _summands(x, sign)
            yield from _summands(y, sign if op == "add" else -sign)
        case Apply("neg", (x,)) if depends_on_score(e):
            yield from _summands(x, -sign)
        case _:
            yield sign, e


def _sum(terms: list[tuple[int, Expr]]) -> Expr | None:
    """+- x +- y ...; None for no term."""
    ordered = sorted(terms, key=lambda t: -t[0])
    if not ordered:
        return None
    (sign, first), *others = ordered
    start = first if sign > 0 else apply("neg", first)
    return reduce(lambda total, t: apply("add" if t[0] > 0 else "sub", total, t[1]), others, start)
