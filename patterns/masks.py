"""Masks out of scores: which keys count, and what the others hold.

    softmax_k of (c ? s : -inf)             softmax over {k : c} of s
    s + (c ? 0 : -inf)                      the same: an additive mask
    c ? s : F,  F very negative             the same for rows that see some key; a row that sees none keeps F everywhere
    s + (c ? 0 : F),  F <= -6e4             the same, for s is lost in F
"""

from __future__ import annotations

from collections.abc import Container, Sized
from dataclasses import dataclass, replace

from fusecomp.ir import data
from fusecomp.ir.algebra import COMPARE, FALSE, TRUE, ZERO, apply, const, substitute
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Var, kind, parts, transform, variables
from fusecomp.ir.poly import from_poly, poly
from fusecomp.ir.region import AttentionRegion, loads_of
from fusecomp.patterns.lift import Decline

INF = float("inf")
ABSORBING = -6e4
"""An additive fill at or below this is a mask: a dead key could only count if its score beat a live one by tens of
thousands. Kernels recompute rows whose live scores come within half of it (`AttentionRegion.rescue_below`)."""
NEGLIGIBLE = -1e3
"""A fill at or below this is a mask. Kernels test rows against it, so that no choice here can make a result wrong."""
OVERFLOW = -(2.0**128 - 2.0**103)
"""From here on float32 rounds to -inf."""


@dataclass(frozen=True)
class Masked:
    """`score` where all of `keep` holds; elsewhere the fill."""

    score: Expr
    keep: tuple[Expr, ...] = ()
    fill: float = -INF


def split(e: Expr) -> Masked:
    """Take the masks out of a score expression."""
    match e:
        case Apply("where", (c, s, Const(float() as f))) if f <= NEGLIGIBLE and not isinstance(s, Const):
            return masked(split(s), c, f)
        case Apply("where", (c, Const(float() as f), s)) if f <= NEGLIGIBLE and not isinstance(s, Const):
            return masked(split(s), apply("not", c), f)
        case Apply("where", (c, s, Cast() as sunk)) if (lost := swallowed(sunk)) is not None and lost[0] == s:
            return masked(split(s), c, lost[1])
        case Apply("where", (c, Cast() as sunk, s)) if (lost := swallowed(sunk)) is not None and lost[0] == s:
            return masked(split(s), apply("not", c), lost[1])
        case Apply("add", (s, Apply("where", (c, Const(0 | 0.0), Const(float() as f))))) if f <= ABSORBING:
            return masked(split(s), c, f)
        case Apply("add", (s, Apply("where", (c, Const(float() as f), Const(0 | 0.0))))) if f <= ABSORBING:
            return masked(split(s), apply("not", c), f)
        case Apply("add", (Apply("where", (_, Const(), Const())) as m, s)) if not isinstance(s, Const):
            return split(apply("add", s, m)) if not _is_choice(s) else Masked(e)
        case Apply("add" | "sub" as op, (s, bias)) if (inner := split(s)).keep and absorbs(inner.fill):
            return replace(inner, score=apply(op, inner.score, bias))
        case Apply("add", (bias, s)) if (inner := split(s)).keep and absorbs(inner.fill):
            return replace(inner, score=apply("add", bias, inner.score))
        case Apply("mul" | "div" as op, (s, Const(float() as c))) if 0 < c < INF and (inner := split(s)).keep:
            fill = overflown(inner.fill * c if op == "mul" else inner.fill / c)
            return Masked(apply(op, inner.score, const(c)), inner.keep, fill) if fill <= NEGLIGIBLE else Masked(e)
        case Apply("max", (s, Const(float() as f))) if f <= ABSORBING and (inner := split(s)).keep:
            return replace(inner, fill=max(inner.fill, f))
    return Masked(e)


def swallowed(e: Expr) -> tuple[Expr, float] | None:
    """(s, F) of round(s + F), and (s + b, F) of round(round(s + F) + b), for F that s is lost in."""
    match e:
        case Cast(Apply("add", (s, Const(float() as f)))) if f <= ABSORBING:
            return s, f
        case Cast(Apply("add", (Cast() as inner, b))) if (found := swallowed(inner)) is not None:
            return apply("add", found[0], b), found[1]
    return None


def without_scores(found: Masked, whole: Expr, products: Container[Expr]) -> Masked:
    """`found` of the scores `whole`, no term of whose mask asks for a score: what does is a function of the score, and
    kernels test masks where scores have become S."""
    asks = tuple(c for c in found.keep if any(x in products for x in parts(c)))
    if asks and found.fill != -INF:
        return Masked(whole)
    score = found.score
    for c in asks:
        score = apply("where", c, score, const(-INF))
    return replace(found, score=score, keep=tuple(c for c in found.keep if c not in asks))


def hiding(region: AttentionRegion) -> AttentionRegion:
    """The region with the tensors that are added read as masks, so that whole tiles of them need no visit:

        S = s + L        S where L > F, F = ABSORBING; rows whose live scores all lie below F / 2 see every key

    For the data may hold a finite fill, as `finfo.min` is in most masks that models are given."""
    if region.sink is not None and not region.grounded:  # a row that sees no more than a fill is not one without keys
        return region
    hides = tuple(apply("gt", x, const(ABSORBING)) for x in data.added(region))
    if not hides or region.sink is not None:
        return replace(region, keep=(*region.keep, *hides))
    filled = region.filled_score
    if filled is None:
        shown: Expr = TRUE
        for term in region.keep:
            shown = apply("and", shown, term)
        filled = apply("where", shown, region.score, const(-INF))
    fill = ABSORBING if region.fill == -INF else max(region.fill, ABSORBING)
    return replace(region, keep=(*region.keep, *hides), filled_score=filled, fill=fill)


