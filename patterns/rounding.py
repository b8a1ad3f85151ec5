"""What a tensor's dtype does to its values, where it matters to the mathematics.

float32 -> bfloat16     nothing: kernels compute scores in float32, and rounding them is noise
constant -> float16     the constant rounded: -1e9 becomes -inf
n -> bfloat16           the integer rounded, where it may be above 256: a position then equals its neighbour
n -> uint8              n mod 256
s + m in float16        m, where m is so negative that s is lost in it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusecomp.graph.facts import dtype, is_tensor
from fusecomp.ir.algebra import ZERO, apply, cast, const
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, dtype_kind, kind, parts
from fusecomp.ir.poly import upper
from fusecomp.patterns.lift import Lift

HALF = ("float16", "bfloat16")
LOST_IN = -6e4
"""Added to this in half precision, whose numbers lie 32 apart here, a score is lost."""
LOST_ANYWHERE = -1e30
"""Added to this it is lost in any precision: nothing need be said of the value, and its gradient is the sum's."""
WHOLE = {"bfloat16": 2**8, "float16": 2**11}
"""Up to here every integer is a number of that dtype."""
WRAPS = {"uint8": (0, 2**8), "int8": (2**7, 2**8), "int16": (2**15, 2**16)}
"""dtype: (offset, range) of integers that wrap around within a mask's reach."""


def truth(e: Expr) -> Expr:
    """A number as a truth value: not 0."""
    return e if kind(e) == "bool" else apply("ne", e, ZERO if kind(e) == "int" else const(0.0))


def retyped(e: Expr, to: str) -> Expr:
    """`e` as a number of dtype `to`."""
    if isinstance(e, Const):
        return wrapped(cast(e, to), to)
    if isinstance(e, Cast) and e.dtype == "float32" and kind(e.x) == "int" and to in HALF:
        e = e.x
    source, target = kind(e), dtype_kind(to)
    if target == "bool":
        return truth(e)
    if source == target:
        return stored(e, to)
    if source == "bool" and target == "float":
        return apply("where", e, const(1.0), const(0.0))
    if source == "int" and target == "float":
        return cast(e, to if to in WHOLE and not within(e, WHOLE[to]) else "float32")
    return wrapped(cast(e, "int32" if to in WRAPS else to), to)


def within(e: Expr, most: int) -> bool:
    """Whether |e| <= most, provably."""
    return all((top := upper(x)) is not None and top <= most for x in (e, apply("neg", e)))


def stored(e: Expr, to: str) -> Expr:
    """The result of an operation in dtype `to`: constants are rounded, small integers wrap around. A fill that float16
    cannot hold once it is scaled is -inf."""
    match e:
        case Apply("mul" | "div" as op, (Apply("where", (c, x, y)), Const(float()) as k)) if to == "float16":
            scaled = [stored(apply(op, z, k), to) for z in (x, y)]
            if any(isinstance(z, Const) and abs(z.value) == math.inf for z in scaled):
                return apply("where", c, *scaled)
        case Const(float() | int()) if dtype_kind(to) == "float" and not isinstance(e.value, bool):
            return cast(e, to)
        case Apply("where", (c, x, y)) if dtype_kind(to) == "float" or to in WRAPS:
            return apply("where", c, stored(x, to), stored(y, to))
    return wrapped(e, to)


def wrapped(e: Expr, to: str) -> Expr:
    """((e + o) mod n) - o, for integers of fewer than 32 bits"""
    if to not in WRAPS or kind(e) != "int":
        return e
    offset, n = (const(x) for x in WRAPS[to])
    return apply("sub", apply("mod", apply("add", e, offset), n), offset)


def absorbed(lift: Lift, a: Expr, b: Expr, to: str) -> Expr | None:
    """x + (c ? 0 : F) = c ? x : F in half precision for very negative F: what a row without a live key holds. The fill
    is written round(x + F), for x has the gradient of a sum.

    What may be that negative only at run time is asked: m <= F ? round(x + m) : x + m. What is added to it is lost too.
    """
    if to not in HALF:
        return None
    for x, m in ((a, b), (b, a)):
        match m:
            case Apply("where", (c, Const(0 | 0.0), Const(float() as f))) if LOST_ANYWHERE < f <= LOST_IN:
                return apply("where", c, x, lost(x, const(f), to))
            case Apply("where", (c, Const(float() as f), Const(0 | 0.0))) if LOST_ANYWHERE < f <= LOST_IN:
                return apply("where", c, lost(x, const(f), to), x)
    for x, m in ((a, b), (b, a)):
        match x:
            case Apply("where", (c, y, Cast(Apply("add"), d) as fill)) if d == to:
                return apply("where", c, apply("add", y, m), lost(fill, m, to))
            case Apply("where", (c, Cast(Apply("add"), d) as fill, y)) if d == to:
                return apply("where", c, lost(fill, m, to), apply("add", y, m))
    for x, m in ((a, b), (b, a)):
        if to == "float16" and lift.holds_score(x) and not lift.holds_score(m) and may_absorb(m):
            return apply("where", apply("le", m, const(LOST_IN)), lost(x, m, to), apply("add", x, m))
    return None


def lost(x: Expr, m: Expr, to: str) -> Expr:
    """round(x + m)"""
    return Cast(apply("add", x, m), to) if not isinstance(x, Const) else cast(apply("add", x, m), to)


def may_absorb(m: Expr) -> bool:
    """Whether `m` is a tensor of masks, or arithmetic with the fill of one: -inf is in float16 what it is anywhere."""
    fills = (x for x in parts(m) if isinstance(x, Const) and isinstance(x.value, float))
    return isinstance(m, Load) or any(-LOST_IN <= abs(x.value) < -LOST_ANYWHERE for x in fills)


# ----------------------------------------------------------------------------------------------------------------
# Comparisons


def compared(given: Sequence[Any], args: list[Expr | None]) -> list[Expr | None]:
    """Numbers beside a tensor in half precision, rounded to it: bfloat16 positions are compared with 256, not 257."""
    kinds = {dtype(x) for x in given if is_tensor(x)}
    to = kinds.pop() if len(kinds) == 1 else ""
    return [retyped(e, to) if to in HALF and isinstance(e, Const) else e for e in args]


def rounds(lift: Lift, x: Any, e: Expr | None) -> bool:
    """Whether arithmetic of half precision, which is not repeated rounding by rounding, is about to be compared."""
    half = is_tensor(x) and dtype(x) in HALF
    return half and isinstance(e, Apply) and e.op in ("add", "sub", "mul", "div") and not lift.holds_score(e)
