"""Tensors of one number for each row of the scores, their exponentials, and whether what is subtracted from scores is
finite in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from torch.fx import GraphModule, Node

from fusecomp.graph.facts import is_tensor, number, op_name, reach, shape
from fusecomp.graph.rewriting import facts_of
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Load, Var, parts
from fusecomp.ir.poly import is_natural
from fusecomp.ir.ranges import reach as reached
from fusecomp.patterns.exponentials import INF, LOG2
from fusecomp.patterns.lift import Decline, Lift, argument, axis
from fusecomp.patterns.masks import Masked, sees_a_key, split
from fusecomp.patterns.normalisers import LEAST

CASTS = ("to", "_to_copy", "type_as", "float", "half", "bfloat16")
BASES = {"exp": 1.0, "exp2": LOG2, "special_exp2": LOG2}
"""Exponentials, and the natural logarithm of what each raises."""
Power = tuple[str, Node]
"""An exponent, and what it is one of."""


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


def uncast(node: Node) -> Node:
    """A node without casts."""
    while op_name(node) in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def chosen(node: Node) -> tuple[Node, tuple[Node, bool]] | None:
    """(x, (c, b)) of a tensor that is x where c is b, and 0 elsewhere"""
    match op_name(node), node.args:
        case "where", (Node() as c, Node() as x, 0):
            return x, (c, True)
        case ("where", (Node() as c, 0, Node() as x)) | ("masked_fill", (Node() as x, Node() as c, 0)):
            return x, (c, False)
    return None


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


def powers(e: Node) -> Counter[Power] | None:
    """The exponents of exp(a - b)."""
    difference = row(e.args[0]) if op_name(e) in BASES else e
    if difference is e or op_name(difference) != "sub" or not plain(difference):
        return None
    return power(e, *(row(finite(row(y))) for y in difference.args))


def power(e: Node, a: Node, b: Node) -> Counter[Power]:
    """What the exponential `e` of a - b counts."""
    counted = Counter({(op_name(e), a): 1})
    counted[op_name(e), b] -= 1
    return counted


def added(*exponents: Counter[Power]) -> Counter[Power]:
    total: Counter[Power] = Counter()
    for one in exponents:
        total.update(one)
    return total


def known_rows(module: GraphModule, found: Sequence[Shifted]) -> bool:
    """Whether every shift is finite in every row: it begins at a number below all scores, or is the largest score of
    keys of which each row sees one, or else none at all. Less -inf, even a score of -inf is NaN."""
    lift, scores = Lift(facts_of(module)), [t.scores for t in found]

    @cache
    def known(s: Node) -> bool:
        return sees_keys(lift, s) or leads(lift, s, scores)

    for t in sorted(found, key=lambda t: lift.facts.position[t.made]):
        above = reach([t.shift], maxima)
        begins = [number(argument(x, FILL[op_name(x)], "fill_value")) for x in above if op_name(x) in FILL]
        if any(not isinstance(b, Const) or b.value > LEAST for b in begins):
            return False
        if any(isinstance(b, Const) and b.value > -INF for b in begins):
            continue
        largest = {x.args[0] for x in above if op_name(x) in ("amax", "max")}.intersection(scores)
        if not any(known(s) for s in sorted(largest, key=lambda s: lift.facts.position[s])):
            return False
    return True


FILL = {"full": 1, "full_like": 1, "new_full": 2}
"""Where a call has the number that it fills with."""


def maxima(node: Node) -> list[Node]:
    """What a maximum is taken of, where that is of rows already."""
    along = ("maximum", "unsqueeze", "squeeze", "detach", "getitem", *CASTS)
    return node.all_input_nodes if op_name(node) in along or (op_name(node) == "max" and plain(node)) else []


def masked(lift: Lift, scores: Node) -> tuple[Masked, Var, Var] | None:
    """Scores by their last two axes, queries and keys, where all that they read are products."""
    *before, m, n = shape(scores)
    q_idx, kv_idx = Var("q_idx", m), Var("kv_idx", n)
    try:
        found = split(lift.lift(scores, (*(Var(f"i{i}", size) for i, size in enumerate(before)), q_idx, kv_idx)))
    except Decline:
        return None
    read = {x.tensor for x in parts(found.score) if isinstance(x, Load)}
    return (found, q_idx, kv_idx) if read <= set(lift.products) else None


def sees_keys(lift: Lift, scores: Node) -> bool:
    """Whether every query provably sees a key of these scores."""
    if (found := masked(lift, scores)) is None:
        return False
    here, q_idx, kv_idx = found
    return here.fill != -INF or sees_a_key(here.keep, q_idx, kv_idx)


def leads(lift: Lift, scores: Node, all_of_them: Sequence[Node]) -> bool:
    """Whether a query that sees no key of these scores sees none of the others, kv_idx < L - c, c >= 0: it is NaN in
    one softmax too."""
    ends = [upper_ends(lift, s) for s in (scores, *all_of_them)]
    (first, alone), *others = ends
    return alone and len(first) == 1 and all(
        any(is_natural(apply("sub", first[0], e)) for e in edges) for edges, _ in others
    )  # fmt: skip


def upper_ends(lift: Lift, scores: Node) -> tuple[list[Expr], bool]:
    """(the L of each kv_idx < L that a mask of -inf says, whether it says nothing else)."""
    if (found := masked(lift, scores)) is None or found[0].fill != -INF:
        return [], False
    seen = reached(found[0].keep, "q_idx", "kv_idx")
    flat = [b.edge for b in seen.upper if not b.slope]
    return flat, len(flat) == len(found[0].keep)
