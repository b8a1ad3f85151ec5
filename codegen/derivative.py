"""dS/dx, symbolically: what a gradient of S is multiplied by to become that of a product, or of a tensor it reads.

    (f(g))' = f'(g) g'          one row of RULES for each primitive, its partial derivatives

Rounding passes a gradient through, as autograd does; predicates, floor and ceil have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fusecomp.codegen.cheaper import times
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply, cast
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Score, dtype_kind, kind, parts

ZERO, ONE = Const(0.0), Const(1.0)
Partials = Callable[..., tuple[Expr, ...]]

RULES: dict[str, Partials] = {
    # name: (f(x, ...), x, ...) -> (df/dx, ...)
    "add": lambda f, x, y: (ONE, ONE),
    "sub": lambda f, x, y: (ONE, Const(-1.0)),
    "mul": lambda f, x, y: (y, x),
    "div": lambda f, x, y: (_over(ONE, y), apply("neg", _over(f, y))),
    "neg": lambda f, x: (Const(-1.0),),
    "abs": lambda f, x: (_choice("ge", x, ZERO, _choice("gt", x, ZERO, ONE, ZERO), Const(-1.0)),),
    "max": lambda f, x, y: _nearer("gt", "ge", x, y),
    "min": lambda f, x, y: _nearer("lt", "le", x, y),
    "where": lambda f, c, x, y: (ZERO, apply("where", c, ONE, ZERO), apply("where", c, ZERO, ONE)),
    "exp": lambda f, x: (f,),
    "exp2": lambda f, x: (times(f, math.log(2.0)),),
    "log": lambda f, x: (_over(ONE, x),),
    "log2": lambda f, x: (_over(Const(1.0 / math.log(2.0)), x),),
    "sqrt": lambda f, x: (_over(Const(0.5), f),),
    "rsqrt": lambda f, x: (times(_over(f, x), -0.5),),
    "pow": lambda f, x, y: (
        apply("mul", y, apply("pow", x, apply("sub", y, ONE))),
        _choice("eq", x, ZERO, ZERO, apply("mul", f, apply("log", x))),
    ),
    "sin": lambda f, x: (apply("cos", x),),
    "cos": lambda f, x: (apply("neg", apply("sin", x)),),
    "asinh": lambda f, x: (apply("rsqrt", apply("add", apply("mul", x, x), ONE)),),
    "atan": lambda f, x: (_over(ONE, apply("add", apply("mul", x, x), ONE)),),
    "erf": lambda f, x: (times(apply("exp", apply("neg", apply("mul", x, x))), 2.0 / math.sqrt(math.pi)),),
    "floor": lambda f, x: (ZERO,),
    "ceil": lambda f, x: (ZERO,),
    "tanh": lambda f, x: (apply("sub", ONE, apply("mul", f, f)),),
    "sigmoid": lambda f, x: (apply("mul", f, apply("sub", ONE, f)),),
}


def d_score(score: Expr, term: int = 0) -> Expr:
    """dS/dscore_term."""
    return derivative(score, Score(term))


def derivative(e: Expr, x: Score | Load) -> Expr:
    """de/dx."""
    memo: dict[Expr, Expr] = {}

    def walk(y: Expr) -> Expr:
        if y not in memo:
            memo[y] = _derivative(y, x, walk)
        return memo[y]

    return walk(e)


def _derivative(e: Expr, x: Score | Load, walk: Callable[[Expr], Expr]) -> Expr:
    match e:
        case _ if e == x:
            return ONE
        case _ if x not in set(parts(e)) or kind(e) == "bool":
            return ZERO
        case Cast(y, dtype) if dtype_kind(dtype) == "float":
            return walk(y)
        case Apply("where", (c, y, z)):
            return apply("where", c, walk(y), walk(z))
        case Apply("div", (Apply("sin", (y,)), z)) if y == z:
            return _product(_slope_of_sinc(e, y), walk(y))
        case Apply("div", (y, z)) if ZERO not in (walk(y), walk(z)):  # both parts may cancel, before they are divided
            return _over(apply("sub", walk(y), _product(e, walk(z))), z)
        case Apply(op, args) if op in RULES:
            total: Expr = ZERO
            for partial, y in zip(RULES[op](e, *args), args, strict=True):
                total = _sum(total, _product(partial, walk(y)))
            return total
    raise KernelError(f"no backward kernel: {e} has no derivative by {x} here")


def _slope_of_sinc(f: Expr, x: Expr) -> Expr:
    """(cos x - f) / x of f = sin x / x. Near 0 the parts of it are alike up to x^2 / 3, and float32 keeps few digits of
    their difference: where x^2 < 1 it is a series, -x / 3 + x^3 / 30 - x^5 / 840 .."""
    near: Expr = ZERO
    square = apply("mul", x, x)
    for k in range(SERIES, 0, -1):
        near = _sum(Const((-1.0) ** k * 2 * k / math.factorial(2 * k + 1)), _product(square, near))
    far = _over(apply("sub", apply("cos", x), f), x)
    return _choice("lt", square, ONE, apply("mul", x, near), far)


SERIES = 6
"""Terms, the next of which is less than 1e-10 of the first."""


def _sum(x: Expr, y: Expr) -> Expr:
    if x == ZERO or y == ZERO:
        return y if x == ZERO else x
    return apply("add", x, y)


def _product(x: Expr, y: Expr) -> Expr:
    """x y with its constant factor last and once, 0 where either is."""
    if ZERO in (x, y):
        return ZERO
    (a, c), (b, d) = factored(x), factored(y)
    body = b if a == ONE else a if b == ONE else apply("mul", a, b)
    return body if c * d == 1.0 else Const(c * d) if body == ONE else times(body, c * d)


def factored(e: Expr) -> tuple[Expr, float]:
    """(x, c) with e = c x, where x has no constant factor: 1.0 where e is a constant."""
    match e:
        case Const(c):
            return (ONE, float(c)) if c else (ZERO, 1.0)
        case Apply("mul", (x, Const(c))) | Apply("mul", (Const(c), x)) if kind(x) == "float" and c:
            body, inner = factored(x)
            return body, inner * float(c)
        case Apply("div", (x, Const(c))) if kind(x) == "float" and c:
            body, inner = factored(x)
            return body, inner / float(c)
        case Apply("neg", (x,)) if kind(x) == "float":
            body, inner = factored(x)
            return body, -inner
        case Apply("mul", (x, y)) if kind(x) == "float" and kind(y) == "float":
            (a, c), (b, d) = factored(x), factored(y)
            return (e, 1.0) if c * d == 1.0 else (apply("mul", a, b), c * d)
    return e, 1.0


def _over(x: Expr, y: Expr) -> Expr:
    return apply("div", x, cast(y, "float32") if kind(y) == "int" else y)


def _nearer(strictly: str, loosely: str, x: Expr, y: Expr) -> tuple[Expr, ...]:
    """Of the larger or the smaller of two: half for each where they are equal; all for x where y is the bound of a
    clamp, a number (see `patterns/scalars.py`)."""
    if isinstance(y, Const):
        return _choice(loosely, x, y, ONE, ZERO), ZERO
    mine = _choice(strictly, x, y, ONE, _choice("eq", x, y, Const(0.5), ZERO))
    return mine, apply("sub", ONE, mine)


def _choice(op: str, x: Expr, y: Expr, yes: Expr, no: Expr) -> Expr:
    return apply("where", apply(op, x, y), yes, no)