def _is_choice(e: Expr) -> bool:
    return isinstance(e, Apply) and e.op == "where" and all(isinstance(x, Const) for x in e.operands[1:])


def absorbs(fill: float) -> bool:
    """Whether a bias added on top of the fill is lost in it."""
    return fill <= ABSORBING


def masked(inner: Masked, c: Expr, fill: float) -> Masked:
    """One mask more around what was masked already. Rows without a key are judged by the largest fill."""
    fill = overflown(fill)
    return Masked(inner.score, (*inner.keep, *conjuncts(c)), max(inner.fill, fill) if inner.keep else fill)


def overflown(fill: float) -> float:
    """A fill as float32 has it: the least number times log2(e) is -inf there."""
    return fill if fill > OVERFLOW else -INF


def conjuncts(c: Expr) -> tuple[Expr, ...]:
    """The terms of a conjunction; negations pushed in; |x| < w as two sides."""
    match c:
        case Apply("and", (a, b)):
            return (*conjuncts(a), *conjuncts(b))
        case Apply("not", (Apply("or", (a, b)),)):
            return (*conjuncts(apply("not", a)), *conjuncts(apply("not", b)))
        case Apply("lt" | "le" as op, (Apply("abs", (x,)), w)) if kind(x) == "int":
            return (*conjuncts(apply(op, x, w)), *conjuncts(apply(op, apply("neg", x), w)))
        case Apply("gt" | "ge" as op, (w, Apply("abs", (x,)))) if kind(x) == "int":
            return (*conjuncts(apply(op, w, x)), *conjuncts(apply(op, w, apply("neg", x))))
    return () if c == TRUE else (c,)


def oriented(e: Expr) -> Expr:
    """`e` with its comparisons of positions in one form, so that equal masks read alike: q_idx >= kv_idx,
    q_idx - kv_idx < W, kv_idx < L, kv_idx >= L."""
    return transform(e, _oriented)


def _oriented(e: Expr) -> Expr | None:
    match e:
        case Apply(op, (a, b)) if op in COMPARE and "kv_idx" in variables(e) and kind(a) == kind(b) == "int":
            sign, strict = COMPARE[op]
        case _:
            return None
    slack = poly(apply("sub", apply("mul", const(sign), apply("sub", b, a)), const(strict)))  # e <=> slack >= 0
    places = {m[0].name: (m, c) for m, c in slack.items() if len(m) == 1 and isinstance(m[0], Var)}
    one = {name: c for name, (_, c) in places.items() if name in ("q_idx", "kv_idx")}
    rest = from_poly({m: c for m, c in slack.items() if m not in [places[name][0] for name in one]})
    if {"q_idx", "kv_idx"} & variables(rest):
        return None
    at = {name: places[name][0][0] for name in one}
    match one:
        case {"q_idx": 1, "kv_idx": -1}:
            return Apply("ge", (apply("add", at["q_idx"], rest), at["kv_idx"]))
        case {"q_idx": -1, "kv_idx": 1}:
            return Apply("lt", (apply("sub", at["q_idx"], at["kv_idx"]), apply("add", rest, const(1))))
        case {"kv_idx": -1} if len(one) == 1:
            return Apply("lt", (at["kv_idx"], apply("add", rest, const(1))))
        case {"kv_idx": 1} if len(one) == 1:
            return Apply("ge", (at["kv_idx"], apply("neg", rest)))
    return None


def sees_a_key(keep: tuple[Expr, ...], q_idx: Var, kv_idx: Var) -> bool:
    """Whether each query provably sees a key: key 0, the key at its own place, or the last one will do."""
    last = apply("sub", kv_idx.size, const(1))
    own_exists = apply("lt", q_idx, kv_idx.size) == TRUE
    witnesses = [ZERO, last, *([q_idx] if own_exists else [])]
    return any(all(substitute(t, {kv_idx: at}) == TRUE for t in keep) for at in witnesses)


def sure(region: AttentionRegion) -> AttentionRegion:
    """The region, whose rows give no NaN for want of a key where each has a score above -inf."""
    hides = any(data.summands(region.score)) or any(x == const(-INF) for x in parts(region.score))
    seen = not hides and sees_a_key(region.keep, region.q_idx, region.kv_idx)
    return replace(region, empty_row="nan") if region.empty_row == "unsafe" and seen else region


def check_safe(region: AttentionRegion, sums: Sized) -> None:
    """Raise Decline where rows that see no key give NaN, and kernels give none: what combines shares reads no sink."""
    reads = region.sink is not None and loads_of(region.sink)
    if region.empty_row == "unsafe" and (reads or sums):
        raise Decline("a query that sees no key subtracts -inf from its scores, beside a sink that is "
                      f"{'a tensor' if reads else 'in a logarithm that is read'}",
                      advice="keep the maximum from -inf before it is subtracted")  # fmt: skip


def sees_nothing(keep: tuple[Expr, ...]) -> bool:
    return FALSE in keep


