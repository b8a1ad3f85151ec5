"""Pointwise operations, tensors made from nothing, and casts: ATen names to scalar primitives.

A row of POINTWISE is  name: f(arguments at the index) -> Expr.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Node

from fusecomp.graph.facts import dtype, number, op_name, value
from fusecomp.ir.algebra import ONE, ZERO, apply, cast, const
from fusecomp.ir.expr import Apply, Const, Expr, dtype_kind, kind, variables
from fusecomp.patterns.lift import RULES, Decline, Index, Lift, argument, lift_argument, rule, runs_over_keys

LOG2, INF = math.log(2.0), float("inf")


def real(e: Expr) -> Expr:
    """A truth value as 0 or 1, where arithmetic is done on it."""
    return cast(e, "int32") if kind(e) == "bool" else e


def truth(e: Expr) -> Expr:
    """A number as a truth value: not 0."""
    return e if kind(e) == "bool" else apply("ne", e, ZERO if kind(e) == "int" else const(0.0))


def arithmetic(op: str) -> Callable[..., Expr]:
    return lambda *args: apply(op, *map(real, args))


def logical(op: str) -> Callable[..., Expr]:
    return lambda *args: apply(op, *map(truth, args))


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


def clamp(x: Expr, low: Expr | None = None, high: Expr | None = None) -> Expr:
    """min(max(x, low), high)"""
    x = x if low is None else apply("max", x, low)
    return x if high is None else apply("min", x, high)


def nan_to_num(x: Expr, nan: Expr | None = None, top: Expr | None = None, low: Expr | None = None) -> Expr:
    """NaN becomes `nan`, infinities the largest finite numbers"""
    big = torch.finfo(torch.float32).max
    inside = clamp(x, low or const(-big), top or const(big))
    return apply("where", apply("isnan", x), nan or const(0.0), inside)


def bitwise(op: str) -> Callable[..., Expr | None]:
    """& | ^ on truth values; on integers they are not lifted."""
    return lambda *args: apply(op, *args) if all(kind(a) == "bool" for a in args) else None


POINTWISE: dict[str, Callable[..., Expr | None]] = {
    "mul": arithmetic("mul"), "multiply": arithmetic("mul"),
    "div": arithmetic("div"), "true_divide": arithmetic("div"), "divide": arithmetic("div"),
    "neg": arithmetic("neg"), "negative": arithmetic("neg"), "abs": arithmetic("abs"),
    "pow": power, "square": lambda x: power(x, const(2)), "reciprocal": lambda x: apply("div", const(1.0), real(x)),
    "exp": arithmetic("exp"), "exp2": lambda x: apply("exp", apply("mul", real(x), const(LOG2))),
    "special_exp2": lambda x: apply("exp", apply("mul", real(x), const(LOG2))),
    "log": arithmetic("log"), "log2": arithmetic("log2"), "log1p": lambda x: apply("log", apply("add", x, const(1.0))),
    "sqrt": arithmetic("sqrt"), "rsqrt": arithmetic("rsqrt"), "sin": arithmetic("sin"), "cos": arithmetic("cos"),
    "erf": arithmetic("erf"), "floor": arithmetic("floor"), "ceil": arithmetic("ceil"),
    "tanh": arithmetic("tanh"), "sigmoid": arithmetic("sigmoid"),
    "relu": lambda x: apply("max", x, const(0.0)), "silu": lambda x: apply("mul", x, apply("sigmoid", x)),
    "maximum": arithmetic("max"), "minimum": arithmetic("min"),
    "clamp": clamp, "clip": clamp, "clamp_min": clamp, "clamp_max": lambda x, high: clamp(x, None, high),
    "where": lambda c, x, y: apply("where", truth(c), *same_kind(x, y)),
    "masked_fill": lambda x, m, fill: apply("where", truth(m), *same_kind(fill, x)),
    "eq": lambda a, b: apply("eq", *same_kind(a, b)), "ne": lambda a, b: apply("ne", *same_kind(a, b)),
    "not_equal": lambda a, b: apply("ne", *same_kind(a, b)),
    "lt": arithmetic("lt"), "le": arithmetic("le"), "gt": arithmetic("gt"), "ge": arithmetic("ge"),
    "less": arithmetic("lt"), "less_equal": arithmetic("le"), "greater": arithmetic("gt"),
    "greater_equal": arithmetic("ge"),
    "logical_and": logical("and"), "logical_or": logical("or"), "logical_not": logical("not"),
    "logical_xor": logical("xor"), "bitwise_and": bitwise("and"), "bitwise_or": bitwise("or"),
    "bitwise_xor": bitwise("xor"), "bitwise_not": bitwise("not"),
    "__and__": bitwise("and"), "__or__": bitwise("or"), "__xor__": bitwise("xor"),
    "isnan": lambda x: apply("isnan", x), "nan_to_num": nan_to_num,
    "isneginf": lambda x: apply("eq", x, const(-INF)), "isposinf": lambda x: apply("eq", x, const(INF)),
    "isinf": lambda x: apply("eq", apply("abs", x), const(INF)),
    "remainder": lambda a, b: apply("mod", a, b) if natural_divisor(a, b) else None,
    "floor_divide": lambda a, b: apply("floordiv", a, b) if natural_divisor(a, b) else None,
}  # fmt: skip
"""ATen name: the scalar it computes from the scalars of its arguments."""

COSTLY = {"exp", "exp2", "log", "log2", "log1p", "pow", "sin", "cos", "erf", "tanh", "sigmoid", "silu", "sqrt", "rsqrt"}
"""Lifted only where the scores are in them: of a bias, they are computed once outside and the result is loaded."""


def natural_divisor(a: Expr, b: Expr) -> bool:
    """Whether integer division by b is a matter of index arithmetic."""
    return kind(a) == "int" and isinstance(b, Const) and isinstance(b.value, int) and b.value > 0


def same_kind(x: Expr, y: Expr) -> tuple[Expr, Expr]:
    """Two values of one kind: truth values beside numbers count as numbers, integers beside reals as reals."""
    if kind(x) == kind(y):
        return x, y
    x, y = real(x), real(y)
    if kind(x) == kind(y):
        return x, y
    return tuple(const(float(e.value)) if isinstance(e, Const) else e for e in (x, y))  # type: ignore[return-value]


def pointwise(name: str) -> Callable[[Lift, Node, Index], Expr | None]:
    f = POINTWISE[name]

    def lifted(lift: Lift, node: Node, index: Index) -> Expr | None:
        if name == "div" and node.kwargs.get("rounding_mode"):
            return rounded_division(lift, node, index)
        args = [None if a is None else lift_argument(lift, node, a, index) for a in node.args]
        given = {ARGUMENT[k]: v for k, v in node.kwargs.items() if k in ARGUMENT and v is not None}
        e = f(*args, **{k: lift_argument(lift, node, v, index) for k, v in given.items()})
        if e is None or (name in COSTLY and not (lift.holds_score(e) or isinstance(e, Const) or constant_row(name, e))):
            return None
        return as_dtype(e, node)

    return lifted


def constant_row(name: str, e: Expr) -> bool:
    """Exponentials of what is the same for every query and key, such as a sink, cost nothing."""
    return name == "exp" and "q_idx" not in variables(e) and not runs_over_keys(e)


ARGUMENT = {"min": "low", "max": "high", "nan": "nan", "posinf": "top", "neginf": "low"}


def rounded_division(lift: Lift, node: Node, index: Index) -> Expr | None:
    """div(a, b, rounding_mode="floor") of integers"""
    a, b = (lift_argument(lift, node, x, index) for x in node.args)
    floor = node.kwargs["rounding_mode"] == "floor"
    return apply("floordiv", a, b) if floor and natural_divisor(a, b) else None


def as_dtype(e: Expr, node: Node) -> Expr:
    """Constants round to the dtype of the tensor they fill: -1e9 in float16 is -inf."""
    return round_constants(e, dtype(node))


def round_constants(e: Expr, to: str) -> Expr:
    match e:
        case Const(float() | int()) if dtype_kind(to) == "float" and not isinstance(e.value, bool):
            return cast(e, to)
        case Apply("where", (c, x, y)) if dtype_kind(to) == "float":
            return apply("where", c, round_constants(x, to), round_constants(y, to))
    return e


for _name in POINTWISE:
    RULES[_name] = pointwise(_name)


@rule("add", "sub", "rsub", "subtract")
def added(lift: Lift, node: Node, index: Index) -> Expr:
    """a + alpha b, a - alpha b, b - alpha a"""
    a, b = (real(lift_argument(lift, node, x, index)) for x in node.args[:2])
    alpha = number(argument(node, 2, "alpha", 1))
    if alpha is None:
        raise Decline("alpha is not a number", node)
    if op_name(node) == "rsub":
        a, b = b, a
    b = b if alpha in (ONE, const(1.0)) else apply("mul", b, alpha)
    op = "add" if "add" in op_name(node) else "sub"
    return as_dtype((absorbed(a, b) if op == "add" and dtype(node) in HALF else None) or apply(op, a, b), node)


HALF = ("float16", "bfloat16")
LOST_IN = -6e4
"""Added to this in half precision, whose numbers lie 32 apart here, a score is lost."""


def absorbed(a: Expr, b: Expr) -> Expr | None:
    """x + (c ? 0 : F) = c ? x : F in half precision for very negative F: what a row without a live key holds."""
    for x, choice in ((a, b), (b, a)):
        match choice:
            case Apply("where", (c, Const(0 | 0.0), Const(float() as f))) if f <= LOST_IN:
                return apply("where", c, x, const(f))
            case Apply("where", (c, Const(float() as f), Const(0 | 0.0))) if f <= LOST_IN:
                return apply("where", c, const(f), x)
    return None


@rule("max", "min")
def larger(lift: Lift, node: Node, index: Index) -> Expr | None:
    """max(a, b) of two tensors; over an axis, `reductions` has it"""
    if len(node.args) != 2 or not isinstance(node.args[1], Node):
        return None
    return apply("max" if "max" in op_name(node) else "min", *(lift_argument(lift, node, x, index) for x in node.args))


@rule("to", "_to_copy", "type_as", "float", "half", "bfloat16", "double", "long", "bool", "int",
      "_autocast_to_reduced_precision", "_autocast_to_full_precision")  # fmt: skip
def casted(lift: Lift, node: Node, index: Index) -> Expr:
    """The same value in another dtype. Kernels compute scores in float32, so roundings between float types drop out."""
    return retyped(lift.lift(node.args[0], index), dtype(node))


def retyped(e: Expr, to: str) -> Expr:
    if isinstance(e, Const):
        return cast(e, to)
    source, target = kind(e), dtype_kind(to)
    if target == "bool":
        return truth(e)
    if source == target:
        return round_constants(e, to)
    if source == "bool" and target == "float":
        return apply("where", e, const(1.0), const(0.0))
    return cast(e, "float32" if target == "float" else to)


@rule("copy")
def copied(lift: Lift, node: Node, index: Index) -> Expr:
    """x.copy_(y): y, in x's dtype"""
    return retyped(lift_argument(lift, node, node.args[1], index), dtype(node))


