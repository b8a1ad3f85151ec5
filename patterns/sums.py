"""Sums of softmaxes before the product with V, written as sums of attentions.

    (softmax(a) - lam softmax(b)) V = softmax(a) V - lam (softmax(b) V)

Exact but for roundings: each attention is rounded, where each softmax was. Only where all terms are softmaxes, and
nothing else reads their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import Facts, dtype, is_tensor, op_name, value
from fusecomp.graph.rewriting import Written, write
from fusecomp.patterns.contraction import contraction

SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
MOVES = {"select", "slice", "getitem", "unbind", "chunk", "split", "view", "reshape", "unflatten", "permute"}
KEEPS = {
    "to", "_to_copy", "type_as", "contiguous", "clone", "masked_fill", "nan_to_num", "dropout", "mul", "div", "where",
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """sign * factors * weights"""

    weights: Node
    sign: int = 1
    factors: tuple[Any, ...] = ()
    """Numbers, and tensors of one element."""


def distribute(module: GraphModule) -> Iterator[Written]:
    """Write out every product whose weights are a sum of softmaxes."""
    for product in list(module.graph.nodes):
        spec = contraction(product)
        if spec is None or spec.added is not None:
            continue
        for weights in (spec.left, spec.right):
            terms = list(terms_of(weights, product))
            if len(terms) > 1 and all(leads_to_softmax(t.weights) for t in terms) and not written(terms, product):
                yield distributed(product, weights, terms)
                break


def written(terms: Sequence[Term], product: Node) -> bool:
    """Whether something that a term is made of is written into before the product: it was read by then."""
    facts = Facts(product.graph)
    made_of = [n for t in terms for n in (t.weights, *t.factors) if isinstance(n, Node)]
    first = {n: min(facts.position[u] for u in n.users) for n in made_of}
    return any(facts.written_between(n, at, facts.position[product]) for n, at in first.items())


def terms_of(node: Node, reader: Node, sign: int = 1, factors: tuple[Any, ...] = ()) -> Iterator[Term]:
    """The terms of a sum that `reader` alone reads."""
    args = node.args[:2]
    plain = list(node.users) == [reader] and len(node.args) == 2 and not node.kwargs
    if plain and op_name(node) in ("add", "sub") and all(same(x, node) for x in args):
        yield from terms_of(args[0], node, sign, factors)  # type: ignore[arg-type]
        yield from terms_of(args[1], node, -sign if op_name(node) == "sub" else sign, factors)  # type: ignore[arg-type]
    elif plain and (split := scaled(node)):
        yield from terms_of(split[0], node, sign, (*factors, split[1]))
    else:
        yield Term(node, sign, factors)


def scaled(node: Node) -> tuple[Node, Any] | None:
    """(weights, factor) of weights * factor, factor * weights, weights / number"""
    x, y = node.args[:2]
    if op_name(node) == "div" and isinstance(y, int | float) and same(x, node):
        return x, 1.0 / y  # type: ignore[return-value]
    for w, c in ((x, y), (y, x)) if op_name(node) == "mul" else ():
        if same(w, node) and (isinstance(c, int | float) or (is_tensor(c) and value(c).numel() == 1)):
            return w, c  # type: ignore[return-value]
    return None


def same(x: Any, node: Node) -> bool:
    """Whether `x` is a tensor of the shape and dtype of `node`."""
    return is_tensor(x) and value(x).shape == value(node).shape and dtype(x) == dtype(node)


def leads_to_softmax(node: Node) -> bool:
    """Whether a softmax lies above, behind pointwise operations and rearrangements."""
    while op_name(node) in (*MOVES, *KEEPS) and node.args:
        tensors = [x for x in node.args if is_tensor(x) and value(x).shape == value(node).shape]
        moved = [node.args[0]] if op_name(node) in MOVES else tensors[-1:] if op_name(node) == "where" else tensors[:1]
        above = moved[0] if moved else None
        if not isinstance(above, Node):
            return False
        node = above
    return op_name(node) in SOFTMAX


def distributed(product: Node, weights: Node, terms: list[Term]) -> Written:
    """The product of each term on its own, added up, in the place of the product of their sum."""
    used = [n for t in terms for n in (t.weights, *t.factors) if isinstance(n, Node)]
    nodes = list(dict.fromkeys([*used, *(n for n in product.all_input_nodes if n is not weights)]))

    def summed(*tensors: Tensor) -> Tensor:
        known = dict(zip(nodes, tensors, strict=True))
        return reduce(torch.add, (multiplied(product, t, {**known, weights: known[t.weights]}) for t in terms))

    before = product.prev
    output = inline(product, summed, nodes)
    return write(product, output, [n for n in between(before, product) if contraction(n)])


def between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes after one and before another."""
    while (first := first.next) is not last:
        yield first


def multiplied(product: Node, t: Term, known: dict[Node, Tensor]) -> Tensor:
    """sign * factors * (weights V)"""
    args, kwargs = torch.fx.map_arg((product.args, product.kwargs), known.__getitem__)
    part = product.target(*args, **kwargs)  # type: ignore[operator]
    for c in t.factors:
        part = part * (known[c].reshape(()) if isinstance(c, Node) else c)
    return part if t.sign > 0 else -part
