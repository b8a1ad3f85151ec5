"""What a mask may be over a tile, from the least and the greatest of each thing that it reads.

    ends(x)   = (lo, hi)         lo <= x <= hi for every pair of the tile, of an integer x
    truth(c)  = (some, every)    no pair fulfils c unless `some`; each pair does if `every`

Both err to one side only: a tile that is not known to be hidden or whole is tested pair by pair. `Ends` is what the
leaves are; None where nothing is known of an expression.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from fusecomp.ir.algebra import FALSE, ONE, TRUE, ZERO, apply
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Size, Var, dtype_kind, kind

Pair = tuple[Expr, Expr]
Ends = Callable[[Expr], Pair | None]
"""The ends of an index or a load."""
MAYBE = TRUE, FALSE
SWAPPED = {"gt": "lt", "ge": "le"}


def ends(e: Expr, of: Ends) -> Pair | None:
    """(lo, hi)"""
    match e:
        case Const(int()) | Size():
            return e, e
        case Var() | Load():
            return of(e)
        case Cast(x, "int64") if kind(x) == "int":
            return ends(x, of)
        case Cast(x, dtype) if kind(x) == "bool" and dtype_kind(dtype) == "int":
            some, every = truth(x, of)
            return apply("where", every, ONE, ZERO), apply("where", some, ONE, ZERO)
        case Apply(op, args) if kind(e) == "int":
            known = [ends(x, of) for x in args]
            return None if None in known else _ends(op, [p for p in known if p is not None])
    return None


def _ends(op: str, args: list[Pair]) -> Pair | None:
    match op, args:
        case ("add" | "min" | "max"), [(a, b), (c, d)]:
            return apply(op, a, c), apply(op, b, d)
        case "sub", [(a, b), (c, d)]:
            return apply("sub", a, d), apply("sub", b, c)
        case "neg", [(a, b)]:
            return apply("neg", b), apply("neg", a)
        case "abs", [(a, b)]:
            above, below = apply("max", a, ZERO), apply("max", apply("neg", b), ZERO)
            return apply("max", above, below), apply("max", b, apply("neg", a))
        case "mul", [(a, b), (Const(int(c)), _)] | [(Const(int(c)), _), (a, b)]:
            found = apply("mul", a, Const(c)), apply("mul", b, Const(c))
            return found if c >= 0 else found[::-1]
        case "floordiv", [(a, b), (Const(int(c)), _)] if c > 0:
            return apply(op, a, Const(c)), apply(op, b, Const(c))
    return None


def truth(e: Expr, of: Ends) -> Pair:
    """(some, every)"""
    match e:
        case Const(value):
            return Const(bool(value)), Const(bool(value))
        case Load(_, _, dtype) if dtype_kind(dtype) == "bool" and (found := of(e)) is not None:
            return apply("ne", found[1], ZERO), apply("ne", found[0], ZERO)
        case Apply("not", (x,)):
            some, every = truth(x, of)
            return apply("not", every), apply("not", some)
        case Apply("and" | "or" as op, (x, y)):
            (a, b), (c, d) = truth(x, of), truth(y, of)
            return apply(op, a, c), apply(op, b, d)
        case Apply("xor" | "eq" | "ne" as op, (x, y)) if kind(x) == kind(y) == "bool":
            return _alike(op, truth(x, of), truth(y, of))
        case Apply("where", (c, x, y)) if kind(x) == kind(y) == "bool":
            either = apply("or", apply("and", c, x), apply("and", apply("not", c), y))
            return truth(either, of)
        case Apply("lt" | "le" | "gt" | "ge" | "eq" | "ne" as op, (x, y)):
            left, right = ends(x, of), ends(y, of)
            return MAYBE if left is None or right is None else _compared(op, left, right)
    return MAYBE


def _alike(op: str, x: Pair, y: Pair) -> Pair:
    """x == y of truth values, or x != y."""
    (a, b), (c, d) = x, y
    one, other = apply("and", b, apply("not", c)), apply("and", d, apply("not", a))
    differ = apply("or", one, other)  # throughout
    agree = apply("or", apply("and", b, d), apply("and", apply("not", a), apply("not", c)))
    some, every = apply("not", differ), agree
    return (some, every) if op == "eq" else (apply("not", every), apply("not", some))


def _compared(op: str, x: Pair, y: Pair) -> Pair:
    if op in SWAPPED:
        op, x, y = SWAPPED[op], y, x
    (a, b), (c, d) = x, y
    if op in ("lt", "le"):
        return apply(op, a, d), apply(op, b, c)
    some = apply("and", apply("le", a, d), apply("le", c, b))
    one = [apply("eq", a, b), apply("eq", c, d), apply("eq", a, c)]
    every = reduce(lambda p, q: apply("and", p, q), one)
    return (some, every) if op == "eq" else (apply("not", every), apply("not", some))
