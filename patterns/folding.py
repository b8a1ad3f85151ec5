"""Products that sum over several axes, as products over one: pages that stay apart from their slots.

    sum_p sum_s w[.., p, s] v[p, s, ..] = sum_n w[.., n] v[n, ..]     n = p S + s,  for S slots in a page

Only around a softmax or an exponential: in its scores, and where it is multiplied by values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import op_name
from fusecomp.graph.rewriting import Written, write
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
    alone = spec.added is None and spec.scale == Const(1.0)
    return alone and len(spec.contracted) > 1 and "." not in spec.left_axes + spec.right_axes


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
