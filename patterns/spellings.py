"""Pointwise operations, tensors made from nothing, and casts: ATen names to scalar primitives.

A row of POINTWISE is  name: f(arguments at the index) -> Expr.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.fx import Node

from fusecomp.graph.facts import dtype, is_tensor, number, op_name, shape, value
from fusecomp.ir.algebra import ONE, ZERO, apply, cast, const
from fusecomp.ir.expr import Const, Expr, dtype_kind, kind, variables
from fusecomp.ir.poly import is_natural
from fusecomp.patterns import activations as act
from fusecomp.patterns.exponentials import INF, LOG2
from fusecomp.patterns.lift import RULES, Decline, Index, Lift, argument, lift_argument, rule, runs_over_keys
from fusecomp.patterns.promotion import single
from fusecomp.patterns.reductions import reduced
from fusecomp.patterns.rounding import absorbed, compared, retyped, rounds, stored, truth
from fusecomp.patterns.scalars import (
    clamp,
    doubled,
    either_bit,
    exponential,
    fmod,
    halved,
    larger,
    logaddexp,
    logit,
    low_bits,
    nan_to_num,
    power,
    real,
    remainder,
    sign,
    sinc,
    trunc,
)


def arithmetic(op: str) -> Callable[..., Expr]:
    return lambda *args: apply(op, *map(real, args))


def logical(op: str) -> Callable[..., Expr]:
    return lambda *args: apply(op, *map(truth, args))


def bitwise(op: str) -> Callable[..., Expr | None]:
    """~ ^ on truth values; on integers they are not lifted."""
    return lambda *args: apply(op, *args) if all(kind(a) == "bool" for a in args) else None


POINTWISE: dict[str, Callable[..., Expr | None]] = {
    "mul": arithmetic("mul"), "multiply": arithmetic("mul"),
    "div": arithmetic("div"), "true_divide": arithmetic("div"), "divide": arithmetic("div"),
    "neg": arithmetic("neg"), "negative": arithmetic("neg"), "abs": arithmetic("abs"),
    "pow": power, "square": lambda x: power(x, const(2)), "reciprocal": lambda x: apply("div", const(1.0), real(x)),
    "logaddexp": logaddexp,
    "exp": exponential, "exp2": lambda x: exponential(apply("mul", real(x), const(LOG2))),
    "special_exp2": lambda x: exponential(apply("mul", real(x), const(LOG2))),
    "log": arithmetic("log"), "log2": arithmetic("log2"), "log1p": lambda x: apply("log", apply("add", x, const(1.0))),
    "sqrt": arithmetic("sqrt"), "rsqrt": arithmetic("rsqrt"), "sin": arithmetic("sin"), "cos": arithmetic("cos"),
    "erf": arithmetic("erf"), "floor": arithmetic("floor"), "ceil": arithmetic("ceil"),
    "tanh": arithmetic("tanh"), "sigmoid": arithmetic("sigmoid"),
    "special_expit": arithmetic("sigmoid"), "expm1": lambda x: apply("sub", apply("exp", x), const(1.0)),
    "erfc": lambda x: apply("sub", const(1.0), apply("erf", x)),
    "asinh": arithmetic("asinh"), "arcsinh": arithmetic("asinh"),
    "atan": arithmetic("atan"), "arctan": arithmetic("atan"), "sinc": sinc, "special_sinc": sinc,
    "logit": logit, "special_logit": logit,
    "hypot": lambda x, y: apply("sqrt", apply("add", apply("mul", x, x), apply("mul", y, y))),
    "sinh": lambda x: apply("mul", apply("sub", apply("exp", x), apply("exp", apply("neg", x))), const(0.5)),
    "cosh": lambda x: apply("mul", apply("add", apply("exp", x), apply("exp", apply("neg", x))), const(0.5)),
    "sign": sign, "sgn": sign, "trunc": trunc, "fix": trunc, "frac": lambda x: apply("sub", x, trunc(x)),
    "relu": act.relu, "silu": lambda x: apply("mul", x, apply("sigmoid", x)), "mish": act.mish,
    "gelu": act.gelu, "elu": act.elu, "selu": act.selu, "celu": act.celu, "leaky_relu": act.leaky_relu,
    "rrelu": act.rrelu, "hardtanh": act.hardtanh, "relu6": lambda x: act.hardtanh(x, const(0.0), const(6.0)),
    "hardsigmoid": act.hardsigmoid, "hardswish": act.hardswish, "threshold": act.threshold,
    "hardshrink": act.hardshrink, "softshrink": act.softshrink, "softplus": act.softplus,
    "log_sigmoid": lambda x: apply("neg", act.softplus(apply("neg", x))),  # type: ignore[arg-type]
    "addcmul": lambda x, y, z, value=ONE: apply("add", x, apply("mul", apply("mul", y, z), value)),
    "addcdiv": lambda x, y, z, value=ONE: apply("add", x, apply("mul", apply("div", y, z), value)),
    "lerp": lambda x, y, w: apply("add", x, apply("mul", w, apply("sub", y, x))),
    "maximum": partial(larger, "max"), "minimum": partial(larger, "min"),
    "clamp": clamp, "clip": clamp, "clamp_min": clamp, "clamp_max": lambda x, high: clamp(x, None, high),
    "where": lambda c, x, y: apply("where", truth(c), *same_kind(x, y)),
    "masked_fill": lambda x, m, fill: apply("where", truth(m), *same_kind(fill, x)),
    "eq": lambda a, b: apply("eq", *same_kind(a, b)), "ne": lambda a, b: apply("ne", *same_kind(a, b)),
    "not_equal": lambda a, b: apply("ne", *same_kind(a, b)),
    "lt": arithmetic("lt"), "le": arithmetic("le"), "gt": arithmetic("gt"), "ge": arithmetic("ge"),
    "less": arithmetic("lt"), "less_equal": arithmetic("le"), "greater": arithmetic("gt"),
    "greater_equal": arithmetic("ge"),
    "logical_and": logical("and"), "logical_or": logical("or"), "logical_not": logical("not"),
    "logical_xor": logical("xor"), "bitwise_and": low_bits, "bitwise_or": either_bit,
    "bitwise_xor": bitwise("xor"), "bitwise_not": bitwise("not"),
    "__and__": low_bits, "__or__": either_bit, "__xor__": bitwise("xor"),
    "bitwise_right_shift": halved, "__rshift__": halved, "bitwise_left_shift": doubled, "__lshift__": doubled,
    "isnan": lambda x: apply("isnan", x), "nan_to_num": nan_to_num,
    "isneginf": lambda x: apply("eq", x, const(-INF)), "isposinf": lambda x: apply("eq", x, const(INF)),
    "isinf": lambda x: apply("eq", apply("abs", x), const(INF)),
    "isfinite": lambda x: apply("lt", apply("abs", x), const(INF)),
    "remainder": lambda a, b: apply("mod", a, b) if natural_divisor(a, b) else remainder(a, b),
    "fmod": lambda a, b: apply("mod", a, b) if natural_divisor(a, b) and is_natural(a) else fmod(a, b),
    "floor_divide": lambda a, b: apply("floordiv", a, b) if natural_divisor(a, b) else None,
}  # fmt: skip
"""ATen name: the scalar it computes from the scalars of its arguments."""

COSTLY = {
    "exp", "exp2", "log", "log2", "log1p", "logaddexp", "pow", "sin", "cos", "erf", "tanh", "sigmoid", "silu", "sqrt",
    "rsqrt", "gelu", "elu", "selu", "celu", "mish", "softplus", "log_sigmoid", "special_expit", "expm1", "sinh", "cosh",
    "asinh", "arcsinh", "atan", "arctan", "erfc", "hypot", "logit", "special_logit", "sinc", "special_sinc",
}  # fmt: skip
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
        if name in COMPARISONS and any(rounds(lift, x, e) for x, e in zip(node.args, args, strict=True)):
            return None
        args = compared(node.args, args) if name in COMPARISONS else args
        if any(v is not None and k not in ARGUMENT for k, v in node.kwargs.items()):
            return None
        given = {ARGUMENT[k]: v for k, v in node.kwargs.items() if k in ARGUMENT and v is not None}
        words = {k: v if isinstance(v, str) else lift_argument(lift, node, v, index) for k, v in given.items()}
        e = f(*args, **words)
        if e is None or (name in COSTLY and not (lift.holds_score(e) or isinstance(e, Const) or constant_row(name, e))):
            return None
        return stored(e, dtype(node))

    return lifted


COMPARISONS = {"eq", "ne", "not_equal", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"}


def constant_row(name: str, e: Expr) -> bool:
    """Exponentials of what is the same for every query and key, such as a sink, cost nothing."""
    return name == "exp" and "q_idx" not in variables(e) and not runs_over_keys(e)


ARGUMENT = {
    "min": "low", "max": "high", "nan": "nan", "posinf": "top", "neginf": "low", "value": "value",
    "approximate": "approximate",
}  # fmt: skip


def rounded_division(lift: Lift, node: Node, index: Index) -> Expr | None:
    """div(a, b, rounding_mode=...) of integers; "trunc" and "floor" are one for a >= 0"""
    a, b = (lift_argument(lift, node, x, index) for x in node.args)
    floor = natural_divisor(a, b) and (node.kwargs["rounding_mode"] == "floor" or is_natural(a))
    return apply("floordiv", a, b) if floor else None


for _name in POINTWISE:
    RULES[_name] = pointwise(_name)


@rule("add", "sub", "rsub", "subtract")
def added(lift: Lift, node: Node, index: Index) -> Expr:
    """a + alpha b, a - alpha b, b - alpha a; of two truth values, either"""
    a, b = (lift_argument(lift, node, x, index) for x in node.args[:2])
    if dtype(node) == "bool":
        return apply("or", truth(a), truth(b))
    a, b = real(a), real(b)
    alpha = number(argument(node, 2, "alpha", 1))
    if alpha is None:
        raise Decline("alpha is not a number", node)
    if op_name(node) == "rsub":
        a, b = b, a
    b = b if alpha in (ONE, const(1.0)) else apply("mul", b, alpha)
    op = "add" if "add" in op_name(node) else "sub"
    lost = absorbed(lift, a, b if op == "add" else apply("neg", b), dtype(node))
    return stored(lost or apply(op, a, b), dtype(node))


@rule("prelu")
def prelu(lift: Lift, node: Node, index: Index) -> Expr:
    """x if x > 0 else w x, with a w for all or for each place in the second axis"""
    x, weight = (lift.lift(node.args[0], index), node.args[1])
    one = len(shape(weight)) == 0 or shape(weight) == (ONE,)
    w = lift.lift(weight, tuple(ZERO if one else index[1] for _ in shape(weight)))
    return act.leaky_relu(x, w)


@rule("max", "min")
def largest(lift: Lift, node: Node, index: Index) -> Expr | None:
    """max(a, b) of two tensors; max over everything"""
    if len(node.args) == 1 and op_name(node) == "max":
        return reduced(lift, node, index, "max")
    if len(node.args) != 2 or not isinstance(node.args[1], Node):
        return None
    return larger("max" if "max" in op_name(node) else "min", *(lift_argument(lift, node, x, index) for x in node.args))


BYTES = 2
"""Of the smallest float to which rounding is noise."""


@rule("to", "_to_copy", "type_as", "float", "half", "bfloat16", "double", "long", "bool", "int",
      "_autocast_to_reduced_precision", "_autocast_to_full_precision")  # fmt: skip
def casted(lift: Lift, node: Node, index: Index) -> Expr | None:
    """The same value in another dtype. Kernels compute scores in float32, so roundings between float types drop out;
    to a few bits they are meant: scores are not rounded so, and what else is, the graph rounds."""
    e, to = lift.lift(node.args[0], index), dtype(node)
    tensors = [value(n) for n in (node, node.args[0]) if is_tensor(n)]
    coarse = any(v.is_floating_point() and v.dtype.itemsize < BYTES for v in tensors)
    if (dtype_kind(to) == "int" or coarse) and lift.holds_score(e):
        raise Decline(f"scores are rounded to {to}", node, "keep them in a floating-point dtype of 16 bits")
    e = e if to == "float64" or lift.holds_score(e) else single(e)
    return None if coarse else retyped(e, to)


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
