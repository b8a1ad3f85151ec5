"""Lifting: the value of a tensor at an index, as a scalar expression.

    lift(a + b)[i]            = lift(a)[i] + lift(b)[i]
    lift(a.unsqueeze(1))[i,j,k] = lift(a)[i, k]
    lift(arange(n))[i]        = i
    lift(softmax(s))[.., n]   = exp(s[.., n]) / sum_j exp(s[.., j])

Broadcasting, views, masks and gathers become index arithmetic, so no spelling of them is a pattern. What has no rule is
a leaf: a tensor that is computed outside and read at its index. So is a tensor to whose source an index would become
too long, as through views of symbolic lengths that padding came between.

Time matters where a graph writes in place. A tensor is read by the operation that consumes it, not where it was made;
`at` is the position of that reader. A value overwritten between its making and its reading is not lifted through. Nor
is one at which gradients stop: the kernel would send them on; nor one whose gradient would be a scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from fusecomp.graph.facts import (
    Facts,
    dtype,
    is_tensor,
    number,
    op_name,
    said,
    shape,
    storage,
    value,
    written_arguments,
)
from fusecomp.graph.holding import single
from fusecomp.graph.learning import cut, learns
from fusecomp.ir.algebra import ZERO, apply, const
from fusecomp.ir.expr import Const, Expr, Load, Reduce, Var, dtype_kind, length, parts, variables
from fusecomp.ir.widths import may_wrap
from fusecomp.patterns.contraction import Contraction, contraction
from fusecomp.patterns.promotion import promoted, widens

Index = tuple[Expr, ...]
Rule = Callable[["Lift", Node, Index], Expr | None]

RULES: dict[str, Rule] = {}
"""ATen name -> how to lift it. A rule answers None where this call is beyond it: the node is then a leaf."""
VIEWS: set[str] = set()
"""Names whose result is the same memory or the same values in another arrangement."""
SHORT, LONG = 30, 150
"""Parts of an index: up to which a tensor is read as it is rather than followed further, and beyond which none is."""


def rule(*names: str, moves: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for ATen names; `moves` says that it only rearranges values."""

    def register(f: Rule) -> Rule:
        for name in names:
            RULES[name] = f
        if moves:
            VIEWS.update(names)
        return f

    return register


class Outside(Exception):
    """A node must be computed outside: its value, not its expression, is to be read."""

    def __init__(self, node: Node) -> None:
        self.node = node


class Decline(Exception):
    """This candidate is left alone."""

    def __init__(self, reason: str, node: Node | None = None, advice: str = "") -> None:
        super().__init__(reason)
        self.reason, self.node, self.advice = reason, node, advice


class Tangled(Decline):
    """An index became too long to be followed; a tensor that is asked at a short one is read as it is instead."""


@dataclass
class Read:
    """A leaf that an expression loads, and the first position at which the graph read it."""

    node: Node
    at: int


