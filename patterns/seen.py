"""Weights that are 0 where a query sees no key, as the program says it of the whole row:

    any_j c_j ? softmax(c ? a : -inf) : 0  =  c ? softmax(c ? a : -inf) : 0
    sum_j c_j > 0,  not all_j not c_j         the same as any_j c_j

Where a key is hidden, its weight is 0 in either.
"""

from __future__ import annotations

from fusecomp.graph.facts import dtype, op_name
from fusecomp.ir.algebra import apply, substitute
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Var, kind
from fusecomp.patterns.exponentials import INF
from fusecomp.patterns.lift import Lift, argument
from fusecomp.patterns.masks import conjuncts, split
from fusecomp.patterns.reductions import over
from fusecomp.patterns.weights import softmax_weights

NARROW = ("uint8", "int8", "int16")
"""Sums of truth values in these come round to 0."""


def of_each_key(lift: Lift, e: Expr, key: Var) -> Expr:
    """Weights that a row's truth value chooses, as ones that each key's own chooses; others as they are."""
    match e:
        case Cast(x, to):
            return Cast(of_each_key(lift, x, key), to)
        case Apply("where", (c, x, Const(0 | 0.0) as zero)):
            own = sees(lift, c, key)
        case Apply("where", (c, Const(0 | 0.0) as zero, x)):
            own = sees(lift, apply("not", c), key)
        case _:
            return e
    found = softmax_weights(x, key) if own is not None else None
    if own is None or found is None:
        return e
    masked = split(found.scores)
    hidden = masked.fill == -INF and set(conjuncts(own)) <= set(masked.keep)
    return apply("where", own, x, zero) if hidden else e


def sees(lift: Lift, c: Expr, key: Var) -> Expr | None:
    """c_j of c = any_j c_j"""
    match c:
        case Apply("not", (Load() as x,)):
            found = reduced(lift, x, key, "all")
            return None if found is None else apply("not", found)
        case Load() as x:
            return reduced(lift, x, key, "any")
        case Apply("gt" | "ne", (Load() as x, Const(0 | 0.0))) | Apply("lt" | "ne", (Const(0 | 0.0), Load() as x)):
            return reduced(lift, x, key, "sum")
        case Apply("not", (Apply("eq" | "le", (Load() as x, Const(0 | 0.0))),)):
            return reduced(lift, x, key, "sum")
    return None


def reduced(lift: Lift, x: Load, key: Var, name: str) -> Expr | None:
    """c of a tensor that is any_j, all_j or sum_j of truth values c_j over as many as there are keys, at the key."""
    node = lift.facts.names[x.tensor]
    dim = argument(node, 1, "dim") if op_name(node) == name else None
    if dim is None or (name == "sum" and dtype(node) in NARROW):
        return None
    before, lift.at = lift.at, lift.facts.position[node]
    try:
        j, c = over(lift, node.args[0], dim, x.index, argument(node, 2, "keepdim", False))  # type: ignore[arg-type]
    finally:
        lift.at = before
    while isinstance(c, Cast):
        c = c.x
    return substitute(c, {j: key}) if kind(c) == "bool" and j.size == key.size else None
