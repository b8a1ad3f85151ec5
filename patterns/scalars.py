"""Scalar functions that PyTorch has a name for, in the primitives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce

import torch

from fusecomp.ir.algebra import apply, cast, const, log_add_exp
from fusecomp.ir.expr import Apply, Const, Expr, Reduce, kind, parts
from fusecomp.ir.poly import is_natural, poly, upper
from fusecomp.patterns.exponentials import reduces
from fusecomp.patterns.masks import ABSORBING, split

INF = float("inf")


def real(e: Expr) -> Expr:
    """A truth value as 0 or 1, where arithmetic is done on it."""
    return cast(e, "int32") if kind(e) == "bool" else e


def exponential(x: Expr) -> Expr:
    """exp(x), which is 0 where x holds a finite fill: only less a maximum does a fill count for anything"""
    found = split(real(x))
    if not found.keep or found.fill == -INF or reduces(x):
        return apply("exp", real(x))
    return apply("where", reduce(partial(apply, "and"), found.keep), apply("exp", found.score), const(0.0))


def power(x: Expr, y: Expr) -> Expr | None:
    """x ** y for a number y, a number x > 0, or any y where x is never negative."""
    match x, y:
        case _, Const(int() | float() as n) if n == int(n) and abs(n) <= MOST_FACTORS and not isinstance(n, bool):
            return whole_power(real(x), int(n))
        case _, Const(0.5):
            return apply("sqrt", real(x))
        case _, Const(-0.5):
            return apply("rsqrt", real(x))
        case Const(base), _ if base > 0:
            return exponential(apply("mul", real(y), const(math.log(base))))
        case _, Const(float(n)) if n != int(n):
            return apply("pow", real(x), y)
        case _ if kind(x) == kind(y) == "float" and never_negative(x):
            neither = apply("and", apply("eq", x, const(0.0)), apply("eq", y, const(0.0)))
            return apply("where", neither, const(1.0), apply("pow", x, y))
    return None


MOST_FACTORS = 16


def whole_power(x: Expr, n: int) -> Expr:
    """x ** n by squaring"""
    if n < 1:
        return apply("div", const(1.0), whole_power(x, -n)) if n else cast(const(1), "float32")
    half = whole_power(x, n // 2) if n > 1 else x
    return x if n == 1 else apply("mul", apply("mul", half, half), x) if n % 2 else apply("mul", half, half)


def never_negative(e: Expr) -> bool:
    """Whether `e` is at least 0 or NaN, by its form."""
    match e:
        case Const(c):
            return c >= 0
        case Apply("abs" | "exp" | "exp2" | "sqrt" | "rsqrt" | "sigmoid" | "pow"):
            return True
        case Apply("mul", (x, y)) if x == y:
            return True
        case Apply("max", args):
            return any(map(never_negative, args))
        case Apply("where", (Apply("le" | "lt", (x, Const(0 | 0.0))), y, z)) if x == z:
            return never_negative(y)
        case Apply("add" | "mul" | "div" | "min", args):
            return all(map(never_negative, args))
    return False


def remainder(x: Expr, y: Expr) -> Expr | None:
    """x - y floor(x / y), with the sign of y"""
    return _left_over(x, y, lambda z: apply("floor", z))


def fmod(x: Expr, y: Expr) -> Expr | None:
    """x - y trunc(x / y), with the sign of x"""
    return _left_over(x, y, trunc)


def _left_over(x: Expr, y: Expr, whole: Callable[[Expr], Expr]) -> Expr | None:
    if "float" not in (kind(x), kind(y)):
        return None
    x, y = real(x), real(y)
    return apply("sub", x, apply("mul", y, whole(apply("div", x, y))))


def trunc(x: Expr) -> Expr:
    """x rounded towards 0"""
    return apply("where", apply("lt", x, const(0.0)), apply("ceil", x), apply("floor", x))


def sign(x: Expr) -> Expr:
    """1, 0 or -1"""
    one, zero = (const(1), const(0)) if kind(x) == "int" else (const(1.0), const(0.0))
    below = apply("where", apply("lt", x, zero), apply("neg", one), zero)
    return apply("where", apply("gt", x, zero), one, below)


def sinc(x: Expr) -> Expr:
    """sin(pi x) / (pi x), 1 at 0"""
    turned = apply("mul", real(x), const(math.pi))
    return apply("where", apply("eq", x, const(0.0)), const(1.0), apply("div", apply("sin", turned), turned))


def logit(x: Expr, eps: Expr | None = None) -> Expr:
    """log(x / (1 - x)), of x between eps and 1 - eps"""
    x = x if eps is None else clamp(x, eps, apply("sub", const(1.0), eps))
    return apply("log", apply("div", x, apply("sub", const(1.0), x)))


def halved(x: Expr, bits: Expr) -> Expr | None:
    """x >> n = x // 2^n for integers, negative ones too"""
    return _shift("floordiv", x, bits)


