"""Exponentials in one form: u exp(a), the terms of a sum of them, and what softmax does not see in a."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusecomp.ir.algebra import apply, const
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Reduce, Var, dtype_kind, kind, parts, variables

INF = float("inf")
LOG2 = math.log(2.0)
ZERO = const(0.0)


@dataclass(frozen=True)
class Exponential:
    """The product of `factors`, times exp(a)."""

    a: Expr
    factors: tuple[Expr, ...] = ()
    masked_by: frozenset[str] = frozenset()
    """How choices came in: by "product", of which an infinite exponential makes NaN, or by "choice", which gives 0."""

    def of(self, more: Exponential) -> Exponential:
        masked_by = self.masked_by | more.masked_by
        return Exponential(apply("add", self.a, more.a), (*self.factors, *more.factors), masked_by)


def exponential(e: Expr) -> Exponential | None:
    """`e` as u exp(a): products of exponentials, their powers, choices between one and 0, factors without an exp."""
    match e:
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            return exponential(x)
        case Apply("abs", (x,)) if (found := exponential(x)) and all(map(is_choice, found.factors)):
            return found
        case Apply("exp", (Apply("log", (x,)),)):
            return exponential(x) or Exponential(e.args[0])
        case Apply("exp", (a,)) if (hidden := masked(a)) is not None:
            return chosen(exponential(Apply("exp", (hidden[1],))), hidden[0])
        case Apply("exp", (a,)):
            return Exponential(a)
        case Apply("pow", (x, Const(float() as n))) if n > 0:
            return raised(exponential(x), n)
        case Apply("sqrt", (x,)):
            return raised(exponential(x), 0.5)
        case Apply("mul", (x, y)):
            left, right = exponential(x), exponential(y)
            if left and right:
                return left.of(right)
            return with_factor(left, y) if left else with_factor(right, x)
        case Apply("div", (x, w)):
            return with_factor(exponential(x), apply("div", const(1.0), w))
        case Apply("where", (c, x, Const(0 | 0.0))):
            return chosen(exponential(x), c)
        case Apply("where", (c, Const(0 | 0.0), x)):
            return chosen(exponential(x), apply("not", c))
    return None


def masked(a: Expr) -> tuple[Expr, Expr] | None:
    """(c, x) of a = c ? x : -inf, x = s - m, or that times a number above 0"""
    match a:
        case Cast(x, dtype) if dtype_kind(dtype) == "float" and (found := masked(x)):
            return found[0], Cast(found[1], dtype)
        case Apply("mul" | "div" as op, (x, Const(float() as n))) if 0 < n < INF and (found := masked(x)):
            return found[0], apply(op, found[1], const(n))
        case Apply("where", (c, x, Const(float() as f))) if f == -INF and reduces(x):
            return c, x
        case Apply("where", (c, Const(float() as f), x)) if f == -INF and reduces(x):
            return apply("not", c), x
    return None


def raised(e: Exponential | None, n: float) -> Exponential | None:
    """(u exp(a))^n"""
    factors = tuple(f if is_choice(f) else apply("pow", f, const(n)) for f in e.factors) if e else ()
    return e and Exponential(apply("mul", e.a, const(n)), factors, e.masked_by)


def with_factor(e: Exponential | None, w: Expr) -> Exponential | None:
    """w u exp(a)"""
    match w:
        case Cast(c, _) if kind(c) == "bool":
            w = choice(c)
    masked_by: frozenset[str] = frozenset({"product"}) if is_choice(w) else frozenset()
    return e and e.of(Exponential(ZERO, (w,), masked_by))


def chosen(e: Exponential | None, c: Expr) -> Exponential | None:
    """c ? u exp(a) : 0"""
    return e and e.of(Exponential(ZERO, (choice(c),), frozenset({"choice"})))


def choice(c: Expr) -> Expr:
    return apply("where", c, const(1.0), const(0.0))


def is_choice(e: Expr) -> bool:
    """Whether `e` is 1 or 0."""
    match e:
        case Apply("where", (_, Const(1 | 1.0), Const(0 | 0.0))):
            return True
    return False


def reduces(e: Expr) -> bool:
    """Whether `e` holds a reduction (and so, here, the scores)."""
    return any(isinstance(x, Reduce) for x in parts(e))


def summands(e: Expr) -> tuple[Expr, ...]:
    match e:
        case Apply("add", (x, y)):
            return (*summands(x), *summands(y))
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            return summands(x)
    return (e,)


def terms_of(e: Expr, sign: int = 1) -> list[tuple[int, Expr]]:
    """The signed terms of a sum."""
    match e:
        case Apply("add", (x, y)):
            return terms_of(x, sign) + terms_of(y, sign)
        case Apply("sub", (x, y)):
            return terms_of(x, sign) + terms_of(y, -sign)
        case Apply("neg", (x,)):
            return terms_of(x, -sign)
        case Apply("log", (Apply("div", (Apply("exp", (x,)), total)),)):  # log_softmax
            return [*terms_of(x, sign), (-sign, apply("log", total))]
    return [(sign, e)]


def total_of(terms: list[tuple[int, Expr]]) -> Expr:
    """The sum of signed terms."""
    total: Expr | None = None
    for sign, x in sorted(terms, key=lambda t: t[0] < 0):
        total = apply("add" if sign > 0 else "sub", total, x) if total else x if sign > 0 else apply("neg", x)
    return total if total is not None else const(0.0)


def spread(e: Expr) -> list[tuple[int, Expr]]:
    """The signed terms of a sum, or of a sum times a number: (x - y) c = x c - y c"""
    match e:
        case Apply("mul" | "div" as op, (x, Const() as c)) if (terms := terms_of(x)) != [(1, x)]:
            return [(sign, apply(op, t, c)) for sign, t in terms]
    return terms_of(e)


def collected(terms: list[tuple[int, Expr]]) -> list[tuple[int, Expr]]:
    """Signed terms without those that add to nothing."""
    left: list[tuple[int, Expr]] = []
    for sign, x in terms:
        if (-sign, x) in left:
            left.remove((-sign, x))
        else:
            left.append((sign, x))
    return left


def log_of(e: Expr) -> tuple[Expr, float] | None:
    """(x, p) of e = log(x) / p"""
    match e:
        case Apply("log", (x,)):
            return x, 1.0
        case Apply("log2", (x,)):
            return x, LOG2
        case Apply("mul", (x, Const(float() as c))) | Apply("mul", (Const(float() as c), x)) if c > 0:
            return (inner := log_of(x)) and (inner[0], inner[1] / c)
        case Apply("div", (x, Const(float() as c))) if c > 0:
            return (inner := log_of(x)) and (inner[0], inner[1] * c)
    return None


def unshifted(a: Expr, key: Var) -> tuple[Expr, Expr | None]:
    """(x, m) of a = x - m, m the same for every key and made by a reduction; softmax does not see m."""
    match a:
        case Apply("mul" | "div" as op, (x, c)) if key.name not in variables(c) and not reduces(c):
            inner, m = unshifted(x, key)
            return (a, None) if m is None else (apply(op, inner, c), apply(op, m, c))
        case Apply("where", (c, x, Const(float() as f))) if f == -INF and not reduces(c):
            inner, m = unshifted(x, key)
            return apply("where", c, inner, const(f)), m
        case Apply("where", (c, Const(float() as f), x)) if f == -INF and not reduces(c):
            inner, m = unshifted(x, key)
            return apply("where", c, const(f), inner), m
        case Apply("add" | "sub" | "log"):
            terms = terms_of(a)
            shift = [(s, t) for s, t in terms if key.name not in variables(t) and reduces(t)]
            if shift:
                return total_of([t for t in terms if t not in shift]), total_of([(-s, t) for s, t in shift])
    return a, None