@dataclass
class Lift:
    """Lifts the values of one graph. `reads` and `products` say what the expressions made so far refer to."""

    facts: Facts
    reads: dict[str, Read] = field(default_factory=dict)
    products: dict[str, Contraction] = field(default_factory=dict)
    visited: set[Node] = field(default_factory=set)
    memo: dict[tuple[Node, Index, int], tuple[Expr, set[Node]]] = field(default_factory=dict)
    """Expressions already made, with the nodes that each was read from."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Values of the graph's get_attr nodes, by node name."""
    outside: frozenset[Node] = frozenset()
    """Nodes that are leaves whatever they compute."""
    widened: set[str] = field(default_factory=set)
    """Tensors of fewer than 64 bits that the graph computes with in int64."""
    wrapped: set[str] = field(default_factory=set)
    """Tensors of int32 that may hold what passed 2^31."""
    reductions: dict[Expr, Node] = field(default_factory=dict)
    """The nodes that sums and maxima were lifted from."""
    rules: dict[str, Rule] = field(default_factory=lambda: RULES)
    bound: int = 0
    limit: int = 1 << 60
    """Position of the output that the kernel will stand at."""
    at: int = 1 << 60
    """Position of the operation that reads what is lifted now."""

    def fresh(self, size: Expr) -> Var:
        """An index that no other expression uses."""
        self.bound += 1
        return Var(f"j{self.bound}", size)

    def lift(self, node: Any, index: Index) -> Expr:
        """node[index]; numbers lift to themselves."""
        if not is_tensor(node):
            return self.scalar(node)
        key = (node, index, self.at)
        if key not in self.memo:
            before, self.visited = self.visited, set()
            try:
                self.memo[key] = self.lift_tensor(node, index), self.visited
            finally:
                self.visited = before
        e, nodes = self.memo[key]
        self.visited |= nodes
        return e

    def holds_score(self, e: Expr) -> bool:
        """Whether `e` depends on some product."""
        return holds(e, self.products)

    def indexes(self, at: Expr) -> bool:
        """Whether a table may be read at `at` for every score. An index that costs float arithmetic, or a read for
        every pair of query and key, is better followed once, outside: the kernel then reads what it led to."""
        loads = [x for x in parts(at) if isinstance(x, Load)]
        return not any(dtype_kind(x.dtype) == "float" or runs_over_pairs(x) for x in loads)

    def scalar(self, x: Any) -> Expr:
        """A number, symbolic number, or a number taken out of a tensor."""
        e = number(x)
        if e is not None:
            return e
        if isinstance(x, Node) and op_name(x) in ("item", "_local_scalar_dense"):
            self.visited.add(x)
            return self.lift(x.args[0], (ZERO,) * len(shape(x.args[0])))
        raise Decline("a scalar argument is not a number that can be followed", x if isinstance(x, Node) else None)

    def lift_tensor(self, node: Node, index: Index) -> Expr:
        place = self.facts.position[node]
        if length(*index) > LONG:
            raise Tangled("where its scores stand in memory is too long an expression to follow", node)
        if node in self.outside or self.facts.written_between(node, place, self.at):
            return self.leaf(node, index)
        if node.name in self.constants and (held := single(self.constants[node.name])) is not None:
            return const(held)
        if (spec := contraction(node)) is not None:
            return self.product(node, spec, index)
        apply_rule = self.rules.get(functional_name(node))
        if apply_rule is None:
            return self.leaf(node, index)
        before = self.at
        if functional_name(node) not in VIEWS or not shares_memory(node):
            self.at = place
        try:
            lifted = apply_rule(self, node, index)
        except Tangled:
            if length(*index) > SHORT:
                raise
            lifted = None
        finally:
            self.at = before
        stops = lifted is not None and not self.holds_score(lifted) and (cut(node) or self.scatters(lifted))
        if lifted is None or self.stale(lifted, node) or stops or self.wraps(lifted, node):
            self.visited.clear()
            return self.leaf(node, index)
        self.visited.add(node)
        if widens(node):
            self.widened |= {x.tensor for x in parts(lifted) if isinstance(x, Load)}
        return lifted

    def stale(self, e: Expr, node: Node) -> bool:
        """Whether something that `e` reads is overwritten between its reading by `node` and the output. Then `node`
        itself, which holds the old value, is read; unless it holds scores, which are never kept."""
        if not self.facts.writes or (functional_name(node) in VIEWS and shares_memory(node)) or self.holds_score(e):
            return False
        read = [self.facts.names[x.tensor] for x in parts(e) if isinstance(x, Load)]
        return any(self.facts.written_between(x, self.facts.position[node] - 1, self.limit) for x in read)

    def wraps(self, e: Expr, node: Node) -> bool:
        """Whether an int32 may pass 2^31, where the graph's own begins anew at -2^31: no arithmetic here says so. Nor
        does it of what is computed from such."""
        found = dtype(node) == "int32" and may_wrap(e, self.wrapped)
        self.wrapped |= {node.name} if found else set()
        return found

    def scatters(self, e: Expr) -> bool:
        """Whether something that learns is read at the distance of query and key, or the like: its gradient is a
        scatter over all pairs. The graph then looks it up as written, and knows the gradient of that."""
        reads = [x for x in parts(e) if isinstance(x, Load) and learns(self.facts.names[x.tensor])]
        return any("q_idx" in variables(i) and runs_over_keys(i) for x in reads for i in x.index)

    def product(self, node: Node, spec: Contraction, index: Index) -> Expr:
        """A contraction stands as a pseudo-load of its own result: the recogniser decides what it is."""
        self.products[node.name] = spec
        self.visited |= {node, *inside(node, spec)}
        self.reads.setdefault(node.name, Read(node, self.at))
        at_index: Expr = Load(node.name, index, dtype(node))
        if spec.scale != Const(1.0):
            at_index = apply("mul", at_index, spec.scale)
        if spec.added is None:
            return at_index
        added = self.lift_at(spec.added, node, broadcast(index, shape(node), shape(spec.added)))
        return apply("add", apply("mul", added, spec.added_scale), at_index)

    def lift_at(self, x: Node, reader: Node, index: Index) -> Expr:
        before, self.at = self.at, self.facts.position[reader]
        try:
            return self.lift(x, index)
        finally:
            self.at = before

    def leaf(self, node: Node, index: Index) -> Load:
        """A tensor computed outside: loaded at its index."""
        read = self.reads.setdefault(node.name, Read(node, self.at))
        read.at = min(read.at, self.at)
        return Load(node.name, index, dtype(node))


