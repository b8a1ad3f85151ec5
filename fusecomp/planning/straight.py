"""Equations as a Python function: each distinct part computed once, on a line of its own.

    [8 / (M + 1), sqrt(M + 1)]   ->   _0 = 1 + M;  _1 = 8 / (_0);  _2 = sqrt(_0);  return _1, _2

As sympy.lambdify, for the few operations that the pages are written in: its general rules took ten times as long as all
else that a plan costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

NUMBERS: dict[str, Callable[..., Any]] = {
    "Max": max, "Min": min, "ceiling": math.ceil, "floor": math.floor, "log": math.log, "sqrt": math.sqrt,
}  # fmt: skip
"""What computes each function, of numbers."""

ROOTS = {sympy.Integer(-1): "{}", sympy.Rational(1, 2): "sqrt({})", sympy.Rational(-1, 2): "sqrt({})"}
"""Powers of the base that a product is divided by, or multiplied with."""


def function_of(
    names: Sequence[str], equations: Sequence[Any], functions: Mapping[str, Callable[..., Any]] = NUMBERS
) -> Callable[..., tuple[Any, ...]]:
    """f(*values of names) -> the values of the equations."""
    lines = _Lines()
    results = ", ".join(map(lines.operand, equations))
    body = "".join(f"    {line}\n" for line in lines.written)
    namespace = dict(functions)
    exec(f"def computed({', '.join(names)}):\n{body}    return {results},", namespace)
    return namespace["computed"]


class _Lines:
    """Assignments, each of one operation on names and numbers."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.known: dict[Any, str] = {}

    def operand(self, e: Any) -> str:
        """A name or a number."""
        if e.is_Symbol:
            return str(e)
        if e.is_Number:
            return _number(e)
        if e not in self.known:
            text, name = self.operation(e), f"_{len(self.written)}"
            self.written.append(f"{name} = {text}")
            self.known[e] = name
        return self.known[e]

    def operation(self, e: Any) -> str:
        match e:
            case sympy.Add():
                return " + ".join(map(self.operand, e.args))
            case sympy.Mul():
                return self.quotient(e.args)
            case sympy.Pow() if e.exp in ROOTS:
                return self.quotient([e])
            case sympy.Pow():
                return f"{self.operand(e.base)} ** {self.operand(e.exp)}"
            case sympy.Piecewise():
                *cases, (last, _) = e.args
                tests = [f"{self.operand(x)} if {self.operand(c)} else" for x, c in cases]
                return " ".join([*tests, self.operand(last)])
            case sympy.core.relational.Relational():
                return f"{self.operand(e.lhs)} {e.rel_op} {self.operand(e.rhs)}"
        return f"{type(e).__name__}({', '.join(map(self.operand, e.args))})"

    def quotient(self, factors: Sequence[Any]) -> str:
        """a / b and not a * (1 / b): whole numbers that divide each other stay whole."""
        above: list[str] = []
        below: list[str] = []
        for factor in factors:
            base, exponent = factor.as_base_exp()
            if factor.is_Rational:
                above, below = [*above, str(factor.p)], [*below, *([str(factor.q)] if factor.q != 1 else [])]
            elif exponent in ROOTS:
                (below if exponent < 0 else above).append(ROOTS[exponent].format(self.operand(base)))
            else:
                above.append(self.operand(factor))
        return " * ".join(above or ["1"]) + (f" / ({' * '.join(below)})" if below else "")


def _number(e: Any) -> str:
    return f"({e.p} / {e.q})" if e.is_Rational and not e.is_Integer else str(e if e.is_Integer else float(e))
