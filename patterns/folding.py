"""Products that sum over several axes, as products over one: pages that stay apart from their slots.

    sum_p sum_s w[.., p, s] v[p, s, ..] = sum_n w[.., n] v[n, ..]     n = p S + s,  for S slots in a page
    sum_n w[.., n] 1                    = w.sum(n)

Only around a softmax or an exponential: in its scores, and where it is multiplied by values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import op_name, value
from fusecomp.graph.rewriting import Written, facts_of, write
from fusecomp.ir.algebra import ONE
from fusecomp.ir.expr import Const
from fusecomp.patterns.contraction import Contraction, contraction

ANCHORS = ("softmax", "_softmax", "exp", "exp2")


def fold(module: GraphModule) -> Iterator[Written]:
    """Write out every such product."""
    anchors = [n for n in module.graph.nodes if op_name(n) in ANCHORS]
    above = first_products(anchors, lambda n: n.all_input_nodes)
    below = first_products(anchors, lambda n: n.users)
    for node in dict.fromkeys([*above, *below]):
        spec = contraction(node)
        if spec is not None and foldable(spec):
            yield write(node, inline(node, folded(spec), [spec.left, spec.right]))


def count(module: GraphModule) -> Iterator[Written]:
    """Write out every product of exponentials and ones as the sum that it is."""
    anchors = [n for n in module.graph.nodes if op_name(n) in ANCHORS]
    for node in list(first_products(anchors, lambda n: n.users)):
        spec = contraction(node)
        for side in (spec, spec.swapped()) if spec is not None and whole(spec) else ():
            more = set(side.out_axes) - set(side.left_axes)
            plain = "." not in side.left_axes and all(side.size(a) == ONE for a in more)
            if plain and (made := ones(side.right)) and unwritten(module, made, node):
                yield write(node, inline(node, counted(side, value(node).dtype), [side.left]))
                break


def ones(node: Node) -> list[Node]:
    """A tensor that is made of nothing but ones, and what it is made by; empty of any other."""
    made = [node]
    while op_name(made[-1]) in STRETCHED and isinstance(made[-1].args[0], Node):
        made.append(made[-1].args[0])
    return made if op_name(made[-1]) in ("ones", "ones_like", "new_ones") else []


def unwritten(module: GraphModule, made: list[Node], to: Node) -> bool:
    """Whether nothing writes into tensors before `to`."""
    facts = facts_of(module)
    return not any(facts.written_between(n, facts.position[n], facts.position[to]) for n in made)


STRETCHED = ("expand", "unsqueeze", "view", "reshape", "to", "_to_copy", "type_as", "t", "transpose")


def counted(spec: Contraction, to: torch.dtype) -> Callable[[Tensor], Tensor]:
    """left -> its sum, with an axis of length 1 for each that the ones alone had."""
    kept = [a for a in spec.left_axes if a not in spec.contracted]

    def total(left: Tensor) -> Tensor:
        x = left.sum([spec.left_axes.index(a) for a in spec.contracted]).to(to)
        x = x.permute([kept.index(a) for a in spec.out_axes if a in kept])
        for n, a in enumerate(spec.out_axes):
            x = x if a in kept else x.unsqueeze(n)
        return x

    return total


def first_products(nodes: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """The products that are reached without passing another one."""
    seen, stack = set(nodes), list(nodes)
    while stack:
        for n in step(stack.pop()):
            if n not in seen:
                seen.add(n)
                if contraction(n) is not None:
                    yield n
                elif n.op == "call_function":
                    stack.append(n)


def foldable(spec: Contraction) -> bool:
    return whole(spec) and len(spec.contracted) > 1 and "." not in spec.left_axes + spec.right_axes


def whole(spec: Contraction) -> bool:
    """Whether a product is nothing but one."""
    return spec.added is None and spec.scale == Const(1.0)


def folded(spec: Contraction) -> Callable[[Tensor, Tensor], Tensor]:
    """left, right -> their product, over one axis in place of all that are summed."""
    summed = spec.contracted
    own = ["".join(a for a in axes if a not in summed) for axes in (spec.left_axes, spec.right_axes)]

    def together(x: Tensor, axes: str, rest: str) -> Tensor:
        return x.permute([axes.index(a) for a in rest + summed]).flatten(len(rest))

    def product(left: Tensor, right: Tensor) -> Tensor:
        sides = together(left, spec.left_axes, own[0]), together(right, spec.right_axes, own[1])
        return torch.einsum(f"{own[0]}{summed[0]},{own[1]}{summed[0]}->{spec.out_axes}", *sides)

    return product
