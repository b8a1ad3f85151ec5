"""Weights that are normalised a second time, after a factor: their sum is one more column of values.

    w / g(sum_j w_j) V = N / g(D),    [N, D] = w [V, 1],    w = f softmax(S)
    f exp(S) / sum_j f_j exp(S_j)  = w / sum_j w_j

Exact for any g: soft spans and masks are written so, with an epsilon in g. Where w is 0 or a weight and g adds nothing,
the softmax's own normaliser does it (`patterns/weights.py`). Exponentials are no softmax: beside an epsilon their size
counts, and so it does beside a far larger one whose f is 0, unless that is masked: where f learns, none may exceed 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, is_tensor, op_name, reach, shape
from fusecomp.graph.learning import learns
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.algebra import const
from fusecomp.ir.expr import Const
from fusecomp.patterns.contraction import Contraction, contraction, without_ones
from fusecomp.patterns.lift import argument, axis
from fusecomp.patterns.rows import maxima, plain
from fusecomp.patterns.sums import between, leads_to_softmax

CASTS = ("to", "_to_copy", "type_as", "float")
STRETCHES = ("expand", "expand_as")
MOVES = ("unsqueeze", *STRETCHES, *CASTS)
POINTWISE = ("add", "clamp", "clamp_min", "clip", "max", "maximum", *MOVES)
"""What may stand between the sum and the division."""
POSITIVE = ("softmax", "_softmax", "exp", "sigmoid")


@dataclass(frozen=True)
class Renormalised:
    """One such product."""

    product: Node
    spec: Contraction
    """The normalised weights on the left."""
    weights: Node
    total: Node
    between: tuple[Node, ...]
    """From the sum to what divides, in order."""
    exponential: Node | None = None
    """exp(S), where that stands in place of softmax(S)."""

    @property
    def divisor(self) -> Node:
        return self.between[-1] if self.between else self.total

    @property
    def parts(self) -> list[Node]:
        """What the weights are made of here: themselves, or exponents and factor."""
        e = self.exponential
        return [self.weights] if e is None else [e.args[0], factor(self.weights, e)]  # type: ignore[list-item]

    @property
    def column(self) -> str:
        """The letter of the values' own axis."""
        return next(a for a in self.spec.out_axes if a not in self.spec.left_axes)


def renormalise(module: GraphModule) -> Iterator[Written]:
    """Write out every such product."""
    for node in list(module.graph.nodes):
        spec = contraction(node)
        if spec is None or spec.added is not None or spec.scale != Const(1.0):
            continue
        for side in (spec, spec.swapped()):
            found = read(node, side)
            if found is not None and undisturbed(module, found):
                others = [x for n in found.between for x in n.all_input_nodes if x not in (found.total, *found.between)]
                inputs = list(dict.fromkeys([*found.parts, side.right, *others]))
                before = node.prev
                output = inline(node, divided(found, inputs), inputs)
                yield write(node, output, [n for n in between(before, node) if op_name(n) == "einsum"])
                break


def read(product: Node, spec: Contraction) -> Renormalised | None:
    """`product` as renormalised weights times values."""
    quotient, key = spec.left, spec.contracted
    two = op_name(quotient) == "div" and len(quotient.args) == 2 and not quotient.kwargs
    if not two or len(key) != 1 or list(quotient.users) != [product] or "." in spec.left_axes:
        return None
    weights, divisor = quotient.args
    if not (is_tensor(weights) and is_tensor(divisor)) or shape(weights) != shape(quotient):  # type: ignore[arg-type]
        return None
    total = next((n for n in weights.users if summed(n, weights, spec.left_axes.index(key))), None)  # type: ignore[union-attr, arg-type]
    readers = {n for n in weights.users if op_name(n) not in STRETCHES}  # type: ignore[union-attr]
    if total is None or readers != {total, quotient}:
        return None
    below = reach([total], lambda n: [u for u in n.users if u is not quotient])
    steps = [n for n in quotient.graph.nodes if n in below and n is not total]
    if (steps[-1] if steps else total) is not divisor or not all(map(pointwise, steps)):
        return None
    if steps and op_name(steps[-1]) in STRETCHES and shape(divisor) == shape(quotient):  # type: ignore[arg-type]
        steps.pop()
    found = Renormalised(product, spec, weights, total, tuple(steps), exponential(weights))  # type: ignore[arg-type]
    own = [a for a in spec.out_axes if a not in spec.left_axes]
    alike = {dtype(n) for n in (weights, quotient, spec.right, product)} == {dtype(total)}  # type: ignore[arg-type]
    fits = len(own) == 1 and set(spec.out_axes) - set(own) == set(spec.left_axes) - {key} and own[0] in spec.right_axes
    row = tuple(const(1) if a == key else n for a, n in zip(spec.left_axes, shape(quotient), strict=True))
    meant = leads_to_softmax(weights) if found.exponential is None else all(op_name(n) in MOVES for n in steps)  # type: ignore[arg-type]
    apart = bool(steps) or soft(weights)  # type: ignore[arg-type]
    return found if fits and alike and meant and apart and shape(found.divisor) == row else None


