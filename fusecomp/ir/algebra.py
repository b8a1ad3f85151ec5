"""Arithmetic on expressions: constants fold, integer arithmetic is kept in one normal form, facts decide comparisons.

Index arithmetic is polynomial: a sum of integer multiples of products of indices and sizes. Two polynomials are the
same function exactly when their normal forms are equal, which is what lets `(h * D + d) // D` become `h`.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any

import torch

from fusecomp.ir.expr import Apply, Cast, Const, Expr, Size, Var, kind, parts, transform
from fusecomp.ir.primitives import PRIMITIVES

Monomial = tuple[Expr, ...]
Poly = dict[Monomial, int]

TRUE, FALSE, ZERO, ONE = Const(True), Const(False), Const(0), Const(1)


def const(value: Any) -> Const:
    """A Python number or truth value as an expression."""
    return Const(value if isinstance(value, bool | int) else float(value))


# ----------------------------------------------------------------------------------------------------------------
# Polynomials over the integers


@lru_cache(maxsize=20_000)
def _poly(e: Expr) -> tuple[tuple[Monomial, int], ...]:
    match e:
        case Const(int(value)):
            return (((), int(value)),) if value else ()
        case Apply("add", (a, b)):
            return _freeze(_plus(poly(a), poly(b), 1))
        case Apply("sub", (a, b)):
            return _freeze(_plus(poly(a), poly(b), -1))
        case Apply("neg", (a,)):
            return _freeze(_plus({}, poly(a), -1))
        case Apply("mul", (a, b)):
            return _freeze(_times(poly(a), poly(b)))
        case _:
            return (((e,), 1),)


def poly(e: Expr) -> Poly:
    """The polynomial of an integer expression; what is not + - * is an indeterminate."""
    return dict(_poly(e))


def _freeze(p: Poly) -> tuple[tuple[Monomial, int], ...]:
    return tuple((m, c) for m, c in p.items() if c)


def _plus(p: Poly, q: Poly, sign: int) -> Poly:
    total = Counter(p)
    for monomial, c in q.items():
        total[monomial] += sign * c
    return {m: c for m, c in total.items() if c}


def _times(p: Poly, q: Poly) -> Poly:
    total: Counter[Monomial] = Counter()
    for m1, c1 in p.items():
        for m2, c2 in q.items():
            total[tuple(sorted(m1 + m2, key=str))] += c1 * c2
    return {m: c for m, c in total.items() if c}


def from_poly(p: Poly) -> Expr:
    """The expression of a polynomial: positive terms first, then the larger monomials, constants last."""
    terms = sorted(((m, c) for m, c in p.items() if c), key=lambda t: (t[1] < 0, -len(t[0]), str(t[0])))
    total: Expr | None = None
    for monomial, c in terms:
        term = _product(monomial, abs(c) if total is not None else c)
        if total is None:
            total = term
        else:
            total = Apply("add" if c > 0 else "sub", (total, term))
    return total if total is not None else ZERO


def _product(monomial: Monomial, c: int) -> Expr:
    factors: list[Expr] = list(monomial)
    if c != 1 or not factors:
        factors.append(Const(c))
    product = factors[0]
    for factor in factors[1:]:
        product = Apply("mul", (product, factor))
    return product


def always_natural(p: Poly) -> bool:
    """Whether p >= 0 for every value of its indices and sizes (sizes are at least 1). False where unknown."""
    lowest: Poly = {}
    for monomial, c in p.items():
        term: Poly = {(): c}
        for factor in monomial:
            term = _times(term, _least(factor, c))
        if term == {(): 0} and monomial:
            return False
        lowest = _plus(lowest, term, 1)
    return all(c >= 0 for c in lowest.values())


def _least(factor: Expr, c: int) -> Poly:
    """What stands for `factor` where c * factor is least: sizes become 1 + something natural."""
    match factor:
        case Var(_, size):
            return {} if c >= 0 else _at_least_one(_plus(poly(size), {(): 1}, -1))
        case Size():
            return {(): 1, (factor,): 1}
        case Apply("floordiv" | "mod") if c >= 0:
            return {}
        case Apply("mod", (_, m)):
            return _at_least_one(_plus(poly(m), {(): 1}, -1))
        case Apply("floordiv", (a, Const(int(m)))) if (top := upper(a)) is not None:
            return {(): top // m}
        case _:
            return {(): -(10**18)} if c > 0 else {(): 10**18}


def _at_least_one(p: Poly) -> Poly:
    total: Poly = {}
    for monomial, c in p.items():
        term: Poly = {(): c}
        for factor in monomial:
            term = _times(term, {(): 1, (factor,): 1} if isinstance(factor, Size) else {(factor,): 1})
        total = _plus(total, term, 1)
    return total


def upper(e: Expr) -> int | None:
    """A constant that integer `e` never exceeds, or None."""
    top = 0
    for monomial, c in poly(e).items():
        for factor in monomial:
            match factor:
                case Var(_, Const(int(size))) if c > 0:
                    c *= size - 1
                case Apply("mod", (_, Const(int(m)))) if c > 0:
                    c *= m - 1
                case Var() | Size() | Apply("mod" | "floordiv") if c < 0:
                    c = 0
                case _:
                    return None
        top += c
    return top


def is_natural(e: Expr) -> bool:
    """Whether the integer e is provably >= 0."""
    return always_natural(poly(e))


# ----------------------------------------------------------------------------------------------------------------
# Building


def apply(op: str, *args: Expr) -> Expr:
    """op(*args), simplified: the one way to build arithmetic."""
    if all(isinstance(a, Const) for a in args):
        return _fold(op, args)
    if op in ("add", "sub", "mul", "neg") and all(kind(a) == "int" for a in args):
        return from_poly(poly(Apply(op, args)))
    if op == "floordiv":
        return _floordiv(*args)
    if op == "mod":
        return _mod(*args)
    if op in COMPARE:
        return _compare(op, *args)
    return _identity(op, args) or _through_choice(op, args) or Apply(op, args)


def _through_choice(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """f(c ? A : B) = c ? f(A) : f(B) for constants A and B: how `tril(ones) == 0` becomes a predicate."""
    if op == "where":
        return None
    choices = [a for a in args if not isinstance(a, Const)]
    match choices:
        case [Apply("where", (c, Const() as x, Const() as y)) as choice]:
            at_x, at_y = (apply(op, *(v if a is choice else a for a in args)) for v in (x, y))
            return apply("where", c, at_x, at_y)
    return None


def _fold(op: str, args: tuple[Expr, ...]) -> Expr:
    kinds = {kind(a) for a in args}
    dtype = torch.float64 if "float" in kinds else torch.int64
    values = [torch.tensor(a.value, dtype=torch.bool if kind(a) == "bool" else dtype) for a in args]  # type: ignore[attr-defined]
    value = PRIMITIVES[op].evaluate(*values).item()
    return Const(bool(value)) if PRIMITIVES[op].kind == "bool" else const(value)


COMPARE = {"lt": (1, 1), "gt": (-1, 1), "le": (1, 0), "ge": (-1, 0)}
"""op: (sign, strict). a op b  <=>  sign * (b - a) >= strict, over the integers."""


def _compare(op: str, a: Expr, b: Expr) -> Expr:
    """Decided where the extents of the indices decide it."""
    if kind(a) == "float" or kind(b) == "float":
        return _through_choice(op, (a, b)) or Apply(op, (a, b))
    sign, strict = COMPARE[op]
    slack = _plus(_plus({}, poly(b), sign), poly(a), -sign)  # a op b  <=>  slack >= strict
    if always_natural(_plus(slack, {(): strict}, -1)):
        return TRUE
    if always_natural(_plus({(): strict - 1}, slack, -1)):
        return FALSE
    return _through_choice(op, (a, b)) or Apply(op, (a, b))


def _identity(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """x + 0, x * 1, x and True, not not x ... : the rules that hold for floats too (so x * 0 is not 0)."""
    match op, args:
        case ("add", (x, Const(0 | 0.0))) | ("add", (Const(0 | 0.0), x)) | ("sub", (x, Const(0 | 0.0))):
            return x if kind(x) == kind(Apply(op, args)) else None
        case ("mul" | "div", (x, Const(1 | 1.0 as one))) | ("mul", (Const(1 | 1.0 as one), x)):
            return x if one is not True and kind(x) == kind(Apply(op, args)) else None
        case "div", (x, Const(float() | int() as c)) if c and math.frexp(c)[0] in (0.5, -0.5):
            return apply("mul", x, Const(1.0 / c))
        case ("and", (x, Const(True))) | ("and", (Const(True), x)) | ("or", (x, Const(False))) | ("or", (Const(False), x)):
            return x
        case ("and", (_, Const(False))) | ("and", (Const(False), _)):
            return FALSE
        case ("or", (_, Const(True))) | ("or", (Const(True), _)):
            return TRUE
        case ("and" | "or"), (x, y) if x == y:
            return x
        case "not", (Apply("not", (x,)),):
            return x
        case "not", (Apply(inverse, (x, y)),) if inverse in NEGATED and kind(x) != "float" and kind(y) != "float":
            return apply(NEGATED[inverse], x, y)
        case "where", (Const(c), x, y):
            return x if c else y
        case "where", (_, x, y) if x == y:
            return x
        case "where", (c, Const(True), Const(False)):
            return c
        case "where", (c, Const(False), Const(True)):
            return apply("not", c)
        case "neg", (Apply("neg", (x,)),):
            return x
        case ("eq", (x, y)) if x == y and kind(x) != "float":
            return TRUE
        case ("ne", (x, y)) if x == y and kind(x) != "float":
            return FALSE
    return None


NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _split(e: Expr, c: Expr) -> tuple[Poly, Poly, bool] | None:
    """(quotient, rest, small) with e = c * quotient + rest and rest >= 0; `small` says that rest < c too."""
    divisor = poly(c)
    if len(divisor) != 1:
        return None
    ((factors, size),) = divisor.items()
    quotient: Poly = {}
    rest: Poly = {}
    for monomial, k in poly(e).items():
        left = list(monomial)
        if all(f in left and not left.remove(f) for f in factors) and k % size == 0:
            quotient[tuple(left)] = quotient.get(tuple(left), 0) + k // size
        elif not factors and size and not monomial:  # a constant: split it
            quotient[()], rest[()] = quotient.get((), 0) + k // size, k % size
        else:
            rest[monomial] = k
    if not always_natural(rest):
        return None
    small = always_natural(_plus(_plus(divisor, rest, -1), {(): 1}, -1))
    return _plus(quotient, {}, 1), rest, small


def _floordiv(a: Expr, b: Expr) -> Expr:
    """a // b for a >= 0 < b; elsewhere spelled through the naturals, since Triton divides towards zero."""
    if b == ONE:
        return a
    if (split := _split(a, b)) and (split[2] or split[0]):  # (c q + r) // c = q + r // c
        quotient, rest, small = split
        return from_poly(quotient if small else _plus(quotient, poly(_floordiv(from_poly(rest), b)), 1))
    match a:
        case Apply("floordiv", (x, c)):  # (x // c) // b = x // (c b)
            return apply("floordiv", x, apply("mul", c, b))
    if is_natural(a):
        return Apply("floordiv", (a, b))
    # a // b = (a - a mod b) / b, where the difference is an exact multiple of b in either rounding
    return Apply("floordiv", (from_poly(_plus(poly(a), poly(_mod(a, b)), -1)), b))


