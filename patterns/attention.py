"""Attention in a graph:  O[.., q, dv] = sum_k softmax_k(S(sum_d Q[.., q, d] K[.., k, d])) V[.., k, dv].

Anchor and lift. The anchor is a product over an axis (or an SDPA call, or a quotient whose numerator is one); lifting
its left factor over that axis must give softmax weights, and what lies under them must hold a product of its own. The
axes decide: which is contracted, which is normalised. Spellings do not.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.facts import Facts, Place, is_tensor, op_name, place, reach, shape
from fusecomp.graph.holding import numbers
from fusecomp.graph.rewriting import facts_of
from fusecomp.ir.algebra import ZERO, const
from fusecomp.ir.expr import Apply, Expr, Var
from fusecomp.patterns.build import Match, ReadElsewhere, build
from fusecomp.patterns.contraction import Contraction, contraction
from fusecomp.patterns.exponentials import exponential
from fusecomp.patterns.lift import Decline, Lift, Outside, broadcast
from fusecomp.patterns.positive import logarithm, normalised_weights
from fusecomp.patterns.products import Found
from fusecomp.patterns.reasons import NO_WEIGHTS, no_weights, under_scores
from fusecomp.patterns.seen import of_each_key
from fusecomp.patterns.weights import Weights, denominator, softmax_weights

log = logging.getLogger(__name__)
SOFTMAX = {"softmax", "_softmax", "special_softmax", "_safe_softmax", "log_softmax", "_log_softmax"}
QUOTIENT = {"div", "true_divide", "divide", "div_"}
PRODUCT = {"mul", "multiply", "mul_"}
EXPONENTIAL = {"exp", "exp2", "special_exp2", "exp_", "exp2_", "pow"}
NO_ROW = "?"
"""The letter of q_idx where the weights have no axis of their own: one query."""
GATE = "neither is it taken of scores, nor does it weight the left factor of a product"
"""Such a softmax (a router of experts, a distribution) is no candidate, and nothing is said of it."""
BATCH_NAMES = {0: "", 1: "b", 2: "bh", 3: "bhg", 4: "bwhg"}


@dataclass(frozen=True)
class Declined:
    """A candidate that is left alone."""

    reason: str
    place: Place
    anchor: Node
    advice: str = ""
    error: Exception | None = None
    """Of fusecomp itself, where that is why."""


@dataclass
class Recogniser:
    """Reads candidates of one captured graph, as it is now."""

    module: GraphModule
    outside: frozenset[Node] = frozenset()
    """Nodes that are read as they are, whatever they compute."""
    facts: Facts = field(init=False)
    constants: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.facts = facts_of(self.module)
        self.constants = numbers(self.module)

    def one(self, anchor: Node) -> Match | Declined:
        """What became of one candidate."""
        try:
            return self.match(anchor)
        except ReadElsewhere as d:
            return self.beside(anchor) or declined(d, anchor)
        except Decline as d:
            return declined(d, anchor)
        except Exception as error:  # costs this candidate, and no other
            log.debug("fusecomp failed to read an attention", exc_info=True)
            return Declined(f"{type(error).__name__}: {error}", place(anchor), anchor, error=error)

    def beside(self, anchor: Node) -> Match | None:
        """The attention whose scores are read by other attentions too, and by nothing else: when all are fused, nobody
        needs them any more. (softmax(s) V and softmax(s) W have one softmax: its weights are read twice.)"""
        try:
            first = self.match(anchor, self.facts.position)
            own = {*first.interior, first.output}
            below = reach(first.interior, lambda n: [u for u in n.users if u not in own and not contraction(u)]) - own
            group = [first, *(self.match(a, self.facts.position) for a in candidates(self.module) if a in below)]
            shared = {n for m in group for n in (m.output, *m.interior)}
            closed = [self.match(m.anchor, shared) for m in group]
            return closed[0]
        except Decline:
            return None

    def match(self, anchor: Node, shared: Container[Node] = ()) -> Match:
        """The attention around one softmax, whose scores the nodes in `shared` may read too. Raises Decline."""
        lift = Lift(self.facts, constants=self.constants, outside=self.outside)
        reasons: list[Decline] = []
        queue = list(products_below(anchor))
        while queue:
            output, spec = queue[0]
            try:
                return build(lift, self.read(lift, output, spec), anchor, shared)
            except Outside as o:
                lift = Lift(self.facts, constants=self.constants, outside=lift.outside | {o.node})
            except Decline as d:
                reasons.append(d)
                queue.pop(0)
        if anchor not in lift.visited and not under_scores(anchor.all_input_nodes):
            raise Decline(GATE, anchor)
        if reasons:
            raise reasons[0]
        raise Decline("its weights reach no product with values", anchor, "for attention, multiply the weights by V")

    def read(self, lift: Lift, node: Node, spec: Contraction) -> Found:
        """The mathematics at one product: which axis is which, the weights, the values. Raises Decline."""
        axes = name_axes(spec)
        lift.limit = lift.facts.position[node]
        lifted = lift.lift_at(spec.left, node, tuple(axes.get(a, ZERO) for a in spec.left_axes))
        key = axes[spec.contracted]
        lifted = of_each_key(lift, lifted, key)
        output, weights = divided(lift, node, lifted, spec, axes) or (node, softmax_weights(lifted, key))
        if weights is None:
            raise no_weights(lift, lifted, key, node)
        if spec.added is not None:
            reason = "the product of weights and values is added to another tensor in one call"
            raise Decline(reason, node, "add it afterwards, in a call of its own")
        return Found(node, output, spec, axes, weights.times(spec.scale))


def divided(lift: Lift, node: Node, e: Expr, spec: Contraction, axes: dict[str, Var]) -> tuple[Node, Weights] | None:
    """Deferred division: (exp(a) V) / sum_j exp(a_j), the quotient being the output."""
    if exponential(e) is None and logarithm(e) is None:
        return None
    out_index = tuple(axes.get(a, ZERO) for a in spec.out_axes)
    for user in node.users:
        other = next((x for x in user.args if x is not node), None)
        inverse = op_name(user) in PRODUCT
        if not (inverse or (op_name(user) in QUOTIENT and user.args[0] is node)) or not is_tensor(other):
            continue
        by = lift.lift_at(other, user, broadcast(out_index, shape(user), shape(other)))
        total = denominator(by) if inverse else by
        if total is not None and (found := softmax_weights(Apply("div", (e, total)), axes[spec.contracted])):
            lift.visited.add(node)
            return user, found
    return None


def candidates(module: GraphModule) -> Iterator[Node]:
    """Every softmax, and every exponential or other positive function of scores that may be the numerator of one."""
    for node in module.graph.nodes:
        name = op_name(node)
        known = (name in SOFTMAX and is_tensor(node)) or (name in EXPONENTIAL and is_exponential(node))
        if known or normalised_weights(node):
            yield node


def is_exponential(node: Node) -> bool:
    """c ** x for each element x of a tensor that may hold scores."""
    if op_name(node) == "pow" and is_tensor(node.args[0]):
        return False
    return is_tensor(node) and len(shape(node)) > 1 and not from_log_softmax(node)


def from_log_softmax(node: Node) -> bool:
    """Whether this exponential only undoes a log_softmax, which is a candidate itself."""
    source = node.args[0]
    while isinstance(source, Node) and op_name(source) in ("to", "type_as", "_to_copy"):
        source = source.args[0]
    return isinstance(source, Node) and op_name(source) in ("log_softmax", "_log_softmax")


def products_below(anchor: Node) -> Iterator[tuple[Node, Contraction]]:
    """Products that the anchor's value reaches without passing another product, weights on the left."""
    seen, queue, reached = {anchor}, [anchor], {anchor}
    while queue:
        node = queue.pop(0)
        for user in node.users:
            spec = contraction(user)
            if spec is not None and (spec.left in reached or spec.right in reached):
                if user not in seen:
                    seen.add(user)
                    yield user, spec if spec.left in reached else spec.swapped()
                continue
            if user not in seen and user.op == "call_function" and len(reached) < 64:
                seen.add(user)
                reached.add(user)
                queue.append(user)


