"""Activation functions in the primitives, their gradients at a kink PyTorch's."""

from __future__ import annotations

import math

from fusecomp.ir.algebra import apply, const
from fusecomp.ir.expr import Expr, kind


def relu(x: Expr) -> Expr:
    """max(x, 0), whose gradient at 0 is 0"""
    return apply("max", x, const(0)) if kind(x) == "int" else threshold(x, const(0.0), const(0.0))


def threshold(x: Expr, least: Expr, otherwise: Expr) -> Expr:
    """x if x > least else `otherwise`"""
    return apply("where", apply("le", x, least), otherwise, x)


def hardtanh(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """min(max(x, low), high), whose gradient at both bounds is 0"""
    low, high = low or const(-1.0), high or const(1.0)
    return threshold(apply("where", apply("ge", x, high), high, x), low, low)


def hardsigmoid(x: Expr) -> Expr:
    """min(max(x + 3, 0), 6) / 6"""
    return apply("div", hardtanh(apply("add", x, const(3.0)), const(0.0), const(6.0)), const(6.0))


def hardswish(x: Expr) -> Expr:
    """x hardsigmoid(x), whose gradient at 3 is 1"""
    inside = apply("div", apply("mul", x, apply("add", x, const(3.0))), const(6.0))
    inside = apply("where", apply("ge", x, const(3.0)), x, inside)
    return apply("where", apply("le", x, const(-3.0)), const(0.0), inside)


def gelu(x: Expr, approximate: str = "none") -> Expr:
    """x (1 + erf(x / sqrt 2)) / 2, or x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2"""
    if approximate == "tanh":
        cube = apply("mul", apply("mul", apply("mul", x, x), x), const(0.044715))
        inner = apply("tanh", apply("mul", apply("add", x, cube), const(math.sqrt(2.0 / math.pi))))
    else:
        inner = apply("erf", apply("mul", x, const(0.5**0.5)))
    return apply("mul", x, apply("mul", apply("add", inner, const(1.0)), const(0.5)))


def elu(x: Expr, alpha: Expr | None = None, scale: Expr | None = None, inner: Expr | None = None) -> Expr:
    """scale x if x > 0 else scale alpha (exp(inner x) - 1)"""
    below = apply("mul", apply("min", x, const(0.0)), inner or const(1.0))
    below = apply("mul", apply("sub", apply("exp", below), const(1.0)), alpha or const(1.0))
    return apply("mul", apply("where", apply("gt", x, const(0.0)), x, below), scale or const(1.0))


SELU = (const(1.6732632423543772), const(1.0507009873554805))


def selu(x: Expr) -> Expr:
    """scale (x if x > 0 else alpha (exp(x) - 1))"""
    return elu(x, *SELU)


def celu(x: Expr, alpha: Expr | None = None) -> Expr:
    """x if x > 0 else alpha (exp(x / alpha) - 1)"""
    return elu(x, alpha, inner=apply("div", const(1.0), alpha or const(1.0)))


def leaky_relu(x: Expr, slope: Expr | None = None) -> Expr:
    """x if x > 0 else slope x"""
    return apply("where", apply("gt", x, const(0.0)), x, apply("mul", x, slope or const(0.01)))


def rrelu(x: Expr, low: Expr | None = None, high: Expr | None = None, training: Expr | None = None) -> Expr | None:
    """x if x > 0 else (low + high) / 2 x; in training the slope is drawn"""
    if training == const(True):
        return None
    total = apply("add", low or const(1 / 8), high or const(1 / 3))
    return leaky_relu(x, apply("mul", total, const(0.5)))


def softshrink(x: Expr, width: Expr | None = None) -> Expr:
    """x moved towards 0 by `width`, and 0 within it"""
    width = width or const(0.5)
    lower = apply("where", apply("lt", x, apply("neg", width)), apply("add", x, width), apply("mul", x, const(0.0)))
    return apply("where", apply("gt", x, width), apply("sub", x, width), lower)


def hardshrink(x: Expr, width: Expr | None = None) -> Expr:
    """x, and 0 where |x| <= width"""
    return apply("where", apply("le", apply("abs", x), width or const(0.5)), const(0.0), x)


def softplus(x: Expr, *shape: Expr) -> Expr | None:
    """log(1 + exp(x)) = x + log(1 + exp(-x)) where x > 0; with another sharpness it is not lifted"""
    positive = apply("gt", x, const(0.0))
    small = apply("exp", apply("where", positive, apply("neg", x), x))
    total = apply("add", apply("where", positive, x, const(0.0)), apply("log", apply("add", small, const(1.0))))
    return None if shape else total


def mish(x: Expr) -> Expr:
    """x tanh(softplus(x))"""
    y = softplus(x)
    assert y is not None
    return apply("mul", x, apply("tanh", y))
