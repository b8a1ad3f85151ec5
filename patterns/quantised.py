"""K and V that are scaled, or rounded to another dtype, after they are fetched: quantised pages.

    sum_d q[d] (s x[n, d]) = s sum_d q[d] x[n, d]       s a number of the head, the page, the token: of anything but d
    sum_n p[n] (s x[n, d]) = sum_n (p[n] s) x[n, d]

Only where the fetch is saved by it: of pages behind a table, or of a dtype that products do not take. Elsewhere the
arithmetic stays outside, with what made the tensor. The kernel rounds x once, to the dtype of its product.
"""

from __future__ import annotations

from torch.fx import Node

from fusecomp.graph.facts import dtype, value
from fusecomp.graph.learning import learns
from fusecomp.ir.algebra import TRUE, apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Var, parts, variables
from fusecomp.patterns.lift import RULES, Index, Lift
from fusecomp.patterns.operands import (
    CASTS,
    WIDER,
    ZEROING,
    Moves,
    addressable,
    operand,
    shown,
    taken,
    unread,
    values,
)

ONE = Const(1.0)
SCALES = {name: RULES[name] for name in ("mul", "multiply", "div", "true_divide", "divide")}
NARROW = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")


class Dequantised(Moves):
    """A lift that follows scales and one last rounding too."""

    def rounded(self, lift: Lift, node: Node, index: Index) -> Expr | None:
        """x in the dtype of the operand; a scaled x in any: what is scaled in another dtype is rounded otherwise"""
        if not value(node.args[0]).is_floating_point() or value(node.args[0]).device != value(node).device:
            return None
        x = lift.lift(node.args[0], index)
        return x if isinstance(x, Apply) or dtype(node) == self.into else None

    into: str = ""


def dequantised(
    lift: Lift, node: Node, index: Index, column: Var, at: int, keep: tuple[Expr, ...] | None = None
) -> tuple[Load, Expr] | None:
    """(x, s) of node[index] = s x; None where nothing is gained, or a gradient would have to flow through. With `keep`,
    also where the program zeroed what the mask hides."""
    if learns(node):
        return None
    moves = Dequantised(lift.facts, constants=lift.constants, outside=lift.outside, at=at, limit=lift.limit)
    moves.into = dtype(node)
    moves.more = SCALES | dict.fromkeys(CASTS, moves.rounded) | ({} if keep is None else ZEROING)
    live, scaled = shown(moves.lift(node, index))
    found = factored(scaled, column)
    if found is None or not gains(found[0]) or not addressable(found[0], column):
        return None
    if live != TRUE and (keep is None or not unread(live, found[0], keep)):
        return None
    x, s = found
    if s != ONE and x.dtype != dtype(node) and dtype(node) not in WIDER.get(x.dtype, ()):
        return None
    return taken(lift, moves, x), s


def factored(e: Expr, column: Var) -> tuple[Load, Expr] | None:
    """(x, s) of e = x s, where s is the same in all columns."""
    match e:
        case Load():
            return e, ONE
        case Apply("mul" | "div" as op, (a, s)) if column.name not in variables(s):
            found = factored(a, column)
            return found and (found[0], apply(op, found[1], s))
        case Apply("mul", (s, a)) if column.name not in variables(s):
            found = factored(a, column)
            return found and (found[0], apply("mul", found[1], s))
    return None


def gains(x: Load) -> bool:
    """Whether reading x itself saves a copy of what is fetched, or of it in a wider dtype."""
    return x.dtype in NARROW or any(isinstance(p, Load) for i in x.index for p in parts(i))


def scaled_keys(lift: Lift, node: Node, index: Index, column: Var, at: int) -> tuple[Load, Expr]:
    """K, and the factor of its score."""
    return dequantised(lift, node, index, column, at) or (operand(lift, node, index, column, at), ONE)


def scaled_values(
    lift: Lift, node: Node, index: Index, column: Var, at: int, keep: tuple[Expr, ...]
) -> tuple[Load, Expr]:
    """V, and the factor of its weight."""
    return dequantised(lift, node, index, column, at, keep) or (values(lift, node, index, column, at, keep), ONE)
