"""Scalar functions that PyTorch has a name for, in the primitives."""

from __future__ import annotations

import math

import torch

from fusecomp.ir.algebra import apply, cast, const, log_add_exp
from fusecomp.ir.expr import Apply, Const, Expr, Reduce, kind, parts
from fusecomp.ir.poly import is_natural, poly, upper
from fusecomp.patterns.masks import ABSORBING


def real(e: Expr) -> Expr:
    """A truth value as 0 or 1, where arithmetic is done on it."""
    return cast(e, "int32") if kind(e) == "bool" else e


def power(x: Expr, y: Expr) -> Expr | None:
    """x ** y for a small constant y, or a constant x > 0."""
    match x, y:
        case _, Const(1 | 2 | 3 | 4 | 1.0 | 2.0 | 3.0 | 4.0 as n):
            total = real(x)
            for _ in range(int(n) - 1):
                total = apply("mul", total, real(x))
            return total
        case _, Const(0.5):
            return apply("sqrt", real(x))
        case _, Const(-0.5):
            return apply("rsqrt", real(x))
        case _, Const(-1 | -1.0):
            return apply("div", const(1.0), real(x))
        case Const(base), _ if base > 0:
            return apply("exp", apply("mul", real(y), const(math.log(base))))
    return None


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


def relu(x: Expr) -> Expr:
    """max(x, 0), whose gradient at 0 is 0"""
    return apply("max", x, const(0)) if kind(x) == "int" else apply("where", apply("le", x, const(0.0)), const(0.0), x)


def gelu(x: Expr) -> Expr:
    """x (1 + erf(x / sqrt 2)) / 2"""
    total = apply("add", apply("erf", apply("mul", x, const(0.5**0.5))), const(1.0))
    return apply("mul", x, apply("mul", total, const(0.5)))


def elu(x: Expr, alpha: Expr | None = None, *scales: Expr) -> Expr | None:
    """x if x > 0 else alpha (exp(x) - 1)"""
    below = apply("sub", apply("exp", apply("min", x, const(0.0))), const(1.0))
    below = below if alpha is None else apply("mul", below, alpha)
    return apply("where", apply("gt", x, const(0.0)), x, below) if not scales else None


def leaky_relu(x: Expr, slope: Expr | None = None) -> Expr:
    """x if x > 0 else slope x"""
    return apply("where", apply("gt", x, const(0.0)), x, apply("mul", x, slope or const(0.01)))


def softplus(x: Expr, *shape: Expr) -> Expr | None:
    """log(1 + exp(x)) = x + log(1 + exp(-x)) where x > 0; with another sharpness it is not lifted"""
    positive = apply("gt", x, const(0.0))
    small = apply("exp", apply("where", positive, apply("neg", x), x))
    total = apply("add", apply("where", positive, x, const(0.0)), apply("log", apply("add", small, const(1.0))))
    return None if shape else total


def logaddexp(x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y)), where a sum that stands under a logarithm is written out: it is never computed so"""
    match x, y:
        case Apply("log", (t,)), _ if any(isinstance(p, Reduce) for p in parts(t)):
            return apply("log", apply("add", t, apply("exp", y)))
        case _, Apply("log", (t,)) if any(isinstance(p, Reduce) for p in parts(t)):
            return apply("log", apply("add", apply("exp", x), t))
    return log_add_exp(x, y)


def nan_to_num(x: Expr, nan: Expr | None = None, top: Expr | None = None, low: Expr | None = None) -> Expr:
    """NaN becomes `nan`, infinities the largest finite numbers"""
    big = torch.finfo(torch.float32).max
    inside = clamp(x, low or const(-big), top or const(big))
    return apply("where", apply("isnan", x), nan or const(0.0), inside)
