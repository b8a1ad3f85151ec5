"""Scores that are no product as written: a similarity of directions, a squared distance.

    cosine_similarity(x, y)     sum_d (x / |x|) (y / |y|)
    cdist(x, y)^2               |x|^2 + |y|^2 - 2 sum_d x y

The second only where PyTorch itself takes cdist by that product: what sums (x - y)^2 loses nothing where |x - y| is
small beside |x| and |y|. It may come out a little below 0, so it is written only where nothing but a sum, a scale or a
mask lies between it and the exponential.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, number, op_name, reach, shape, value
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.algebra import apply, const
from fusecomp.ir.poly import is_natural
from fusecomp.patterns.folding import ANCHORS
from fusecomp.patterns.lift import VIEWS, argument, axis

LINEAR = {
    "mul", "div", "neg", "add", "sub", "rsub", "to", "_to_copy", "type_as", "float", "masked_fill", "where",
    "clamp_min", "expand", *VIEWS,
}  # fmt: skip
"""What may stand between a squared distance and the exponential."""
ENDS = {*ANCHORS, "log_softmax", "logsumexp", "amax", "max", "detach"}
"""Where it ends."""
IF_LONG, ALWAYS, LONG = 0, 1, 25
"""Modes of cdist: by a product where a side has more rows than so many, or always."""


def measure(module: GraphModule) -> Iterator[Written]:
    """Write out every such score."""
    nodes = list(module.graph.nodes)
    for node in nodes if any(op_name(n) in ANCHORS for n in nodes) else ():
        if op_name(node) == "cosine_similarity" and (dim := direction(node)) is not None:
            how = {"dim": dim, "eps": argument(node, 3, "eps", 1e-8), "to": value(node).dtype}
            yield write(node, inline(node, partial(cosine, **how), node.args[:2]))
        elif (far := root(node)) is not None and by_product(far) and exact(node) and linear(node):
            sides = far.all_input_nodes if len(far.all_input_nodes) == 2 else [far.args[0]] * 2
            if movable(module, [far], sides, node):
                yield write(node, inline(node, partial(distance, to=value(node).dtype), far.args[:2]))


# ----------------------------------------------------------------------------------------------------------------
# What they are


def cosine(x: Tensor, y: Tensor, dim: int, eps: float, to: torch.dtype) -> Tensor:
    """sum_d (x / |x|) (y / |y|), both norms at least eps; gradients do not stop there."""
    sides = []
    for side in (x.to(to), y.to(to)):
        norm = torch.linalg.vector_norm(side, dim=dim, keepdim=True)
        sides.append(side / torch.where(norm < eps, norm + (eps - norm).detach(), norm))
    return (sides[0] * sides[1]).sum(dim)


def distance(x: Tensor, y: Tensor, to: torch.dtype) -> Tensor:
    """|x|^2 + |y|^2 - 2 sum_d x y, of each row of x and each of y"""
    x, y = x.to(to).unsqueeze(-2), y.to(to).unsqueeze(-3)
    return x.square().sum(-1) + y.square().sum(-1) - 2 * (x * y).sum(-1)


# ----------------------------------------------------------------------------------------------------------------
# How they are found


def direction(node: Node) -> int | None:
    """The axis of a similarity, counted from behind, if both sides have all of it: a shorter one would be repeated."""
    x, y = node.args[:2]
    rank = max(len(shape(x)), len(shape(y)))  # type: ignore[arg-type]
    dim = axis(argument(node, 2, "dim", 1), rank) - rank
    lengths = [shape(n)[dim] for n in (x, y) if len(shape(n)) >= -dim]  # type: ignore[arg-type]
    return dim if len(lengths) == 2 and lengths[0] == lengths[1] else None


def root(node: Node) -> Node | None:
    """x of x^2"""
    if not node.args or not isinstance(node.args[0], Node):
        return None
    two = op_name(node) == "pow" and number(node.args[1]) in (const(2), const(2.0))
    twice = op_name(node) == "mul" and node.args[0] is node.args[1]
    return node.args[0] if two or twice or op_name(node) == "square" else None


def by_product(node: Node) -> bool:
    """Whether a node is a cdist that PyTorch takes by a product."""
    if op_name(node) != "cdist" or argument(node, 2, "p", 2.0) != 2:
        return False
    rows = [shape(n)[-2] for n in node.args[:2]]  # type: ignore[arg-type]
    mode = argument(node, 3, "compute_mode") or IF_LONG
    return mode == ALWAYS or (mode == IF_LONG and any(is_natural(apply("sub", n, const(LONG + 1))) for n in rows))


def exact(node: Node) -> bool:
    """Whether products are as exact as differences are: in float32, not if they may be rounded to fewer bits."""
    return dtype(node) != "float32" or torch.get_float32_matmul_precision() == "highest"


def linear(node: Node) -> bool:
    """Whether nothing but a sum, a scale or a mask lies between a node and the exponentials."""
    below = reach([node], lambda n: () if op_name(n) in ENDS else n.users) - {node}
    held = {node, *(n for n in below if op_name(n) not in ENDS)}
    factors = [n for n in below if op_name(n) in ("mul", "div")]
    once = all(sum(x in held for x in n.args) == 1 for n in factors)
    above = all(n.args[0] in held for n in factors if op_name(n) == "div")
    return once and above and all(op_name(n) in LINEAR | ENDS for n in below)