def name_axes(spec: Contraction) -> dict[str, Var]:
    """Which letter is which index. Raises Decline where the product is not one of weights and values.

    kv_idx is contracted; dv is of the values alone; the last axis of the weights alone is q_idx; all others are batch.
    """
    if len(spec.contracted) != 1:
        raise Decline("the product of weights and values sums over more than one axis",
                      advice="sum over the keys alone, and over the other axes afterwards")  # fmt: skip
    if "." in spec.out_axes:
        raise Decline("the product of weights and values keeps the axis that it sums over",
                      advice="sum without keepdim, and unsqueeze the result")  # fmt: skip
    key = spec.contracted
    long = [a for a in spec.out_axes if a != "."]
    dv = [a for a in long if a in spec.right_axes and a not in spec.left_axes]
    own = [a for a in spec.left_axes if a in long and a not in spec.right_axes]
    if not dv:
        raise Decline("the product has no value axis", advice="give the values an axis of their own, of length 1")
    rows = [a for a in own if spec.left_axes.index(a) < spec.left_axes.index(key)] or own
    row = rows[-1] if rows else None
    batch = [a for a in long if a not in (row, dv[-1])]
    if len(batch) not in BATCH_NAMES:
        raise Decline(f"{len(batch)} batch axes; at most 4 are supported", advice="fold neighbouring axes into one")
    axes: dict[str, Var] = {a: Var(name, spec.size(a)) for a, name in zip(batch, BATCH_NAMES[len(batch)], strict=True)}
    axes[key], axes[dv[-1]] = Var("kv_idx", spec.size(key)), Var("dv", spec.size(dv[-1]))
    axes[row or NO_ROW] = Var("q_idx", spec.size(row) if row else const(1))
    return axes


def declined(d: Decline, anchor: Node) -> Declined:
    at = place(d.node) if d.node is not None else Place()
    return Declined(d.reason, at if at.where else place(anchor), anchor, d.advice)


def idle(x: Match | Declined) -> bool:
    """A gate is no candidate, nor an exponential that weights no product: it is just an exponential."""
    if isinstance(x, Match):
        return False
    if op_name(x.anchor) not in SOFTMAX | EXPONENTIAL and x.reason in NO_WEIGHTS:
        return True
    return x.reason == GATE or (op_name(x.anchor) in EXPONENTIAL and "reach no product" in x.reason)


def recognise(module: GraphModule) -> Iterator[Match | Declined]:
    """Each attention of a captured graph, in order. The graph may be rewritten between two answers."""
    for anchor in list(candidates(module)):
        recogniser = Recogniser(module)
        while anchor in recogniser.facts.position and not idle(found := recogniser.one(anchor)):
            yield found
            recogniser = Recogniser(module)
            if isinstance(found, Declined) or found.output in recogniser.facts.position:
                break  # nothing changed; else the weights may reach another product
