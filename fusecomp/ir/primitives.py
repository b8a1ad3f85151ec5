"""The scalar primitives: one row each, one column per reader.

A row is (name, how a person reads it, how Triton spells it, what PyTorch calls it, what sympy calls it, its kind and
its cost). Adding a primitive to fusecomp is adding a row here, plus the PyTorch spelling in `patterns/spellings.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fusecomp.ir.philox import random_words

ATOM, POWER, UNARY, TIMES, PLUS, COMPARE, NOT, AND, OR, CHOICE = range(10)
"""Precedence levels, tightest first. A child binding looser than its parent is parenthesised."""


@dataclass(frozen=True)
class Primitive:
    """One scalar function."""

    name: str
    text: str
    """For people, and for Python where `triton` and `torch_text` do not say otherwise; {0} is the first argument."""
    level: int
    """Precedence of `text`."""
    evaluate: Callable[..., Any]
    """On torch tensors, with broadcasting."""
    symbol: Callable[..., Any]
    """On sympy expressions."""
    kind: str = "float"
    """Kind of the result: "bool", "int", "float", or "same" (the widest of the arguments)."""
    triton: str = ""
    """Triton text where it differs from `text`."""
    torch_text: str = ""
    """PyTorch text where it differs from `text`."""
    hardware: str = ""
    """Text for an instruction of the device's own, less exact than `triton`; in kernels for Hopper in bfloat16."""
    fma: int = 1
    """Issue slots on the floating-point pipe, for one element."""
    sfu: int = 0
    """Issue slots on the special-function pipe (exp2, reciprocal, log2, sine), for one element."""


def _table(*rows: Primitive) -> dict[str, Primitive]:
    return {row.name: row for row in rows}


def _call(name: str, triton: str, sfu: int, fma: int = 1, hardware: str = "") -> Primitive:
    """A function of one argument that people, PyTorch and sympy all call `name`."""
    symbol = getattr(sympy, name, None) or sympy.Function(name)
    return Primitive(
        name, f"{name}({{0}})", ATOM, getattr(torch, name), symbol, "float", triton, f"torch.{name}({{0}})", hardware,
        fma, sfu,
    )  # fmt: skip


def _comparison(name: str, sign: str, symbol: Callable[..., Any]) -> Primitive:
    return Primitive(name, f"{{0}} {sign} {{1}}", COMPARE, getattr(torch, name), symbol, "bool")


def _floor_divide(a: Any, b: Any) -> Any:
    return torch.div(a, b, rounding_mode="floor")


def _where(c: Any, x: Any, y: Any) -> Any:
    return torch.where(c, x, y)


PRIMITIVES: dict[str, Primitive] = _table(
    # arithmetic
    Primitive("add", "{0} + {1}", PLUS, torch.add, operator.add, "same"),
    Primitive("sub", "{0} - {1}", PLUS, torch.sub, operator.sub, "same"),
    Primitive("mul", "{0} * {1}", TIMES, torch.mul, operator.mul, "same"),
    Primitive("div", "{0} / {1}", TIMES, torch.true_divide, operator.truediv, "float", sfu=1),
    # On natural numbers only (the left side >= 0, the right side > 0): there Triton's // and % are Python's.
    Primitive("floordiv", "{0} // {1}", TIMES, _floor_divide, lambda a, b: sympy.floor(a / b), "int"),
    Primitive("mod", "{0} % {1}", TIMES, torch.remainder, sympy.Mod, "int"),
    Primitive("neg", "-{0}", UNARY, torch.neg, operator.neg, "same"),
    Primitive("abs", "abs({0})", ATOM, torch.abs, sympy.Abs, "same", "tl.abs({0})", "torch.abs({0})"),
    # The larger and the smaller of two, NaN if either is, as in PyTorch
    Primitive(
        "max", "max({0}, {1})", ATOM, torch.maximum, sympy.Max, "same",
        "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "torch.maximum({0}, {1})",
    ),
    Primitive(
        "min", "min({0}, {1})", ATOM, torch.minimum, sympy.Min, "same",
        "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)", "torch.minimum({0}, {1})",
    ),
    # functions
    _call("exp", "tl.exp({0})", sfu=1),
    _call("exp2", "tl.exp2({0})", sfu=1, fma=0),
    _call("log", "tl.log({0})", sfu=1),
    _call("log2", "tl.log2({0})", sfu=1),
    _call("sqrt", "tl.sqrt({0})", sfu=1),
    _call("rsqrt", "tl.rsqrt({0})", sfu=1),
    # x to the power of y for x >= 0, NaN for x < 0: every real y but the whole ones
    Primitive(
        "pow", "pow({0}, {1})", ATOM, torch.pow, operator.pow, "float", "tl.exp2(({1}) * tl.log2({0}))",
        "torch.pow({0}, {1})", sfu=2,
    ),
    _call("sin", "tl.sin({0})", sfu=1),
    _call("cos", "tl.cos({0})", sfu=1),
    # Functions of the generated file's own (codegen/functions.py)
    _call("asinh", "asinh({0})", sfu=2, fma=4),
    _call("atan", "atan({0})", sfu=1, fma=14),
    _call("erf", "tl.erf({0})", sfu=1, fma=8),
    _call("floor", "tl.floor({0})", sfu=0),
    _call("ceil", "tl.ceil({0})", sfu=0),
    # tanh x = 2 sigmoid(2x) - 1: two special-function slots, absolute error below 2e-7
    _call("tanh", "(2.0 * tl.sigmoid(2.0 * ({0})) - 1.0)", sfu=2, fma=3, hardware="tanh({0})"),
    _call("sigmoid", "tl.sigmoid({0})", sfu=2, fma=2),
    # choices and predicates
    Primitive(
        "where", "{1} if {0} else {2}", CHOICE, _where,
        lambda c, x, y: sympy.Piecewise((x, c), (y, True)), "same",
        "tl.where({0}, {1}, {2})", "torch.where({0}, {1}, {2})",
    ),
    _comparison("eq", "==", sympy.Eq),
    _comparison("ne", "!=", sympy.Ne),
    _comparison("lt", "<", sympy.Lt),
    _comparison("le", "<=", sympy.Le),
    _comparison("gt", ">", sympy.Gt),
    _comparison("ge", ">=", sympy.Ge),
    Primitive("and", "{0} and {1}", AND, torch.logical_and, sympy.And, "bool", "{0} & {1}", "{0} & {1}"),
    Primitive("or", "{0} or {1}", OR, torch.logical_or, sympy.Or, "bool", "{0} | {1}", "{0} | {1}"),
    Primitive("xor", "{0} xor {1}", OR, torch.logical_xor, sympy.Xor, "bool", "{0} ^ {1}", "{0} ^ {1}"),
    Primitive("not", "not {0}", NOT, torch.logical_not, sympy.Not, "bool", "~{0}", "~{0}"),
    # x is not a number
    Primitive(
        "isnan", "isnan({0})", ATOM, torch.isnan, sympy.Function("isnan"), "bool", "({0} != {0})", "torch.isnan({0})"
    ),
    # A word in [0, 2^32) of a seed and a place (batch, row, key), a quarter of a call of Philox
    Primitive("random", "random({0}, {1}, {2}, {3})", ATOM, random_words, sympy.Function("random"), "int", fma=25),
)
