"""Sums with softmaxes before the product with V, written as sums of products.

    (softmax(a) - lam softmax(b)) V = softmax(a) V - lam (softmax(b) V)
    (softmax(a) + W + c) V          = softmax(a) V + W V + c (1 V)

Exact but for roundings: each product is rounded, where each softmax was. Only where a term is a softmax, and nothing
else reads the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, is_tensor, op_name, shape, value
from fusecomp.graph.rewriting import Written, facts_of, write
from fusecomp.patterns.contraction import Contraction, contraction

SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
MOVES = {"select", "slice", "getitem", "unbind", "chunk", "split", "view", "reshape", "unflatten", "permute"}
KEEPS = {
    "to", "_to_copy", "type_as", "contiguous", "clone", "masked_fill", "nan_to_num", "dropout", "mul", "div", "where",
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """sign * factors * weights"""

    weights: Any
    """A tensor, or a number for all."""
    sign: int = 1
    factors: tuple[Any, ...] = ()
    """Numbers, and tensors of one element."""
    own: tuple[Any, ...] = ()
    """Tensors of other shapes, such as a number for each head."""

    @property
    def inputs(self) -> list[Node]:
        return [n for n in (self.weights, *self.factors, *self.own) if isinstance(n, Node)]


NOTHING = Term(0.0)


def distribute(module: GraphModule) -> Iterator[Written]:
    """Write out every product whose weights are a sum of softmaxes."""
    for product in list(module.graph.nodes):
        spec = contraction(product)
        if spec is None or spec.added is not None:
            continue
        for weights in (spec.left, spec.right):
            terms = list(terms_of(weights, product))
            if len(terms) > 1 and any(soft(t) for t in terms) and not written(module, terms, product):
                yield distributed(product, weights, terms)
                break


def written(module: GraphModule, terms: Sequence[Term], product: Node) -> bool:
    """Whether something that a term is made of is written into before the product: it was read by then."""
    facts = facts_of(module)
    made_of = [n for t in terms for n in t.inputs]
    first = {n: min(facts.position[u] for u in n.users) for n in made_of}
    return any(facts.written_between(n, at, facts.position[product]) for n, at in first.items())


def terms_of(node: Any, reader: Node, so_far: Term = NOTHING) -> Iterator[Term]:
    """The terms of a sum that `reader` alone reads."""
    if not isinstance(node, Node) or (contraction(reader) is None and not same(node, reader)):
        yield replace(so_far, weights=node)
        return
    args = node.args[:2]
    plain = list(node.users) == [reader] and len(node.args) == 2 and not node.kwargs
    if plain and op_name(node) in ("add", "sub") and any(same(x, node) for x in args) and all(map(term, args)):
        yield from terms_of(args[0], node, so_far)
        yield from terms_of(args[1], node, replace(so_far, sign=-so_far.sign) if op_name(node) == "sub" else so_far)
    elif plain and (split := scaled(node)):
        one = isinstance(split[1], int | float) or value(split[1]).numel() == 1
        factors, own = so_far.factors, so_far.own
        with_it = replace(so_far, factors=(*factors, split[1])) if one else replace(so_far, own=(*own, split[1]))
        yield from terms_of(split[0], node, with_it)
    else:
        yield replace(so_far, weights=node)


def term(x: Any) -> bool:
    """Whether `x` is a number or a tensor of numbers."""
    return isinstance(x, int | float) or (is_tensor(x) and dtype(x) != "bool")


def scaled(node: Node) -> tuple[Node, Any] | None:
    """(weights, factor) of weights * factor, factor * weights, weights / number"""
    x, y = node.args[:2]
    if op_name(node) == "div" and isinstance(y, int | float) and same(x, node):
        return x, 1.0 / y  # type: ignore[return-value]
    for w, c in ((x, y), (y, x)) if op_name(node) == "mul" else ():
        if same(w, node) and (isinstance(c, int | float) or (is_tensor(c) and dtype(c) == dtype(w))):
            return w, c  # type: ignore[return-value]
    return None


def soft(t: Term) -> bool:
    return isinstance(t.weights, Node) and leads_to_softmax(t.weights)


def same(x: Any, node: Node) -> bool:
    """Whether `x` is a tensor of the shape and dtype of `node`."""
    return is_tensor(x) and value(x).shape == value(node).shape and dtype(x) == dtype(node)


def leads_to_softmax(node: Node) -> bool:
    """Whether a softmax lies above, behind pointwise operations and rearrangements."""
    while op_name(node) in (*MOVES, *KEEPS) and node.args:
        above = node.args[0] if op_name(node) in MOVES else kept(node)
        if not isinstance(above, Node):
            return False
        node = above
    return op_name(node) in SOFTMAX


def kept(node: Node) -> Node | None:
    """What a pointwise operation keeps the shape of: of a choice, the last."""
    tensors = [x for x in node.args if is_tensor(x) and shape(x) == shape(node)]
    return next(iter(tensors[::-1] if op_name(node) == "where" else tensors), None)


def distributed(product: Node, weights: Node, terms: list[Term]) -> Written:
    """The product of each term on its own, added up, in the place of the product of their sum."""
    used = [n for t in terms for n in t.inputs]
    nodes = list(dict.fromkeys([*used, *(n for n in product.all_input_nodes if n is not weights)]))

    def summed(*tensors: Tensor) -> Tensor:
        known = dict(zip(nodes, tensors, strict=True))
        return reduce(torch.add, (multiplied(product, t, known, weights) for t in terms))

    before = product.prev
    output = inline(product, summed, nodes)
    return write(product, output, [n for n in between(before, product) if contraction(n)])


def between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes after one and before another."""
    while (first := first.next) is not last:
        yield first


def multiplied(product: Node, t: Term, known: Mapping[Node, Tensor], weights: Node) -> Tensor:
    """sign * factors * (weights V)"""
    spec = contraction(product)
    assert spec is not None
    spec, to = spec if spec.left is weights else spec.swapped(), value(weights).dtype
    values = known[spec.right]
    x = known[t.weights] if isinstance(t.weights, Node) else values.new_full((), t.weights, dtype=to)
    x = stretched(reduce(torch.mul, (known[c] for c in t.own), x).to(to), values, spec)
    args, kwargs = torch.fx.map_arg((product.args, product.kwargs), {**known, weights: x}.__getitem__)
    part = product.target(*args, **kwargs)  # type: ignore[operator]
    for c in t.factors:
        part = part * (known[c].reshape(()) if isinstance(c, Node) else c)
    return part if t.sign > 0 else -part


def stretched(x: Tensor, values: Tensor, spec: Contraction) -> Tensor:
    """A term with all the axes of the values; along the queries, over which the sum broadcasts, as it is."""
    x = x[(None,) * (len(spec.left_axes) - x.dim())]
    sizes = [values.shape[spec.right_axes.index(a)] if a != "." and a in spec.right_axes and n == 1 else n
             for a, n in zip(spec.left_axes, x.shape, strict=True)]  # fmt: skip
    return x if list(x.shape) == sizes else x.expand(sizes)
