"""Tensors of one number for each row of the scores, and whether what is subtracted from scores is finite in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.fx import GraphModule, Node

from fusecomp.graph.facts import is_tensor, number, op_name, reach, shape
from fusecomp.graph.rewriting import facts_of
from fusecomp.ir.expr import Const, Load, Var, parts
from fusecomp.patterns.lift import Decline, Lift, argument, axis
from fusecomp.patterns.masks import sees_a_key, split
from fusecomp.patterns.normalisers import LEAST

CASTS = ("to", "_to_copy", "type_as", "float", "half", "bfloat16")
INF = float("inf")


class Shifted(Protocol):
    """exp(scores - shift)"""

    @property
    def made(self) -> Node: ...
    @property
    def scores(self) -> Node: ...
    @property
    def shift(self) -> Node: ...


class Other(Exception):
    """It is not made so."""


def row(node: Any) -> Node:
    """A node without casts and without an axis of length 1 behind the others."""
    while isinstance(node, Node):
        last = op_name(node) in ("unsqueeze", "squeeze") and len(node.args) > 1 and trailing(node)
        if not last and op_name(node) not in CASTS:
            return node
        node = node.args[0]
    raise Other


def trailing(node: Node) -> bool:
    rank = max(len(shape(node)), len(shape(node.args[0])))
    return isinstance(node.args[1], int) and axis(node.args[1], rank) == rank - 1


def plain(node: Node) -> bool:
    return len(node.args) == 2 and not node.kwargs and all(map(is_tensor, node.args))


def finite(m: Node) -> Node:
    """m of where(m == -inf, 0, m) and its like: where m is -inf, all its exponentials are 0 either way"""
    name = op_name(m)
    if name == "masked_fill" and tests(m.args[1], m.args[0]):
        return m.args[0]  # type: ignore[return-value]
    if name == "where" and len(m.args) == 3 and tests(m.args[0], m.args[2]):
        return m.args[2]  # type: ignore[return-value]
    return m


def tests(c: Any, m: Any) -> bool:
    """Whether `c` says that m is -inf."""
    if not isinstance(c, Node):
        return False
    equal = op_name(c) == "eq" and len(c.args) > 1 and c.args[1] == -INF
    return (equal or op_name(c) in ("isinf", "isneginf")) and c.args[0] is m


def known_rows(module: GraphModule, found: Sequence[Shifted]) -> bool:
    """Whether every shift is finite in every row: it begins at a number below all scores, or is the largest score of
    keys of which each row sees one. Less -inf, even a score of -inf is NaN."""
    lift = Lift(facts_of(module))
    seen: dict[Node, bool] = {}
    for t in sorted(found, key=lambda t: lift.facts.position[t.made]):
        above = reach([t.shift], maxima)
        begins = [number(argument(x, FILL[op_name(x)], "fill_value")) for x in above if op_name(x) in FILL]
        if any(not isinstance(b, Const) or b.value > LEAST for b in begins):
            return False
        if any(isinstance(b, Const) and b.value > -INF for b in begins):
            continue
        largest = {x.args[0] for x in above if op_name(x) in ("amax", "max") and x.args[0] in {t.scores for t in found}}
        for s in largest - set(seen):
            seen[s] = sees_keys(lift, s)  # type: ignore[index, arg-type]
        if not any(seen[s] for s in largest):  # type: ignore[index]
            return False
    return True


FILL = {"full": 1, "full_like": 1, "new_full": 2}
"""Where a call has the number that it fills with."""


def maxima(node: Node) -> list[Node]:
    """What a maximum is taken of, where that is of rows already."""
    along = ("maximum", "unsqueeze", "squeeze", "detach", "getitem", *CASTS)
    return node.all_input_nodes if op_name(node) in along or (op_name(node) == "max" and plain(node)) else []


def sees_keys(lift: Lift, scores: Node) -> bool:
    """Whether every query provably sees a key of these scores."""
    lengths = shape(scores)
    index = tuple(Var(f"i{n}", size) for n, size in enumerate(lengths))
    index = (*index[:-2], Var("q_idx", lengths[-2]), Var("kv_idx", lengths[-1]))
    try:
        masked = split(lift.lift(scores, index))
    except Decline:
        return False
    read = {x.tensor for x in parts(masked.score) if isinstance(x, Load)}
    seen = masked.fill != -INF or sees_a_key(masked.keep, index[-2], index[-1])
    return read <= set(lift.products) and seen
