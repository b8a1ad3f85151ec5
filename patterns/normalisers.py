"""What keeps a normaliser from 0: it changes nothing but rows that see no key.

    max(total, c)                  total where it is at least c <= 1, as it is once each row's maximum is subtracted
    total + c                      the same for a c that is lost in a number of at least 1; else a sink, max a + log c
    total = 0 ? c : total          total; a row that sees no key gives 0
    m = -inf ? 0 : m               the maximum of a row, finite where the row sees no key: its exponentials are 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce

from fusecomp.ir.algebra import apply, const, substitute
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Largest, Load, Reduce, Size, Var, dtype_kind, kind
from fusecomp.patterns.exponentials import INF, Exponential, is_choice, unshifted
from fusecomp.patterns.lift import Decline
from fusecomp.patterns.masks import conjuncts, split

LOST = 2.0**-25
"""Added to at least 1 in float32, no more than this changes nothing."""
LEAST = -1e30
"""No score of a key that counts lies below it."""
VANISHES = 104.0
"""exp(-x) is 0 in float32 from here on."""


@dataclass(frozen=True)
class Guard:
    """A normaliser that is kept at or above `floor`, or from 0."""

    floor: float | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class Row:
    """The exponentials of one query, u exp(a), before they are normalised."""

    e: Exponential
    choices: list[Expr]
    scores: Expr
    shift: Expr | None
    key: Var


def guarded(total: Expr) -> tuple[Guard, Expr]:
    """A normaliser without its guard."""
    match total:
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            return guarded(x)
        case Apply("max", (t, Const(float() | int() as f))) | Apply("max", (Const(float() | int() as f), t)):
            return Guard(floor=float(f)), t
        case Apply("where", (Apply("eq", (x, Const(0 | 0.0))), Const(float() | int() as c), t)) if x == t and c > 0:
            return Guard(from_zero=True), t
    return Guard(), total


def settled(guard: Guard, extras: list[Expr], row: Row) -> tuple[list[Expr], str]:
    """The extra entries of a normaliser that count, and what a row without keys gives. Raises Decline."""
    empty = empty_row(row)
    at_least_one = empty is not None and is_largest(row)
    if guard.floor is not None and not (guard.floor <= 1 and at_least_one):
        reason = f"the normaliser is kept above {guard.floor!r}, which may be more than the sum of the exponentials"
        raise Decline(reason, advice="subtract each row's maximum first: the sum is then at least 1")
    if guard.from_zero and (empty is None or extras):
        raise Decline("the normaliser is kept from 0, and whether a row that sees no key gives 0 depends on its scores",
                      advice="fill the exponentials with 0 where the scores are filled")  # fmt: skip
    if any(number_of(x) == INF for x in extras):
        raise Decline("the normaliser adds infinity: no weight is above 0", advice="add a finite number")
    numbers = [c for c in map(number_of, extras) if c is not None] if at_least_one else []
    kept_from_zero = guard.from_zero or (guard.floor or 0.0) > 0 or sum(numbers) > 0
    empty = "zero" if kept_from_zero and empty == "zero" else "nan"
    if sum(numbers) <= LOST:
        left = [x for x in extras if not (numbers and number_of(x) is not None)]
        return left, "unsafe" if left and empty == "nan" and falls(row.shift, row.key) else empty
    if len(numbers) < len(extras):
        raise Decline("the normaliser adds a number and more to exponentials that were shifted by a maximum",
                      advice="add the exponential of a logit less the maximum")  # fmt: skip
    return [apply("exp", apply("add", Largest(), const(math.log(sum(numbers)))))], empty


def empty_row(row: Row) -> str | None:
    """What the exponentials sum up to where every key is masked by -inf: "nan" or "zero"; None where it depends."""
    masked = split(row.scores)
    if not all(map(is_choice, row.choices)):
        return None
    if masked.keep and masked.fill != -INF:
        return None if row.choices or row.shift is None else "nan"
    if row.shift is None or unguarded(row.shift) is not None:
        return "zero"
    if not is_largest(row):
        return None
    if row.e.masked_by <= {"product"}:
        return "nan"
    hidden = {t for f in row.choices for t in conjuncts(f.args[0])}
    return "zero" if row.e.masked_by == {"choice"} and set(masked.keep) <= hidden else None


def without_nan(factor: Expr) -> str:
    """What a row gives in nan_to_num(factor softmax(a)): 0 where its softmax is NaN. Raises Decline where the factor
    may be NaN by itself."""
    if not is_finite(factor):
        raise Decline("nan_to_num looks at a softmax times a tensor, which may hold NaN or infinities of its own",
                      advice="apply nan_to_num to the softmax, then multiply")  # fmt: skip
    return "guarded"


def falls(m: Expr | None, key: Var) -> bool:
    """Whether a shift is -inf where every key is: then exp(a - m) is NaN, whatever is in the sum beside it."""
    match m:
        case None:
            return False
        case Reduce("max", var) | Apply("log" | "log2", (Reduce("sum", var),)):
            return bool(var.size == key.size)
        case Cast(x) | Apply("mul" | "div" | "add" | "sub", (x, Const())):
            return falls(x, key)
        case Apply("add", (x, y)):
            return falls(x, key) or falls(y, key)
    return False


def is_finite(e: Expr) -> bool:
    """Whether no number makes `e` NaN or infinite, short of an overflow."""
    match e:
        case Load(_, _, dtype):
            return dtype_kind(dtype) != "float"
        case Const(c):
            return abs(c) < INF
        case Var() | Size():
            return True
        case Cast(x):
            return is_finite(x)
        case Apply("where", (_, x, y)):
            return is_finite(x) and is_finite(y)
        case Apply("add" | "sub" | "mul" | "min" | "max" | "neg" | "abs", of):
            return all(map(is_finite, of))
        case Apply("div", (x, Const(c))):
            return c != 0 and is_finite(x)
    return kind(e) != "float"


def is_largest(row: Row) -> bool:
    """Whether the shift is the largest score of the row, so that the sum of exponentials is at least exp(0). A fill
    below every score that counts does for -inf where only choices mask the exponentials: where no key is seen, each is
    then inf, times 0. One that is masked itself would be 0."""
    largest = row.shift and largest_of(unguarded(row.shift) or row.shift, row.key)
    if largest is None:
        return False
    below = LEAST if not split(unshifted(row.e.a, row.key)[0]).keep else -INF
    return any(equal(s, row.scores) for s in (sunk(largest, row.shift), sunk_below(largest, below)))


def largest_of(m: Expr, key: Var) -> Expr | None:
    """S of m = max_j S_j; c S of c max_j S_j"""
    match m:
        case Reduce("max", var, body) if var.size == key.size:
            return substitute(body, {var: key})
        case Apply("mul" | "div" as op, (x, Const(float() as c))) if c > 0 and (s := largest_of(x, key)) is not None:
            return apply(op, s, const(c))
    return None


def equal(a: Expr, b: Expr) -> bool:
    """Whether two scores are equal, whatever the order of their masks."""
    one, other = split(a), split(b)
    return (one.score, set(one.keep), one.fill) == (other.score, set(other.keep), other.fill)


def follows_fill(row: Row) -> bool:
    """Whether the shift of a row that holds nothing but a fill is that fill, so that each exponential is 1."""
    match row.shift and (unguarded(row.shift) or row.shift):
        case None | Apply("log", (Reduce("sum"),)):
            return True
    return is_largest(row)


def unguarded(m: Expr) -> Expr | None:
    """x of x = -inf ? c : x, of max(x, c) for a c below every score, and of nan_to_num(x), which does either."""
    x, finite = bare(m)
    return x if finite else None


def bare(m: Expr) -> tuple[Expr, bool]:
    """A shift without what guards it from NaN and infinities, and whether -inf is among them."""
    match m:
        case Apply("where", (Apply("eq", (x, Const(float() as f))), Const(), y)) if abs(f) == INF:
            inner, finite = bare(y)
            if x in (inner, apply("abs", inner)):
                return inner, finite or f == -INF or x != inner
        case Apply("where", (Apply("isnan", (x,)), Const(), y)) if bare(y)[0] == x:
            return bare(y)
        case Apply("max", (y, Const(float() as f))) if -INF < f <= LEAST:
            return bare(y)[0], True
        case Apply("min", (y, Const(float() as f))) if f >= -LEAST:
            return bare(y)
        case Apply("mul" | "div" as op, (y, Const(float() as c))) if c > 0:
            inner, finite = bare(y)
            return apply(op, inner, const(c)), finite and not overflows(inner, op, c)
    return m, False


def overflows(m: Expr, op: str, c: float) -> bool:
    """Whether the largest of nothing but a fill is a number, but -inf once it is multiplied."""
    match m:
        case Reduce("max", _, body):
            return split(body).fill > -INF == split(apply(op, body, const(c))).fill
    return False


def kept_above(m: Expr | None) -> float:
    """The number that a guarded shift never lies below."""
    match m:
        case Apply("max", (y, Const(float() as f))):
            return max(f, kept_above(y))
        case Apply("min", (y, Const())) | Apply("where", (_, Const(), y)):
            return kept_above(y)
        case Apply("mul", (y, Const(float() as c))) if c > 0:
            return kept_above(y) * c
        case Apply("div", (y, Const(float() as c))) if c > 0:
            return kept_above(y) / c
    return -INF


def sunk(scores: Expr, shift: Expr | None) -> Expr:
    """The scores, filled with -inf where their fill lies so far below any shift that exponentials of it are 0."""
    return sunk_below(scores, kept_above(shift) - VANISHES)


def sunk_below(scores: Expr, least: float) -> Expr:
    found = split(scores)
    if not found.keep or not -INF < found.fill < least:
        return scores
    return apply("where", reduce(partial(apply, "and"), found.keep), found.score, const(-INF))


def number_of(extra: Expr) -> float | None:
    """c where that is what a normaliser adds."""
    match extra:
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            return number_of(x)
        case Const(float() | int() as c) if c >= 0:
            return float(c)
    return None
