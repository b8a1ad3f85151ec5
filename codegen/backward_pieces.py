"""Keys of several tensors, one after the other: each tensor is read at its own keys, and somewhere in it at the others.

    k[min(max(kv_idx - 5, 0), 20)]    has the keys 5 <= kv_idx and kv_idx <= 25, if dS/dscore = 0 at all others

Its gradient then has one row for each of its own keys, and none for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusecomp.codegen.derivative import ZERO
from fusecomp.ir.algebra import apply, substitute
from fusecomp.ir.expr import Apply, Const, Expr, Var, variables
from fusecomp.ir.poly import plus, poly

Tests = tuple[Expr, ...]


def own_keys(index: tuple[Expr, ...], kv_idx: Var) -> tuple[tuple[Expr, ...], Tests]:
    """(the index without bounds on a place that moves with the key, the tests under which it is the same)."""
    opened = [_opened(e, kv_idx) for e in index]
    return tuple(e for e, _ in opened), tuple(t for _, tests in opened for t in tests)


def _opened(e: Expr, kv_idx: Var) -> tuple[Expr, Tests]:
    match e:
        case Apply("min" | "max" as op, (x, bound)) if kv_idx.name not in variables(bound):
            inner, tests = _opened(x, kv_idx)
            if _steps(inner, kv_idx):
                return inner, (*tests, apply("le" if op == "min" else "ge", inner, bound))
    return e, ()


def _steps(e: Expr, kv_idx: Var) -> bool:
    """Whether it is kv_idx plus what no key changes."""
    rest = plus(poly(e), {(kv_idx,): 1}, -1)
    return all(kv_idx.name not in variables(f) for m in rest for f in m)


def vanishes(e: Expr, tests: Sequence[Expr], kv_idx: Var) -> bool:
    """Whether `e` is 0 for every key that fails one of the tests, kv_idx + c <= bound or >="""
    return all(substitute(e, {kv_idx: _outside(t, kv_idx)}) == ZERO for t in tests)


def _outside(test: Expr, kv_idx: Var) -> Expr:
    """Any key that fails the test."""
    assert isinstance(test, Apply)
    inner, bound = test.operands
    edge = apply("sub", bound, apply("sub", inner, kv_idx))
    beyond = apply("add", Var("beyond", kv_idx.size), Const(1))
    return apply("add" if test.op == "le" else "sub", edge, beyond)
