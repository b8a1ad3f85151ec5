"""Softmax weights in an expression, however they were spelled.

    exp(a) / sum_j exp(a_j)              softmax(a)
    exp(log(exp(a) / sum_j exp(a_j)))    softmax(a)            log_softmax(a).exp()
    exp(a - log sum_j exp(a_j))          softmax(a)            exp(a - logsumexp(a)), and the same in base 2
    exp(a - m) / sum_j exp(a_j - m)      softmax(a)            for any m that is the same for every key
    c exp(a) / sum_j c_j exp(a_j)        softmax(c ? a : -inf) for a choice c between 1 and 0; key-free factors cancel
    exp(a) / (exp(t) + sum_j exp(a_j))   softmax with sink t   cat([a, t]) cut off again; + 1 is t = 0
    w / sum_j w_j                        softmax(log w)        where w >= 0 is no exponential
    w * softmax(a)                       a factor behind the softmax
    isnan(p) ? 0 : p                     rows that see no key give 0
    c ? softmax(c ? a : -inf) : 0        the same
    any_j (a_j != -inf) ? softmax(a) : 0 the same

Numerators and the terms of sums are read in one form, u exp(a), by `exponential`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce

from fusecomp.ir.algebra import apply, const, log_add_exp, substitute
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Largest, Reduce, Var, dtype_kind, parts, variables
from fusecomp.patterns.entries import first_key, outside
from fusecomp.patterns.exponentials import (
    INF,
    LOG2,
    Exponential,
    choice,
    collected,
    exponential,
    is_choice,
    log_of,
    reduces,
    spread,
    summands,
    total_of,
    unshifted,
)  # fmt: skip
from fusecomp.patterns.lift import Decline
from fusecomp.patterns.masks import conjuncts, split
from fusecomp.patterns.normalisers import Row, follows_fill, guarded, is_finite, settled, sunk, unguarded, without_nan
from fusecomp.patterns.positive import logarithm

OTHER_ZEROS = (
    "weights are zeroed where the mask of the scores does not say so: of a query that sees no key, some are NaN, some 0"
)
LOSES = ("nan", "unsafe")
"""Of `AttentionRegion.empty_row`: such a row is NaN."""
ADRIFT = "what is subtracted from the scores of a query that sees no key may be another number than their fill"


@dataclass(frozen=True)
class Weights:
    """factor * softmax(scores), with an optional sink in the normaliser."""

    scores: Expr
    sink: Expr | None = None
    factor: Expr = Const(1.0)
    empty_row: str = "nan"
    zeroed: bool = False
    """Whether some weights are 0 for another reason than the mask: of a row without keys, these alone are not NaN."""
    subtracted: bool = False
    """Whether the logarithm of the sum was subtracted from the scores: it is lost in a large finite fill."""
    adrift: bool = False
    """Whether what was subtracted from a row that holds nothing but a finite fill may be another number than that."""

    @property
    def grounded(self) -> bool:
        """Whether a sink keeps a row that sees no key from being NaN."""
        told = self.sink is not None and any(isinstance(x, Largest) for x in parts(self.sink))
        return self.sink is not None and not told and self.empty_row != "unsafe"

    def times(self, w: Expr) -> Weights:
        return replace(self, factor=apply("mul", self.factor, w))


def softmax_weights(e: Expr, key: Var) -> Weights | None:
    """Read `e`, a function of `key`, as softmax weights over it; None where it is none. Raises Decline."""
    match e:
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            return softmax_weights(x, key)
        case Apply("div", (x, total)) if found := normalised(x, total, key):
            return found
        case Apply("mul", (x, y)) if found := inverted(x, y, key) or inverted(y, x, key):
            return found
        case Apply("exp", (Apply("log", (x,)),)):
            return softmax_weights(x, key)
        case Apply("exp", (Apply("sub", (a, c)),)) if found := log_normalised(a, c, key):
            return found
        case Apply("exp", (Apply("mul", (Apply("sub", (a, c)), Const(f))),)) if f == LOG2:
            return log_normalised(a, c, key, "log2", f)
        case Apply("mul", (x, w)) if not reduces(w):
            return scaled(softmax_weights(x, key), w)
        case Apply("mul", (w, x)) if not reduces(w):
            return scaled(softmax_weights(x, key), w)
        case Apply("div", (x, w)) if not reduces(w):
            return scaled(softmax_weights(x, key), apply("div", const(1.0), w))
        case Apply("where", (Apply("isnan", (x,)), Const(0 | 0.0), y)) if within(y) == x:
            found = softmax_weights(x, key)
            return found and replace(found, empty_row=without_nan(found.factor))
        case Apply("where", (c, Const(0 | 0.0), x)) if no_score_is_live(c, x, key):
            found = softmax_weights(x, key)
            return found and replace(found, empty_row="zero")
        case Apply("where", (c, x, Const(0 | 0.0))) if not reduces(c):
            return shown(softmax_weights(x, key), c)
        case Apply("where", (c, Const(0 | 0.0), x)) if not reduces(c):
            return shown(softmax_weights(x, key), apply("not", c))
    return None


def shown(weights: Weights | None, c: Expr) -> Weights | None:
    """c ? weights : 0. Where c says all that the mask under the softmax says, a row without keys gives 0."""
    if weights is None:
        return None
    terms, scores, empty = conjuncts(c), split(weights.scores), weights.empty_row
    hidden = terms
    if scores.keep and scores.fill == -INF and not weights.grounded:
        covered = set(scores.keep) <= set(terms)
        weights = replace(weights, empty_row="zero" if covered and empty in LOSES else empty, zeroed=not covered)
        terms = tuple(t for t in terms if t not in scores.keep)
    if not is_finite(weights.factor):  # 0 times it may be NaN
        shows = reduce(partial(apply, "and"), hidden)
        return replace(weights, factor=apply("where", shows, weights.factor, const(0.0)))
    return weights.times(choice(reduce(partial(apply, "and"), terms))) if terms else weights


def inverted(x: Expr, w: Expr, key: Var) -> Weights | None:
    """x * (1 / total)"""
    total = denominator(w)
    return None if total is None else normalised(x, total, key)


def no_score_is_live(c: Expr, x: Expr, key: Var) -> bool:
    """c = not any_j (a_j != -inf), where x = exp(a) / sum_j exp(a_j): what F.scaled_dot_product_attention becomes."""
    match c, x:
        case Apply("not", (Reduce("any", j, live),)), Apply("div", (Apply("exp", (a,)), _)):
            return live == apply("not", apply("eq", substitute(a, {key: j}), const(-INF)))
    return False


def denominator(e: Expr) -> Expr | None:
    """t of 1 / t, or of exp(m - (m + log t))"""
    match e:
        case Cast(x, _):
            return denominator(x)
        case Apply("exp", (x,)) if len(terms := collected(spread(x))) == 1 and terms[0][0] < 0:
            log = log_of(terms[0][1])
            return log[0] if log is not None and log[1] == 1 else None
        case Apply("div", (Const(1 | 1.0), total)):
            return total
    return None


def within(e: Expr) -> Expr:
    """e, out of a clamp between finite numbers: a probability lies between them anyway."""
    match e:
        case Apply("min" | "max", (x, Const())):
            return within(x)
    return e


def scaled(weights: Weights | None, w: Expr) -> Weights | None:
    """w * weights"""
    return None if weights is None else weights.times(w)


# ----------------------------------------------------------------------------------------------------------------
# u exp(a) / total


def normalised(x: Expr, total: Expr, key: Var) -> Weights | None:
    """u exp(a) / total, where total sums u exp(a) over the keys, and perhaps a few entries more."""
    if (times := multiplied(total, key)) is not None:
        return scaled(normalised(x, times[0], key), apply("div", const(1.0), times[1]))
    guard, total = guarded(total)
    terms = summands(total)
    sums = [t for t in terms if isinstance(t, Reduce) and t.op == "sum"]
    above, below = (exponential(x), exponential(sums[0].body)) if len(sums) == 1 else (None, None)
    if above is None and below is None and len(sums) == 1:
        logarithms = logarithm(x), logarithm(sums[0].body)
        above, below = (None if a is None else Exponential(a) for a in logarithms)
    if above is None or below is None:
        return None
    var = sums[0].var
    start = first_key(above.a, below.a, var, key)
    if start is None:
        return None
    extras = [t for t in terms if t is not sums[0]]
    others = outside(var.size, start, key.size)
    if others is None or (others and below.factors):
        return None
    extras += [apply("exp", substitute(below.a, {var: at})) for at in others]
    shared = cancelled(above.factors, tuple(substitute(f, {var: apply("add", key, start)}) for f in below.factors))
    if shared is None or (extras and not all(map(is_choice, shared[0]))) or any(reduces(f) for f in shared[1]):
        return None
    scores, shift = unshifted(above.a, key)
    for f in shared[0]:
        scores = live(scores, f, key)
    scores = sunk(scores, shift)
    row = Row(above, shared[0], scores, shift, key)
    extras, empty = settled(guard, extras, row)
    factor: Expr = const(1.0)
    for f in shared[1]:
        factor = apply("mul", factor, f)
    return Weights(scores, sink_of(extras, shift), factor, empty, adrift=not follows_fill(row))


def multiplied(total: Expr, key: Var) -> tuple[Expr, Expr] | None:
    """(total, c) of c total: a mean is a sum over the number of keys"""
    match total:
        case Cast(x, dtype) if dtype_kind(dtype) == "float":
            return multiplied(x, key)
        case Apply("div", (x, c)) if not reduces(c) and key.name not in variables(c):
            return x, apply("div", const(1.0), c)
        case Apply("mul", (x, c)) | Apply("mul", (c, x)) if not reduces(c) and key.name not in variables(c):
            return x, c
    return None


def cancelled(above: tuple[Expr, ...], below: tuple[Expr, ...]) -> tuple[list[Expr], list[Expr]] | None:
    """(factors of both, factors of the numerator alone); None where the sum has one that the numerator has not."""
    rest = list(above)
    for f in below:
        if f not in rest:
            return None
        rest.remove(f)
    return list(below), rest


def live(scores: Expr, f: Expr, key: Var) -> Expr:
    """a of f exp(a) under the sum as well: a factor that is the same for every key cancels, a choice is a mask."""
    if is_choice(f):
        return apply("where", f.args[0], scores, const(-INF))
    if key.name not in variables(f):
        return scores
    raise Decline("the exponentials are multiplied by a tensor before they are normalised",
                  advice="add its logarithm to the scores; a mask of 0 and 1: pass it as booleans")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# What softmax does not see, and what else is in its normaliser


def sink_of(extras: list[Expr], shift: Expr | None) -> Expr | None:
    """The logit of the extra entries together. They were shifted as the scores were. Raises Decline."""
    found = [logit(x, shift) for x in extras]
    return reduce(log_add_exp, found) if found else None


def logit(extra: Expr, shift: Expr | None) -> Expr:
    """t of exp(t - shift). Raises Decline."""
    match extra:
        case Apply("exp", (t,)) if any(isinstance(x, Largest) for x in parts(t)):
            return t
        case Apply("exp", (t,)):
            terms, shifts = spread(t), spread(shift) if shift is not None else []
            if all((-s, m) in terms for s, m in shifts):
                rest = total_of([x for x in terms if (-x[0], x[1]) not in shifts])
                if not reduces(rest):
                    return rest
        case Const(float() | int() as c) if shift is None and c > 0:
            return apply("log", const(float(c)))
        case Const():
            reason = f"the normaliser adds {extra.value!r} to exponentials that were shifted by a reduction"
            raise Decline(reason, advice="add it times exp(-m), m being the shift; or leave it out: the sum is above 1")
    raise Decline("the normaliser adds something that is not the exponential of a logit",
                  advice="add the exponential of a number, or of a logit for each head or query")  # fmt: skip


def log_normalised(a: Expr, c: Expr, key: Var, log: str = "log", per: float = 1.0) -> Weights | None:
    """exp(a - c) with c = log sum_j exp(a_j), or c = m + log sum_j exp(a_j - m), or a sink beside either. `per` is the
    natural logarithm of the base of both."""
    found = None
    if (inner := unguarded(c)) is not None:
        whole = log_normalised(a, inner, key, log, per)
        return whole and replace(whole, scores=sunk(whole.scores, c), empty_row="zero")
    match c:
        case Apply(op, (total,)) if op == log:
            found = normalised(apply("exp", apply("mul", a, const(per))), total, key)
        case Apply("add", (m, Apply(op, (total,)))) | Apply("add", (Apply(op, (total,)), m)) if op == log:
            found = normalised(apply("exp", apply("mul", apply("sub", a, m), const(per))), total, key)
    return found and replace(found, subtracted=True)