@rule("arange")
def arange(lift: Lift, node: Node, index: Index) -> Expr | None:
    """start + i step"""
    args = [a for a in map(number, node.args) if a is not None]
    if len(args) < len(node.args):
        return None
    start, step = (ZERO, ONE) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else ONE)
    at = apply("add", start, apply("mul", index[0], step))
    return retyped(at, dtype(node))


FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


@rule(*FILLED)
def filled(lift: Lift, node: Node, index: Index) -> Expr:
    """0 or 1"""
    name = op_name(node).removesuffix("_")
    return cast(const(FILLED[name]), dtype(node))


@rule("full", "full_like", "new_full", "scalar_tensor", "fill")
def full(lift: Lift, node: Node, index: Index) -> Expr:
    """One number everywhere"""
    given = node.args[0] if op_name(node) == "scalar_tensor" else argument(node, 1, "fill_value")
    given = argument(node, 2, "fill_value", given) if op_name(node) == "new_full" else given
    if isinstance(given, Node) and isinstance(value(given), torch.Tensor):
        return retyped(lift.lift(given, ()), dtype(node))
    return retyped(lift.scalar(given), dtype(node))


@rule("eye")
def identity(lift: Lift, node: Node, index: Index) -> Expr:
    """1 on the diagonal"""
    return retyped(apply("eq", *index), dtype(node))


@rule("tril", "triu")
def triangle(lift: Lift, node: Node, index: Index) -> Expr:
    """tril(x, k)[i, j] = x[i, j] if j - i <= k else 0"""
    offset = number(argument(node, 1, "diagonal", 0))
    if offset is None:
        raise Decline("the diagonal is not a number", node)
    i, j = index[-2:]
    inside = apply("le" if "tril" in op_name(node) else "ge", j, apply("add", i, offset))
    kept = lift.lift(node.args[0], index)
    if kind(kept) == "bool":
        return apply("and", inside, kept)
    return apply("where", inside, kept, cast(const(0), dtype(node)))
