"""Weights that are normalised without being exponentials: softmax of their logarithm.

    w(s_j) / sum_i w(s_i) = softmax(log w(s)),    w >= 0

Exact where w is known to be nowhere negative; where it is 0 its logarithm is -inf, which a mask says as well.
"""

from __future__ import annotations

from math import log

from torch.fx import Node

from fusecomp.graph.facts import is_tensor, op_name, shape, value
from fusecomp.ir.algebra import apply, const
from fusecomp.ir.expr import Apply, Cast, Const, Expr, dtype_kind, kind
from fusecomp.patterns.activations import softplus
from fusecomp.patterns.contraction import contraction
from fusecomp.patterns.exponentials import INF
from fusecomp.patterns.reasons import under_scores

ANCHORS = ("exp", "exp2", "pow", "softmax", "_softmax", "log_softmax", "_log_softmax", "sum")


def normalised_weights(node: Node) -> bool:
    """Whether a tensor of functions of scores, but for exponentials, is summed, and read by something else too."""
    if not is_tensor(node) or len(shape(node)) < 2 or contraction(node) is not None or len(node.users) < 2:
        return False
    sums = any(op_name(u) in ("sum", "mean") for u in node.users)
    return sums and value(node).is_floating_point() and pointwise_alone(node) and under_scores([node])


def pointwise_alone(node: Node) -> bool:
    """Whether no exponential or softmax lies between a tensor and the products above it: that is an anchor itself."""
    seen, stack = {node}, [node]
    while stack:
        n = stack.pop()
        if n is not node and is_tensor(n) and op_name(n).removesuffix("_") in ANCHORS and not power_of(n):
            return False
        more = [] if contraction(n) is not None else [x for x in n.all_input_nodes if x not in seen]
        seen.update(more)
        stack += more
    return True


def power_of(node: Node) -> bool:
    """x ** c, which is no exponential."""
    return op_name(node) == "pow" and is_tensor(node.args[0])


def logarithm(e: Expr) -> Expr | None:
    """log e, of an e that is nowhere negative; None where that is not known."""
    match e:
        case Cast(c, _) if kind(c) == "bool":
            return apply("where", c, const(0.0), const(-INF))
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            return logarithm(x)
        case Const(float() | int() as c) if c >= 0:
            return const(log(c) if c else -INF)
        case Apply("exp", (x,)):
            return x
        case Apply("sigmoid", (x,)):
            return log_sigmoid(x)
        case Apply("mul", (x, y)):
            return power(x, 2.0) if x == y else total(logarithm(x), logarithm(y))
        case Apply("div", (x, y)):
            return total(logarithm(x), times(logarithm(y), -1.0))
        case Apply("pow", (x, Const(float() | int() as n))) if n > 0:
            return times(logarithm(x), float(n))
        case Apply("where", (Apply("le", (x, Const(float() | int() as c))), low, y)) if x == y and c >= 0:
            return choice(Apply("le", (x, const(c))), logarithm(low), apply("log", x))
        case Apply("where", (c, x, y)):
            return choice(c, logarithm(x), logarithm(y))
        case Apply("max", (x, Const(float() | int() as c))) if c > 0:
            return apply("log", e)
        case Apply("add", (x, y)):
            return log_softplus(e) or of_sum(e, logarithm(x), logarithm(y))
    return None


def power(x: Expr, n: float) -> Expr:
    """log |x|^n"""
    known = logarithm(x)
    size = apply("mul", apply("log", apply("abs", x)), const(n))
    return times(known, n) or apply("where", apply("eq", x, const(0.0)), const(-INF), size)


def total(x: Expr | None, y: Expr | None) -> Expr | None:
    """x + y, within a choice that is -inf otherwise"""
    match x, y:
        case (None, _) | (_, None):
            return None
        case (Apply("where", (c, z, Const(float() as f))), w) | (w, Apply("where", (c, z, Const(float() as f)))) if (
            f == -INF
        ):
            return choice(c, total(z, w), const(f))
        case (Apply("where", (c, Const(float() as f), z)), w) | (w, Apply("where", (c, Const(float() as f), z))) if (
            f == -INF
        ):
            return choice(c, const(f), total(z, w))
    return apply("add", x, y)  # type: ignore[arg-type]


def times(x: Expr | None, n: float) -> Expr | None:
    """n x, within a choice; None where that is a logarithm of a quotient by 0"""
    match x:
        case None:
            return None
        case Const(float() | int() as c):
            return const(c * n) if n > 0 or abs(c) < INF else None
        case Apply("where", (c, y, z)):
            return choice(c, times(y, n), times(z, n))
    return apply("mul", x, const(n))


def choice(c: Expr, x: Expr | None, y: Expr | None) -> Expr | None:
    return None if x is None or y is None else apply("where", c, x, y)


def of_sum(e: Expr, x: Expr | None, y: Expr | None) -> Expr | None:
    """log(exp(x) + exp(y)), one of them a number above 0"""
    above = any(isinstance(z, Const) and z.value > -INF for z in (x, y))
    return apply("log", e) if above and x is not None and y is not None else None


def log_sigmoid(x: Expr) -> Expr:
    """min(x, 0) - log(1 + exp(-|x|))"""
    small = apply("exp", apply("neg", apply("abs", x)))
    return apply("sub", apply("min", x, const(0.0)), apply("log", apply("add", small, const(1.0))))


SMALL = -3.0
SERIES = (-1 / 2, 5 / 24, -1 / 8, 251 / 2880)


def log_softplus(e: Expr) -> Expr | None:
    """log(softplus(x)), where x < -3 by the series  x - u / 2 + 5 u^2 / 24 - u^3 / 8 + 251 u^4 / 2880,  u = exp(x)"""
    match e:
        case Apply("add", (Apply("where", (Apply("gt", (x, Const(0 | 0.0))), _, _)), _)) if softplus(x) == e:
            below = apply("lt", x, const(SMALL))
            u = apply("exp", apply("where", below, x, const(SMALL)))
            series: Expr = const(0.0)
            for c in reversed(SERIES):
                series = apply("mul", u, apply("add", series, const(c)))
            above = softplus(apply("where", below, const(SMALL), x))
            return apply("where", below, apply("add", x, series), apply("log", above))  # type: ignore[arg-type]
    return None