def _mod(a: Expr, b: Expr) -> Expr:
    """a mod b in [0, b)."""
    if b == ONE:
        return ZERO
    if (split := _split(a, b)) and (split[2] or split[0]):  # (c q + r) mod c = r mod c
        return from_poly(split[1]) if split[2] else _mod(from_poly(split[1]), b)
    inner = Apply("mod", (a, b))
    return inner if is_natural(a) else Apply("mod", (from_poly(_plus(poly(inner), poly(b), 1)), b))


def cast(x: Expr, dtype: str) -> Expr:
    """x rounded to dtype: constants at once, and never where it changes nothing."""
    if isinstance(x, Const):
        value = torch.tensor(x.value, dtype=torch.float64 if isinstance(x.value, float) else None)
        return const(value.to(getattr(torch, dtype)).item())
    if kind(x) == "int" and dtype in ("int64", "int32"):
        return x
    if isinstance(x, Apply) and x.op == "where" and all(isinstance(y, Const) for y in x.operands[1:]):
        return apply("where", x.operands[0], *(cast(y, dtype) for y in x.operands[1:]))
    if isinstance(x, Cast) and x.dtype == dtype:
        return x
    if getattr(x, "dtype", None) == dtype:
        return x
    return Cast(x, dtype)


def substitute(e: Expr, values: dict[Expr, Expr]) -> Expr:
    """`e` with every occurrence of a key replaced, and simplified again."""
    return transform(e, values.get, apply)


def depends_on_score(e: Expr) -> bool:
    """Whether `e` holds an element of Q K^T."""
    return any(type(x).__name__ == "Score" for x in parts(e))