def doubled(x: Expr, bits: Expr) -> Expr | None:
    """x << n = x 2^n"""
    return _shift("mul", x, bits)


def _shift(op: str, x: Expr, bits: Expr) -> Expr | None:
    match bits:
        case Const(int(n)) if kind(x) == "int" and 0 <= n < 31:
            return apply(op, x, const(1 << n))
    return None


def low_bits(x: Expr, mask: Expr) -> Expr | None:
    """x & (2^n - 1) = x mod 2^n, x & -2^n = x - x mod 2^n; and of truth values"""
    match mask:
        case _ if kind(x) == kind(mask) == "bool":
            return apply("and", x, mask)
        case Const(int(ones)) if kind(x) == "int" and not isinstance(ones, bool):
            if ones > 0 and ones & (ones + 1) == 0:
                return apply("mod", x, const(ones + 1))
            if ones < 0 and ones & -ones == -ones:
                return apply("sub", x, apply("mod", x, const(-ones)))
    return low_bits(mask, x) if isinstance(x, Const) and not isinstance(mask, Const) else None


def either_bit(x: Expr, y: Expr) -> Expr | None:
    """x | y = x + y for a multiple x of 2^n, 0 <= y < 2^n; or of truth values"""
    if kind(x) == kind(y) == "bool":
        return apply("or", x, y)
    for high, low in ((x, y), (y, x)):
        top = upper(low) if kind(low) == kind(high) == "int" and is_natural(low) else None
        if top is not None and not any(c % (1 << top.bit_length()) for c in poly(high).values()):
            return apply("add", high, low)
    return None


def larger(op: str, x: Expr, y: Expr) -> Expr:
    """max(x, y) or min(x, y) of tensors, where both are equal half of the gradient for each. A number comes first, but
    for a fill: max(x, c) is a clamp, which keeps the gradient there."""
    x, y = real(x), real(y)
    swapped = isinstance(y, Const) and kind(x) == "float" and y.value > ABSORBING
    return apply(op, y, x) if swapped else apply(op, x, y)


def clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """min(max(x, low), high), at whose bounds the gradient is that of x"""
    x = x if low is None else _bounded("max", "lt", x, low)
    return x if high is None else _bounded("min", "gt", x, high)


def _bounded(op: str, outside: str, x: Expr, bound: Expr) -> Expr:
    if isinstance(bound, Const) or kind(x) != "float":
        return apply(op, x, bound)
    return apply("where", apply("or", apply(outside, x, bound), apply("isnan", bound)), bound, x)


def logaddexp(x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y)), where a sum that stands under a logarithm is written out: it is never computed so"""
    match x, y:
        case Apply("log", (t,)), _ if any(isinstance(p, Reduce) for p in parts(t)):
            return apply("log", apply("add", t, apply("exp", y)))
        case _, Apply("log", (t,)) if any(isinstance(p, Reduce) for p in parts(t)):
            return apply("log", apply("add", apply("exp", x), t))
    return log_add_exp(x, y)


def nan_to_num(x: Expr, nan: Expr | None = None, top: Expr | None = None, low: Expr | None = None) -> Expr:
    """NaN becomes `nan`, infinities `low` and `top`, or the finite numbers next to them, which a clamp gives too"""
    big = torch.finfo(torch.float32).max
    inside = clamp(x, None if low else const(-big), None if top else const(big))
    for end, given in ((-INF, low), (INF, top)):
        inside = apply("where", apply("eq", x, const(end)), given, inside) if given else inside
    return apply("where", apply("isnan", x), nan or const(0.0), inside)