def runs_over_pairs(load: Load) -> bool:
    """Whether `load` depends on both a query and a key."""
    return "q_idx" in variables(load) and runs_over_keys(load)


def runs_over_keys(e: Expr) -> bool:
    """Whether `e` depends on the key, which is a bound index where a sum over keys is lifted."""
    return any(n == "kv_idx" or n[1:].isdigit() for n in variables(e))


def inside(node: Node, spec: Contraction) -> set[Node]:
    """Nodes between a product and its two sides: the elementwise product under a sum."""
    return {n for n in node.all_input_nodes if n not in (spec.left, spec.right, spec.added)}


def holds(e: Expr, names: Container[str]) -> bool:
    """Whether `e` reduces over keys or reads one of the tensors named."""
    return any(isinstance(x, Reduce) or (isinstance(x, Load) and x.tensor in names) for x in parts(e))


def functional_name(node: Node) -> str:
    """The ATen name, an in-place operation under its functional twin's: its value is the same."""
    name = op_name(node)
    return name[:-1] if name.endswith("_") and written_arguments(node) else name


def shares_memory(node: Node) -> bool:
    """Whether a rearranging operation returned its input's memory."""
    source = next((a for a in node.args if isinstance(a, Node) and is_tensor(a)), None)
    return source is not None and storage(source) == storage(node)


def broadcast(index: Index, outer: Sequence[Expr], inner: Sequence[Expr]) -> Index:
    """The index into a tensor of lengths `inner` broadcast to `outer`: right-aligned, 0 along axes of length 1."""
    kept = index[len(index) - len(inner) :]
    lengths = outer[len(outer) - len(inner) :]
    one = const(1)
    return tuple(ZERO if s == one and o != one else i for i, s, o in zip(kept, inner, lengths, strict=True))


def lift_argument(lift: Lift, node: Node, x: Any, index: Index) -> Expr:
    """An argument of a pointwise operation at `index` of the result: tensors broadcast, numbers are themselves."""
    if is_tensor(x):
        return promoted(node, x, lift.lift(x, broadcast(index, shape(node), shape(x))))
    return lift.scalar(x)


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """A call's argument, positional or by keyword."""
    return said(node.args, node.kwargs, place, name, default)


def axis(n: Any, rank: int) -> int:
    """A dimension number in [0, rank)."""
    n = int(value(n))
    return n + rank if n < 0 else n
