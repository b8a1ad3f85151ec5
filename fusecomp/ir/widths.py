"""How large an integer may come to be by its positions alone: kernels hold those in 32 bits.

    kv_idx q_idx 7       7 N M            q_idx // 16       M / 16            kv_idx mod 5       5

Of a length that is only known at run time this takes 2^26, also where it is a number of pages times their length. What
is read from a tensor counts for nothing here: its products have the bits that the program gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container

from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Size, Var, kind, parts, transform
from fusecomp.ir.poly import Monomial, from_poly, poly

LONGEST = 2**26
POLYNOMIAL = ("add", "sub", "mul", "neg")


def magnitude(e: Expr) -> int:
    """|e| is at most this, of an integer."""
    match e:
        case Const(int(value)):
            return abs(value)
        case Size():
            return LONGEST
        case Var(_, size):
            return magnitude(size) if isinstance(size, Const) else LONGEST
        case Apply("mod", (_, size)):
            return magnitude(size)
        case Apply("floordiv", (x, Const(int(c)))) if c > 0:
            return magnitude(x) // c + 1
        case Apply("abs" | "floordiv", (x, *_)):
            return magnitude(x)
        case Apply("max" | "min" | "where", args):
            return max(map(magnitude, args[-2:]))
        case Cast(x):
            return magnitude(x) if kind(x) == "int" else 1
        case Apply(op) if op in POLYNOMIAL:
            return sum(abs(c) * product(m) for m, c in poly(e).items())
    return 0


def product(factors: Monomial) -> int:
    """|a b ..| is at most this. A quotient times its divisor is no more than what was divided."""
    match factors:
        case (*others, Apply("floordiv", (x, y))) | (Apply("floordiv", (x, y)), *others) if y in others:
            others.remove(y)
            return magnitude(x) * product(tuple(others))
    return math.prod(map(magnitude, factors))


def passes(e: Expr) -> bool:
    """Whether a sum or a product may pass 2^31."""
    return isinstance(e, Apply) and e.op in POLYNOMIAL and kind(e) == "int" and magnitude(e) >= 2**31


MANY = 2**16
"""Numbers of data are smaller, in int32, than what passes 2^31 when it is multiplied by so many."""


def may_wrap(e: Expr, wrapped: Container[str] = ()) -> bool:
    """Whether arithmetic may pass 2^31: its positions, data times data or a large number, or a tensor of `wrapped`."""
    if not (isinstance(e, Apply) and e.op in POLYNOMIAL and kind(e) == "int"):
        return False
    read = [([[x for x in parts(f) if isinstance(x, Load)] for f in m], abs(c)) for m, c in poly(e).items()]
    held = any(x.tensor in wrapped for factors, _ in read for loads in factors for x in loads)
    return held or passes(e) or any(sum(map(bool, factors)) > 1 or (c >= MANY and any(factors)) for factors, c in read)


def in_64_bits(e: Expr) -> Expr:
    """`e`, the sums in it that may pass 2^31 of numbers in int64. Where it reads is left as it is."""
    return transform(e, lambda x: x if isinstance(x, Load) else _factors(x, widened) if passes(x) else None)


def place_in_64_bits(e: Expr) -> Expr:
    """The same of an index, whose own sum is taken apart for the address (codegen/address.py)."""
    return _factors(e, in_64_bits) if passes(e) else in_64_bits(e)


def widened(e: Expr) -> Expr:
    """`e` in int64."""
    return e if getattr(e, "dtype", None) == "int64" else Cast(in_64_bits(e), "int64")


def _factors(e: Expr, change: Callable[[Expr], Expr]) -> Expr:
    return from_poly({tuple(map(change, m)): c for m, c in poly(e).items()})
