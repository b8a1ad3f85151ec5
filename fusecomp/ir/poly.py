"""Integer arithmetic in one normal form: sums of integer multiples of products of indices and sizes.

Two polynomials are the same function exactly when their normal forms are equal, which is what lets `(h * D + d) // D`
become `h`. What is not + - * is an indeterminate.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Size, Var, kind, parts

Monomial = tuple[Expr, ...]
Poly = dict[Monomial, int]


@lru_cache(maxsize=20_000)
def _poly(e: Expr) -> tuple[tuple[Monomial, int], ...]:
    match e:
        case Const(int(value)):
            return (((), int(value)),) if value else ()
        case Apply("add", (a, b)):
            return _freeze(plus(poly(a), poly(b), 1))
        case Apply("sub", (a, b)):
            return _freeze(plus(poly(a), poly(b), -1))
        case Apply("neg", (a,)):
            return _freeze(plus({}, poly(a), -1))
        case Apply("mul", (a, b)):
            return _freeze(times(poly(a), poly(b)))
        case _:
            return (((e,), 1),)


def poly(e: Expr) -> Poly:
    """The polynomial of an integer expression; what is not + - * is an indeterminate."""
    return dict(_poly(e))


def _freeze(p: Poly) -> tuple[tuple[Monomial, int], ...]:
    return tuple((m, c) for m, c in p.items() if c)


def plus(p: Poly, q: Poly, sign: int) -> Poly:
    total = Counter(p)
    for monomial, c in q.items():
        total[monomial] += sign * c
    return {m: c for m, c in total.items() if c}


def times(p: Poly, q: Poly) -> Poly:
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
    return total if total is not None else Const(0)


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
    lowest = _lowest(p)
    return lowest is not None and all(c >= 0 for c in lowest.values())


def _lowest(p: Poly) -> Poly | None:
    """What p is never below, a polynomial in naturals: each size stands for itself less 1. None where unknown."""
    lowest: Poly = {}
    for monomial, c in _at_the_end(p).items():
        term: Poly = {(): c}
        if not _monotone(monomial):
            if c < 0 or any(n % 2 for n in Counter(monomial).values()):
                return None
            term = {}  # a square
        for factor in monomial if term else ():
            bound = _bound(factor, c)
            if bound is None:
                return None
            term = times(term, bound)
        lowest = plus(lowest, term, 1)
    return lowest


def _at_the_end(p: Poly) -> Poly:
    """p, an index that lowers it at its last place: the lengths of axes that are computed then cancel."""
    for monomial, c in p.items():
        for f in monomial if c < 0 and _monotone(monomial) else ():
            match f:
                case Var(_, Apply() as size):
                    others = list(monomial)
                    others.remove(f)
                    last = times({tuple(others): c}, plus(poly(size), {(): 1}, -1))
                    return _at_the_end(plus({m: k for m, k in p.items() if m != monomial}, last, 1))
    return p


def _monotone(monomial: Monomial) -> bool:
    """Whether a product is bounded by the bounds of its factors: of naturals, or of one number and sizes."""
    return sum(not isinstance(f, Size) for f in monomial) < 2 or all(always_natural({(f,): 1}) for f in monomial)


def _highest(p: Poly) -> Poly | None:
    """What p is never above."""
    lowest = _lowest(plus({}, p, -1))
    return None if lowest is None else plus({}, lowest, -1)


def _bound(factor: Expr, c: int) -> Poly | None:
    """What stands for `factor` where c * factor is least."""
    match factor:
        case Var(_, size):
            return {} if c >= 0 else _highest(plus(poly(size), {(): 1}, -1))
        case Size():
            return {(): 1, (factor,): 1}
        case Cast(x, "int64") if kind(x) == "int":
            return _lowest(poly(x)) if c >= 0 else _highest(poly(x))
        case Apply("abs") if c >= 0:
            return {}
        case Apply("floordiv" | "mod", (a, _)) if c >= 0 and is_natural(a):
            return {}
        case Apply("mod", (_, m)) if c >= 0:  # of a negative number: Triton's has its sign
            return _lowest(plus({(): 1}, poly(m), -1))
        case Apply("max", (_, Const(int(k)))) if c >= 0:
            return {(): k}
        case Apply("min", (_, top)) if c < 0:
            return _highest(poly(top))
        case Apply("where", (Apply("lt", (i, Const(0))), other, j)) if i == j and c >= 0:
            return {} if is_natural(other) or _from_the_end(i, other) else None
        case Apply("mod", (_, m)):
            return _highest(plus(poly(m), {(): 1}, -1))
        case Apply("floordiv", (a, Const(int(m)))) if c < 0 and (most := upper(a)) is not None:
            return {(): most // m}
        case Apply("floordiv", (a, Const(int(m)))) if c < 0 < m and (highest := _highest(poly(a))) is not None:
            return _whole(highest, m)
    return None


def _whole(p: Poly, m: int) -> Poly | None:
    """p // m, where m divides all of p but a number."""
    divides = all(k % m == 0 for monomial, k in p.items() if monomial)
    return {monomial: k // m for monomial, k in p.items()} if divides else None


def _from_the_end(i: Expr, other: Expr) -> bool:
    """Whether `other` is the place of element i < 0 of an axis, where i is data: the tensor has that element."""
    return any(isinstance(x, Load) for x in parts(i)) and is_natural(Apply("sub", (other, i)))


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
                case Var() | Size() if c < 0:
                    c = 0
                case Apply("mod" | "floordiv", (a, _)) if c < 0 and is_natural(a):
                    c = 0
                case _:
                    return None
        top += c
    return top


def is_natural(e: Expr) -> bool:
    """Whether the integer e is provably >= 0."""
    return always_natural(poly(e))
