"""exp as exp2: where the factor log2(e) goes.

    softmax(S) = exp2(a score - max a score) / sum        a score = log2(e) S

The factor is folded into the constants of S, so that a plain scale costs one multiply-add an element. A score that may
hold the largest finite float (an additive mask, a finite fill) would overflow under the factor: there the maximum is
subtracted first, exp2(log2(e) (score - max score)). So it is where products are exact in float32: large scores cancel
in the difference without a rounding, forward and backward, where eager's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fusecomp.ir.algebra import apply, const
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Score, dtype_kind, kind, parts, variables

LOG2E = math.log2(math.e)
HUGE = 1e30
"""A finite constant beyond this is a fill, not a scale."""


@dataclass(frozen=True)
class Exponent:
    """S = score * scale in the unit of the row maximum, which is `unit` times the base-2 exponent."""

    score: Expr
    """What a tile computes for each element."""
    scale: float
    """Positive. The row maximum holds max(score) * scale."""
    natural: bool
    """The row maximum is in natural units: differences are multiplied by log2(e)."""

    def exp(self, difference: str) -> str:
        """exp of a difference of two row maxima, or of a score and one."""
        return f"tl.exp2(({difference}) * LOG2E)" if self.natural else f"tl.exp2({difference})"


def exponent(score: Expr, moving: frozenset[str], exact: bool = False) -> Exponent:
    """How softmax(score) is written with exp2; `moving` names the indices that vary inside a tile, `exact`: of float32
    products."""
    if exact or overflows(score, moving):
        return Exponent(score, 1.0, True)
    core, scale = peel(score)
    if scale == 1.0 and _has_inner_constant(core):
        return Exponent(scaled(core, LOG2E, moving), 1.0, False)
    return Exponent(core, scale * LOG2E, False)


def _has_inner_constant(e: Expr) -> bool:
    """Whether the factor can be taken up by constants inside a sum, rather than by one more multiply."""
    return isinstance(e, Apply) and e.op in ("add", "sub", "where")


def peel(e: Expr) -> tuple[Expr, float]:
    """(x, c) with e = c x and c > 0."""
    match e:
        case Apply("mul", (x, Const(c))) | Apply("mul", (Const(c), x)) if 0 < c < math.inf and kind(x) == "float":
            core, scale = peel(x)
            return core, scale * float(c)
        case Apply("div", (x, Const(c))) if 0 < c < math.inf and kind(x) == "float":
            core, scale = peel(x)
            return core, scale / float(c)
    return e, 1.0


def scaled(e: Expr, c: float, moving: frozenset[str]) -> Expr:
    """c e, with c taken into the constants and the loop-invariant factors of e."""
    again: Callable[[Expr], Expr] = lambda x: scaled(x, c, moving)  # noqa: E731
    match e:
        case Const(value):
            return const(float(value) * c) if value else e
        case Apply("add" | "sub" as op, (x, y)):
            return apply(op, again(x), again(y))
        case Apply("where", (test, x, y)):
            return apply("where", test, again(x), again(y))
        case Apply("neg", (x,)):
            return scaled(x, -c, moving)
        case Apply("mul", (x, Const(k))) | Apply("mul", (Const(k), x)) if kind(x) == "float":
            return scaled(x, c * float(k), moving)
        case Apply("div", (x, Const(k))) if k and kind(x) == "float":
            return scaled(x, c / float(k), moving)
        case Apply("mul", (x, y)) if kind(y) == "float" and not _moves(y, moving):
            return apply("mul", x, scaled(y, c, moving))
        case Apply("mul", (x, y)) if kind(x) == "float" and not _moves(x, moving):
            return apply("mul", scaled(x, c, moving), y)
    return apply("mul", e, const(c))


def _moves(e: Expr, moving: frozenset[str]) -> bool:
    return bool(variables(e) & moving) or any(isinstance(x, Score) for x in parts(e))


def overflows(e: Expr, moving: frozenset[str]) -> bool:
    """Whether `e` may hold a finite value whose product with log2(e) is infinite."""
    if any(isinstance(x, Const) and HUGE < abs(x.value) < math.inf for x in parts(e)):
        return True
    if any(isinstance(x, Load) and kind(x) == "float" and variables(x) & moving for x in parts(e)):
        return True
    return any(isinstance(x, Load) and kind(x) == "float" for x in _terms(e))


def _terms(e: Expr) -> list[Expr]:
    """The summands of `e`."""
    match e:
        case Apply("add" | "sub", (x, y)) | Apply("where", (_, x, y)):
            return [*_terms(x), *_terms(y)]
        case Apply("neg", (x,)):
            return _terms(x)
    return [e]


def may_be_minus_inf(e: Expr) -> bool:
    """Whether finite scores may become -inf here: by a constant, a bias, or an overflow of half precision."""
    match e:
        case Load(_, _, dtype):
            return dtype_kind(dtype) == "float"
        case Cast(_, dtype):
            return dtype == "float16"
        case Const(value):
            return value == float("-inf")
        case Apply(op, _):
            return op in ("log", "log2")
    return False
