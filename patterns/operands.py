"""What Q, K and V really are: the tensor in memory under views, expansions, repeats, page gathers and exact upcasts.

    repeat_interleave(k, 3, 1)[b, h, n, d]          = k[b, h // 3, n, d]
    pool[table].view(B, -1, Hkv, D)[b, n, h, d]     = pool[table[b, n // page], n % page, h, d]

Arithmetic (a scale on q, a norm, rotary embedding) stays outside, where Inductor fuses it with what made the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

import fusecomp.patterns.fetches
import fusecomp.patterns.progressions
import fusecomp.patterns.reductions
import fusecomp.patterns.spellings  # noqa: F401  (these register their rules)
from fusecomp.graph.facts import dtype, op_name, value
from fusecomp.graph.learning import cut
from fusecomp.ir.algebra import TRUE, apply
from fusecomp.ir.expr import Apply, Const, Expr, Load, Size, Var, parts, variables
from fusecomp.ir.poly import poly
from fusecomp.ir.ranges import bound_of
from fusecomp.patterns.contraction import Contraction
from fusecomp.patterns.lift import RULES, VIEWS, Index, Lift, Rule
from fusecomp.patterns.masks import conjuncts, oriented
from fusecomp.patterns.views import pieces_in_step

FETCHES = ("index", "_unsafe_index", "index_select", "gather", "take_along_dim", "take", "embedding")
JOINED = dict.fromkeys(("cat", "concat", "concatenate"), pieces_in_step) | {"stack": RULES["stack"]}
MOVES = {name: RULES[name] for name in [*VIEWS, *FETCHES]} | JOINED
ZEROING = {
    name: RULES[name] for name in ("where", "masked_fill", "zeros", "zeros_like", "full", "full_like", "new_zeros")
}
CASTS = ("to", "_to_copy", "type_as", "float", "half", "bfloat16")
WIDER = {
    "int8": ("bfloat16", "float16", "float32"),
    "uint8": ("bfloat16", "float16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
    "bfloat16": ("float32",),
    "float16": ("float32",),
}
"""Casts that lose nothing."""


@dataclass
class Moves(Lift):
    """A lift that follows rearrangements only, and through them the arithmetic of the integers that index."""

    more: dict[str, Rule] = field(default_factory=dict)
    """Rules of floating-point tensors besides the moves."""

    def lift_tensor(self, node: Node, index: Index) -> Expr:
        place = self.facts.position[node]
        if exact(node) and not cut(node) and not self.facts.written_between(node, place, self.at):
            found = self.lift_at(node.args[0], node, index)
            if self.stale(found, node):
                return self.leaf(node, index)
            self.visited.add(node)
            return found
        self.rules = {**MOVES, **self.more} if value(node).is_floating_point() else RULES
        if op_name(node) not in self.rules or cut(node):
            return self.leaf(node, index)
        return super().lift_tensor(node, index)

    def indexes(self, at: Expr) -> bool:  # noqa: ARG002
        """Operands are read through any page table."""
        return True

    def product(self, node: Node, spec: Contraction, index: Index) -> Expr:  # noqa: ARG002
        return self.leaf(node, index)


def exact(node: Node) -> bool:
    """Whether a node is a cast that loses nothing."""
    if op_name(node) not in CASTS or value(node.args[0]).device != value(node).device:
        return False
    return dtype(node) in (dtype(node.args[0]), *WIDER.get(dtype(node.args[0]), ()))


def operand(lift: Lift, node: Node, index: Index, column: Var, at: int) -> Load:
    """Which element of which tensor stands at node[index]: as far down as the kernel can address it."""
    moves = Moves(lift.facts, constants=lift.constants, outside=lift.outside, at=at, limit=lift.limit)
    found = moves.lift(node, index)
    if isinstance(found, Load) and addressable(found, column):
        return taken(lift, moves, found)
    return lift.leaf(node, index)  # type: ignore[return-value]


def taken(lift: Lift, moves: Moves, found: Load) -> Load:
    """`found`, with what was read on the way to it."""
    for name, read in moves.reads.items():
        seen = lift.reads.setdefault(name, read)
        seen.at = min(seen.at, read.at)
    lift.visited |= moves.visited
    lift.widened |= moves.widened
    return found


def values(lift: Lift, node: Node, index: Index, column: Var, at: int, keep: tuple[Expr, ...]) -> Load:
    """V; in pages also where the program zeroed what lies past a length, which is never read.

    (c ? V : 0)[.., n, ..] = V[.., n, ..]    for every key n that is read, if c only says n < length, as `keep` does
    """
    moves = Moves(lift.facts, constants=lift.constants, outside=lift.outside, at=at, limit=lift.limit, more=ZEROING)
    live, x = shown(moves.lift(node, index))
    if live != TRUE and isinstance(x, Load) and unread(live, x, keep) and addressable(x, column):
        return taken(lift, moves, x)
    return operand(lift, node, index, column, at)


def shown(e: Expr) -> tuple[Expr, Expr]:
    """(c, x) of e = c ? x : 0"""
    match e:
        case Apply("where", (c, x, Const(0 | 0.0))):
            return c, x
        case Apply("where", (c, Const(0 | 0.0), x)):
            return apply("not", c), x
    return TRUE, e


def unread(c: Expr, x: Load, keep: tuple[Expr, ...]) -> bool:
    """Whether the keys at which c fails lie past an end that the mask has too, one for a whole row of x's page table:
    kernels visit no key from there on."""
    tables = [t for i in x.index for t in parts(i) if isinstance(t, Load)]
    rows = {i.name for t in tables for i in t.index if isinstance(i, Var)}
    known = set(map(oriented, keep))
    for term in map(oriented, conjuncts(c)):
        match bound_of(term, "q_idx", "kv_idx"):
            case "upper", end if not end.slope and variables(end.edge) <= rows and term in known:
                continue
        return False
    return True


def addressable(load: Load, column: Var) -> bool:
    """Whether each coordinate is a sum of a part in the column (d) alone, as d or d // 8, and a part without it."""
    for coordinate in load.index:
        for monomial in poly(coordinate):
            inside = [f for f in monomial if column.name in variables(f)]
            if inside and (len(monomial) > 1 or not alone(inside[0], column)):
                return False
    return any(column.name in variables(c) for c in load.index)


def alone(e: Expr, column: Var) -> bool:
    """Whether `e` is a function of the column that is known before the run."""
    return variables(e) == {column.name} and not any(isinstance(x, Load | Size) for x in parts(e))
