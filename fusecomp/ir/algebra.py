"""Arithmetic on expressions: constants fold, integer arithmetic is kept in one normal form, facts decide comparisons.

Integer + - * is polynomial (`poly`); what is left here is everything that is not.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from fusecomp.ir.expr import Apply, Cast, Const, Expr, kind, parts, transform
from fusecomp.ir.poly import Monomial, Poly, always_natural, from_poly, is_natural, plus, poly, times
from fusecomp.ir.primitives import PRIMITIVES

TRUE, FALSE, ZERO, ONE = Const(True), Const(False), Const(0), Const(1)


def const(value: Any) -> Const:
    """A Python number or truth value as an expression."""
    return Const(value if isinstance(value, bool | int) else float(value))


@lru_cache(maxsize=1 << 14)
def apply(op: str, *args: Expr) -> Expr:
    """op(*args), simplified: the one way to build arithmetic. Layers of a model ask the same again and again."""
    if all(isinstance(a, Const) for a in args):
        return _fold(op, args)
    if op in ("add", "sub", "mul", "neg") and all(kind(a) == "int" for a in args):
        return from_poly(_rejoined(poly(Apply(op, args))))
    if op in ("floordiv", "mod"):
        return _divided_choice(op, *args) or (_floordiv(*args) if op == "floordiv" else _mod(*args))
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


def _divided_choice(op: str, a: Expr, b: Expr) -> Expr | None:
    """(c ? x : y) // b = c ? x // b : y // b where both divide: a slot number becomes its page and its place there."""
    match a:
        case Apply("where", (c, x, y)) if all((s := _split(z, b)) is not None and s[2] for z in (x, y)):
            return apply("where", c, apply(op, x, b), apply(op, y, b))
    return None


def _fold(op: str, args: tuple[Expr, ...]) -> Expr:
    kinds = {kind(a) for a in args}
    dtype = torch.float64 if "float" in kinds else torch.int64
    values = [torch.tensor(a.value, dtype=torch.bool if kind(a) == "bool" else dtype, device="cpu") for a in args]  # type: ignore[attr-defined]
    value = PRIMITIVES[op].evaluate(*values).item()
    return Const(bool(value)) if PRIMITIVES[op].kind == "bool" else const(value)


COMPARE = {"lt": (1, 1), "gt": (-1, 1), "le": (1, 0), "ge": (-1, 0)}
"""op: (sign, strict). a op b  <=>  sign * (b - a) >= strict, over the integers."""


def _compare(op: str, a: Expr, b: Expr) -> Expr:
    """Decided where the extents of the indices decide it."""
    if kind(a) == "float" or kind(b) == "float":
        return _through_choice(op, (a, b)) or Apply(op, (a, b))
    sign, strict = COMPARE[op]
    slack = plus(plus({}, poly(b), sign), poly(a), -sign)  # a op b  <=>  slack >= strict
    if always_natural(plus(slack, {(): strict}, -1)):
        return TRUE
    if always_natural(plus({(): strict - 1}, slack, -1)):
        return FALSE
    if op in ("lt", "ge") and b == ZERO and (coarser := _sign_of_quotient(a)) is not None:
        return apply(op, coarser, ZERO)
    return _through_choice(op, (a, b)) or Apply(op, (a, b))


def _sign_of_quotient(e: Expr) -> Expr | None:
    """q of e = c q + r with 0 <= r < c: e is negative exactly where q is."""
    for c in sorted({abs(k) for k in poly(e).values() if abs(k) > 1}):
        split = _split(e, const(c))
        if split is not None and split[2] and split[0]:
            return from_poly(split[0])
    return None


