"""Softmax weights in an expression, however they were spelled.

    exp(a) / sum_j exp(a_j)              softmax(a)
    exp(a - log sum_j exp(a_j))          softmax(a)            log_softmax(a).exp(), exp(a - logsumexp(a))
    exp(a - m) / sum_j exp(a_j - m)      softmax(a)            for any m that is the same for every key
    exp(a) / (exp(t) + sum_j exp(a_j))   softmax with sink t   cat([a, t]) cut off again; + 1 is t = 0
    w * softmax(a)                       a factor behind the softmax
    isnan(p) ? 0 : p                     rows that see no key give 0
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusecomp.ir.algebra import ZERO, apply, const, substitute
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Reduce, Var, parts, variables
from fusecomp.ir.poly import poly
from fusecomp.patterns.lift import Decline

MOST_EXTRAS = 4
"""Entries of the normaliser that are not keys: a sink is one."""


@dataclass(frozen=True)
class Weights:
    """factor * softmax(scores), with an optional sink in the normaliser."""

    scores: Expr
    sink: Expr | None = None
    factor: Expr = Const(1.0)
    empty_row: str = "nan"

    def times(self, w: Expr) -> Weights:
        return replace(self, factor=apply("mul", self.factor, w))


def softmax_weights(e: Expr, key: Var) -> Weights | None:
    """Read `e`, a function of `key`, as softmax weights over it; None where it is none. Raises Decline."""
    match e:
        case Cast(x, _):
            return softmax_weights(x, key)
        case Apply("div", (Apply("exp", (a,)), total)) if (found := normalised(a, total, key)):
            return found
        case Apply("mul", (Apply("exp", (a,)), w)) | Apply("mul", (w, Apply("exp", (a,)))) if (
            (t := denominator(w)) is not None and (found := normalised(a, t, key))
        ):
            return found
        case Apply("exp", (Apply("sub", (a, c)),)) if (found := log_normalised(a, c, key)):
            return found
        case Apply("mul", (x, w)) if not reduces(w):
            return scaled(softmax_weights(x, key), w)
        case Apply("mul", (w, x)) if not reduces(w):
            return scaled(softmax_weights(x, key), w)
        case Apply("div", (x, w)) if not reduces(w):
            return scaled(softmax_weights(x, key), apply("div", const(1.0), w))
        case Apply("where", (Apply("isnan", (x,)), Const(0 | 0.0), y)) if within(y) == x:
            found = softmax_weights(x, key)
            return found and replace(found, empty_row="zero")
        case Apply("where", (c, x, Const(0 | 0.0))) if not reduces(c):
            return scaled(softmax_weights(x, key), apply("where", c, const(1.0), const(0.0)))
        case Apply("where", (c, Const(0 | 0.0), x)) if not reduces(c):
            return scaled(softmax_weights(x, key), apply("where", c, const(0.0), const(1.0)))
    return None


def denominator(e: Expr) -> Expr | None:
    """t of 1 / t"""
    match e:
        case Cast(x, _):
            return denominator(x)
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


def reduces(e: Expr) -> bool:
    """Whether `e` holds a reduction (and so, here, the scores)."""
    return any(isinstance(x, Reduce) for x in parts(e))


def normalised(a: Expr, total: Expr, key: Var) -> Weights | None:
    """exp(a) / total, where total sums exp(a) over the keys, and perhaps a few entries more."""
    terms = list(summands(total))
    sums = [t for t in terms if isinstance(t, Reduce) and t.op == "sum"]
    if len(sums) != 1 or not isinstance(sums[0].body, Apply) or sums[0].body.op != "exp":
        return None
    var, (b,) = sums[0].var, sums[0].body.operands
    start = first_key(a, b, var, key)
    if start is None:
        return None
    extras = [t for t in terms if t is not sums[0]]
    others = outside(var.size, start, key.size)
    if others is None or len(others) > MOST_EXTRAS:
        return None
    extras += [apply("exp", substitute(b, {var: at})) for at in others]
    scores, shift = unshifted(a, key)
    return Weights(scores, sink_of(extras, shift))


def summands(e: Expr) -> tuple[Expr, ...]:
    match e:
        case Apply("add", (x, y)):
            return (*summands(x), *summands(y))
    return (e,)


def first_key(a: Expr, b: Expr, var: Var, key: Var) -> Expr | None:
    """Where the keys begin in the normalised axis: the s with b[s + key] = a."""
    extra = apply("sub", var.size, key.size)
    for start in dict.fromkeys((ZERO, extra)):
        if substitute(b, {var: apply("add", key, start)}) == a:
            return start
    return None


def outside(size: Expr, start: Expr, keys: Expr) -> list[Expr] | None:
    """Positions of the normalised axis that are no keys, where their number is a constant."""
    more = poly(apply("sub", size, keys))
    if any(m for m in more):
        return None
    count = more.get((), 0)
    if count < 0 or count > MOST_EXTRAS:
        return None
    base = keys if start == ZERO else ZERO
    return [apply("add", base, const(k)) for k in range(count)]


def unshifted(a: Expr, key: Var) -> tuple[Expr, Expr | None]:
    """(x, m) of a = x - m, m the same for every key and made by a reduction; softmax does not see m."""
    match a:
        case Apply("mul", (Apply("sub", (x, m)), c)) if key.name not in variables(m) and reduces(m) and not reduces(c):
            return apply("mul", x, c), apply("mul", m, c)
        case Apply("sub", (x, m)) if key.name not in variables(m) and reduces(m):
            return x, m
    return a, None


def sink_of(extras: list[Expr], shift: Expr | None) -> Expr | None:
    """The logit of the extra entries. They were shifted as the scores were. Raises Decline."""
    if not extras:
        return None
    if len(extras) > 1:
        raise Decline("the normaliser holds more than one entry that is no key")
    match extras[0]:
        case Apply("exp", (Apply("sub", (t, m)),)) if m == shift:
            return t
        case Apply("exp", (Apply("neg", (m,)),)) if m == shift:
            return const(0.0)
        case Apply("exp", (t,)) if shift is None and not reduces(t):
            return t
        case Const(float() | int() as c) if shift is None and c > 0:
            return apply("log", const(float(c)))
    raise Decline("the normaliser adds something that is not the exponential of a logit")


def log_normalised(a: Expr, c: Expr, key: Var) -> Weights | None:
    """exp(a - c) with c = log sum_j exp(a_j), or c = m + log sum_j exp(a_j - m)."""
    match c:
        case Apply("log", (total,)):
            return normalised(a, total, key)
        case Apply("add", (m, Apply("log", (total,)))) | Apply("add", (Apply("log", (total,)), m)):
            return normalised(apply("sub", a, m), total, key)
    return None
