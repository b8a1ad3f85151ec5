"""The score in fewer instructions, equal up to float32 rounding.

    x / c             x * (1 / c)
    x * a * b         x * (a b)
    tanh(x)           1 - 2 / (exp2(2 log2(e) x) + 1)
    sigmoid(x)        1 / (exp2(-log2(e) x) + 1)
    exp(x)            exp2(log2(e) x)
"""

from __future__ import annotations

import math

from fusecomp.ir.algebra import apply, const, depends_on_score
from fusecomp.ir.expr import Apply, Const, Expr, kind, parts, rebuild

LOG2E = math.log2(math.e)
IDENTITIES = {
    "tanh": "tanh(x) = 1 - 2 / (exp2(2 log2(e) x) + 1)",
    "sigmoid": "sigmoid(x) = 1 / (exp2(-log2(e) x) + 1)",
}
"""What a reader of the kernel may not recognise."""


def cheaper(e: Expr, hardware: bool = False) -> Expr:
    """`e` with its score-dependent parts rewritten; what no score enters is computed once, and stays as written, as do
    functions that the `hardware` has."""
    if not depends_on_score(e):
        return e
    whole = rebuild(e, tuple(cheaper(x, hardware) for x in e.args), apply) if e.args else e
    kept = hardware and isinstance(whole, Apply) and whole.primitive.hardware
    return whole if kept or not e.args else _rewritten(whole)


def _rewritten(e: Expr) -> Expr:
    match e:
        case Apply("div", (x, Const(c))) if _is_scale(c) and kind(x) == "float":
            return times(x, 1.0 / c)
        case Apply("mul", (x, Const(c))) | Apply("mul", (Const(c), x)) if _is_scale(c) and kind(x) == "float":
            return times(x, float(c))
        case Apply("tanh", (x,)):
            return apply("sub", Const(1.0), apply("div", Const(2.0), _one_more(_exp(x, 2.0))))
        case Apply("sigmoid", (x,)):
            return apply("div", Const(1.0), _one_more(_exp(x, -1.0)))
        case Apply("exp", (x,)):
            return _exp(x, 1.0)
    return e


def _is_scale(c: float) -> bool:
    """Whether c and 1 / c are ordinary floats, so that the order of the products does not matter."""
    return c != 0 and 1e-30 < abs(c) < 1e30


def explained(before: Expr, after: Expr) -> list[str]:
    """The identities that turned one score into another, as comments."""
    had, has = ({x.op for x in parts(e) if isinstance(x, Apply)} for e in (before, after))
    return [f"# {identity}" for op, identity in IDENTITIES.items() if op in had - has]


def times(x: Expr, c: float) -> Expr:
    """x * c with the constants of a chain of products as one."""
    match x:
        case Apply("mul", (y, Const(k))) if _is_scale(k) and kind(y) == "float":
            return times(y, c * float(k))
        case Apply("neg", (y,)):
            return times(y, -c)
    return apply("mul", x, const(c))


def _exp(x: Expr, c: float) -> Expr:
    return apply("exp2", times(x, c * LOG2E))


def _one_more(x: Expr) -> Expr:
    return apply("add", x, Const(1.0))