def exponential(weights: Node) -> Node | None:
    """exp(S) of f exp(S)"""
    two = op_name(weights) == "mul" and len(weights.all_input_nodes) == 2
    for e in weights.all_input_nodes if two else ():
        whole = op_name(e) == "exp" and list(e.users) == [weights] and shape(e) == shape(weights)
        if whole and (at_most_one(e) or not learns(factor(weights, e))):
            return e
    return None


def factor(weights: Node, e: Node) -> Node:
    """f of f e"""
    return next(n for n in weights.all_input_nodes if n is not e)


def at_most_one(e: Node) -> bool:
    """Whether an exponential is exp(s - m), m the largest s or more."""
    exponents: Node = e.args[0]  # type: ignore[assignment]
    if op_name(exponents) != "sub" or not plain(exponents):
        return False
    s, m = exponents.args
    return any(op_name(n) in ("amax", "max") and n.args[0] is s for n in reach([m], maxima))  # type: ignore[list-item]


def summed(node: Node, weights: Node, key: int) -> bool:
    """Whether `node` sums the weights over the keys; so does their norm of order 1, where none is negative."""
    norm = op_name(node) in ("linalg_vector_norm", "norm") and argument(node, 1, "ord", 2) == 1 and positive(weights)
    if op_name(node) != "sum" and not norm:
        return False
    dim = argument(node, 2 if norm else 1, "dim")
    dims = [axis(d, len(shape(weights))) for d in (dim if isinstance(dim, list | tuple) else [dim]) if d is not None]
    return dims == [key]


def positive(weights: Node) -> bool:
    """Whether the weights are provably not negative."""
    while op_name(weights) in CASTS:
        weights = weights.args[0]  # type: ignore[assignment]
    sides = [x for x in weights.args if is_tensor(x)]
    if op_name(weights) == "mul" and len(sides) == 2:
        return all(map(positive, sides))  # type: ignore[arg-type]
    return op_name(weights) in POSITIVE or truth(weights)


def pointwise(node: Node) -> bool:
    return op_name(node) in POINTWISE and is_tensor(node)


def soft(weights: Node) -> bool:
    """Whether the weights were multiplied by more than truth values."""
    node: Node = weights
    while op_name(node) in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    if op_name(node) != "mul":
        return False
    sides = [x for x in node.args if is_tensor(x)]
    return all(not truth(x) for x in sides)  # type: ignore[arg-type]


def truth(node: Node) -> bool:
    """Whether a tensor holds truth values, cast or not."""
    while op_name(node) in (*CASTS, "unsqueeze", "expand", "view", "slice") and dtype(node) != "bool":
        if not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return dtype(node) == "bool"


def undisturbed(module: GraphModule, found: Renormalised) -> bool:
    """Whether all may as well be computed where the product is."""
    nodes = [found.weights, found.total, *found.between, found.spec.left]
    nodes += [found.exponential] if found.exponential is not None else []
    return movable(module, nodes, [x for n in nodes for x in (n, *n.all_input_nodes)], found.product)


def divided(found: Renormalised, inputs: list[Node]) -> Callable[..., Tensor]:
    """weights, values, ... -> N / g(D)"""
    spec, column, key = found.spec, found.column, found.spec.contracted
    axes = spec.right_axes.replace(".", "")
    keepdim = len(shape(found.total)) == len(spec.left_axes)

    def product(*tensors: Tensor) -> Tensor:
        known = dict(zip(inputs, tensors, strict=True))
        if (e := found.exponential) is not None:
            exponents = known[e.args[0]].to(e.meta["val"].dtype)  # type: ignore[index]
            if not at_most_one(e):
                exponents = exponents.masked_fill(known[factor(found.weights, e)] == 0, -torch.inf)
            known[e] = torch.softmax(exponents, spec.left_axes.index(key))
            known[found.weights] = torch.mul(*(known[x] for x in found.weights.args))  # type: ignore[index]
        values, place = without_ones(known[spec.right], spec.right_axes), axes.index(column)
        values = torch.cat([values, torch.ones_like(values.narrow(place, 0, 1))], place)
        both = torch.einsum(f"{spec.left_axes},{axes}->{spec.out_axes}", known[found.weights], values)
        at = spec.out_axes.index(column)
        numerator, total = both.split([both.shape[at] - 1, 1], at)
        rows = spec.out_axes.replace(column, key)
        total = total.permute([rows.index(a) for a in spec.left_axes])
        known[found.total] = total if keepdim else total.squeeze(spec.left_axes.index(key))
        for n in found.between:
            args, kwargs = map_arg((n.args, n.kwargs), known.__getitem__)
            known[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        return numerator / known[found.divisor].permute([spec.left_axes.index(a) for a in rows])

    return product