def _identity(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """x + 0, x and True, c ? x : x ... : the rules that hold for floats too (so x * 0 is not 0)."""
    return _number_itself(op, args) or _truth_itself(op, args) or _choice_itself(op, args)


def _number_itself(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """x + 0 = x * 1 = --x = x, x / 2^n = x * 2^-n, the larger of two is known."""
    match op, args:
        case ("add", (x, Const(0 | 0.0))) | ("add", (Const(0 | 0.0), x)) | ("sub", (x, Const(0 | 0.0))):
            return x if kind(x) == kind(Apply(op, args)) else None
        case ("mul" | "div", (x, Const(1 | 1.0 as one))) | ("mul", (Const(1 | 1.0 as one), x)):
            return x if one is not True and kind(x) == kind(Apply(op, args)) else None
        case "div", (x, Const(float() | int() as c)) if c and math.frexp(c)[0] in (0.5, -0.5):
            return apply("mul", x, Const(1.0 / c))
        case "neg", (Apply("neg", (x,)),):
            return x
        case ("max" | "min"), (x, y) if kind(x) == kind(y) == "int":
            least, most = (x, y) if op == "max" else (y, x)
            return x if apply("ge", least, most) == TRUE else y if apply("ge", most, least) == TRUE else None
    return None


def _truth_itself(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """x and True = x or False = x and x = not not x = x, not x < y = x >= y."""
    match op, args:
        case ("and", (x, Const(True))) | ("and", (Const(True), x)):
            return x
        case ("or", (x, Const(False))) | ("or", (Const(False), x)):
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
        case ("eq", (x, y)) if x == y and kind(x) != "float":
            return TRUE
        case ("ne", (x, y)) if x == y and kind(x) != "float":
            return FALSE
    return None


NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _choice_itself(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """c ? x : x = x, c ? True : False = c, c ? x : False = c and x."""
    match op, args:
        case "where", (Const(c), x, y):
            return x if c else y
        case "where", (_, x, y) if x == y:
            return x
        case "where", (c, Const(True), Const(False)):
            return c
        case "where", (c, Const(False), Const(True)):
            return apply("not", c)
        case "where", (c, Const(True), x) if kind(x) == "bool":
            return apply("or", c, x)
        case "where", (c, x, Const(False)) if kind(x) == "bool":
            return apply("and", c, x)
    return None


def _rejoined(p: Poly) -> Poly:
    """c k (x // c) + k (x mod c) = k x: what was taken apart and put together again."""
    for monomial, k in p.items():
        for rest in monomial:
            match rest:
                case Apply("mod", (x, Const(int(c)))):
                    others = list(monomial)
                    others.remove(rest)
                    quotient = tuple(sorted([*others, Apply("floordiv", (x, Const(c)))], key=str))
                    if p.get(quotient) == k * c:
                        left = {m: n for m, n in p.items() if m not in (monomial, quotient)}
                        return _rejoined(plus(left, times({tuple(others): k}, poly(x)), 1))
    return p


def _split(e: Expr, c: Expr) -> tuple[Poly, Poly, bool] | None:
    """(quotient, rest, small) with e = c * quotient + rest and rest >= 0; `small` says that rest < c too."""
    divisor = poly(c)
    if len(divisor) != 1:
        return None
    ((factors, size),) = divisor.items()
    quotient: Poly = {}
    rest: Poly = {}
    for monomial, k in poly(e).items():
        left = _without(monomial, factors)
        if left is not None and k % size == 0:
            quotient[left] = quotient.get(left, 0) + k // size
        elif not factors and size and not monomial:  # a constant: split it
            quotient[()], rest[()] = quotient.get((), 0) + k // size, k % size
        else:
            rest[monomial] = k
    if not always_natural(rest):
        return None
    small = always_natural(plus(plus(divisor, rest, -1), {(): 1}, -1))
    return plus(quotient, {}, 1), rest, small


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    """monomial / factors, or None where it does not divide."""
    left = list(monomial)
    for f in factors:
        if f not in left:
            return None
        left.remove(f)
    return tuple(left)


def _floordiv(a: Expr, b: Expr) -> Expr:
    """a // b for a >= 0 < b; elsewhere spelled through the naturals, since Triton divides towards zero."""
    if b == ONE:
        return a
    if (split := _split(a, b)) and (split[2] or split[0]):  # (c q + r) // c = q + r // c
        quotient, rest, small = split
        return from_poly(quotient if small else plus(quotient, poly(_floordiv(from_poly(rest), b)), 1))
    if coarser := _coarser(a, b):  # (g q + r) // (g c) = q // c
        return _floordiv(from_poly(coarser[0]), coarser[3])
    match a:
        case Apply("floordiv", (x, c)):  # (x // c) // b = x // (c b)
            return apply("floordiv", x, apply("mul", c, b))
    if is_natural(a) or _is_multiple(a, b):
        return Apply("floordiv", (a, b))
    # a // b = (a - a mod b) / b, where the difference is an exact multiple of b in either rounding
    return Apply("floordiv", (from_poly(plus(poly(a), poly(_mod(a, b)), -1)), b))


def _coarser(a: Expr, b: Expr) -> tuple[Poly, Poly, Expr, Expr] | None:
    """(q, r, g, c) with a = g q + r, 0 <= r < g and b = g c, for the largest such number g above 1."""
    if not isinstance(b, Const):
        return None
    for g in sorted({k for k in poly(a).values() if 1 < k < b.value and b.value % k == 0}, reverse=True):
        split = _split(a, const(g))
        if split is not None and split[2] and split[0]:
            return split[0], split[1], const(g), const(b.value // g)
    return None


def _is_multiple(a: Expr, b: Expr) -> bool:
    """Whether a is x - x mod b"""
    for monomial, c in poly(a).items():
        match monomial:
            case (Apply("mod", (_, m)) as rest,) if c == -1 and m == b:
                return _mod(from_poly(plus(poly(a), {monomial: 1}, 1)), b) == rest
    return False


def _mod(a: Expr, b: Expr) -> Expr:
    """a mod b in [0, b)."""
    if b == ONE:
        return ZERO
    if (split := _split(a, b)) and (split[2] or split[0]):  # (c q + r) mod c = r mod c
        return from_poly(split[1]) if split[2] else _mod(from_poly(split[1]), b)
    if coarser := _coarser(a, b):  # (g q + r) mod (g c) = g (q mod c) + r
        quotient, rest, g, c = coarser
        return apply("add", apply("mul", g, _mod(from_poly(quotient), c)), from_poly(rest))
    inner = Apply("mod", (a, b))
    return inner if is_natural(a) else Apply("mod", (from_poly(plus(poly(inner), poly(b), 1)), b))


def cast(x: Expr, dtype: str) -> Expr:
    """x rounded to dtype: constants at once, and never where it changes nothing."""
    if isinstance(x, Const):
        value = torch.tensor(x.value, dtype=torch.float64 if isinstance(x.value, float) else None, device="cpu")
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


def log_add_exp(x: Expr, y: Expr) -> Expr:
    """log(exp(x) + exp(y)), also where one or both are -inf"""
    top = apply("max", apply("max", x, y), const(-1e30))
    return apply("add", top, apply("log", apply("add", *(apply("exp", apply("sub", t, top)) for t in (x, y)))))


def substitute(e: Expr, values: dict[Expr, Expr]) -> Expr:
    """`e` with every occurrence of a key replaced, and simplified again."""
    return transform(e, values.get, apply)


def draws(e: Expr) -> list[Apply]:
    """The random words that `e` uses."""
    return [x for x in parts(e) if isinstance(x, Apply) and x.op == "random"]


def depends_on_score(e: Expr) -> bool:
    """Whether `e` holds an element of Q K^T."""
    return any(type(x).__name__ == "Score" for x in parts(e))


def swallows(e: Cast) -> bool:
    """Whether the rounding is of a sum, where a fill in half precision swallows a score: all others only blur it."""
    return isinstance(e.x, Apply) and e.x.op == "add"
