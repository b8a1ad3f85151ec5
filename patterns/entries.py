"""Which entries of the axis that a softmax is taken over are keys, and which are more than keys."""

from __future__ import annotations

from fusecomp.ir.algebra import ZERO, apply, const, substitute
from fusecomp.ir.expr import Const, Expr, Var
from fusecomp.ir.poly import poly

MOST_EXTRAS = 8
"""Entries of the normaliser that are not keys: a sink is one."""


def first_key(a: Expr, b: Expr, var: Var, key: Var) -> Expr | None:
    """Where the keys begin in the normalised axis: the s with b[s + key] = a."""
    extra = apply("sub", var.size, key.size)
    few = range(min(int(extra.value), MOST_EXTRAS) + 1) if isinstance(extra, Const) and extra.value >= 0 else ()
    for start in dict.fromkeys((ZERO, extra, *map(const, few))):
        if substitute(b, {var: apply("add", key, start)}) == a:
            return start
    return None


def outside(size: Expr, start: Expr, keys: Expr) -> list[Expr] | None:
    """Positions of the normalised axis that are no keys, where their number is a constant."""
    more = poly(apply("sub", size, keys))
    if any(m for m in more):
        return None
    count = more.get((), 0)
    if count < 0 or count > MOST_EXTRAS:
        return None
    before = apply("lt", const(0), start) == const(True)
    return [const(k) if before and apply("lt", const(k), start) == const(True) else apply("add", keys, const(k))
            for k in range(count)]  # fmt: skip
