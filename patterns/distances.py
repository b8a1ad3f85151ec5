"""Scores that are no product as written: a similarity of directions, a squared distance.

    cosine_similarity(x, y)                  sum_d (x / |x|) (y / |y|)
    sum_d (x - y)^2,  cdist(x, y)^2          |x - c|^2 + |y - c|^2 - 2 sum_d (x - c) (y - c)

The second holds for any c; the mean of the y keeps what is subtracted as small as the distances are. It may come out
a little below 0, so it is written only where nothing but a sum, a scale or a mask lies between it and the exponential.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, number, op_name, reach, shape, value
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.algebra import ONE, const
from fusecomp.patterns.folding import ANCHORS
from fusecomp.patterns.lift import VIEWS, argument, axis
from fusecomp.patterns.rows import plain

LINEAR = {
    "mul", "div", "neg", "add", "sub", "rsub", "to", "_to_copy", "type_as", "float", "masked_fill", "where",
    "clamp_min", "expand", *VIEWS,
}  # fmt: skip
"""What may stand between a squared distance and the exponential."""
ENDS = {*ANCHORS, "log_softmax", "logsumexp", "amax", "max", "detach"}
"""Where it ends."""


@dataclass(frozen=True)
class Squared:
    """sum_d (x - y)^2"""

    x: Node
    y: Node
    dim: int
    made: tuple[Node, ...]
    """What it is made by."""
    pairs: bool = False
    """Whether it is one number for each row of x and each of y, as cdist's."""


def measure(module: GraphModule) -> Iterator[Written]:
    """Write out every such score."""
    nodes = list(module.graph.nodes)
    for node in nodes if any(op_name(n) in ANCHORS for n in nodes) else ():
        if op_name(node) == "cosine_similarity":
            how = {"dim": argument(node, 2, "dim", 1), "eps": argument(node, 3, "eps", 1e-8)}
            yield write(node, inline(node, partial(cosine, to=value(node).dtype, **how), node.args[:2]))
        elif (found := squared(node)) is not None and exact(node) and linear(node):
            x, y = found.x, found.y
            if movable(module, found.made, [x, y], node):
                measured = partial(distance, found=found, rows=alone(y, x), to=value(node).dtype)
                yield write(node, inline(node, measured, [x, y]))


# ----------------------------------------------------------------------------------------------------------------
# What they are


def cosine(x: Tensor, y: Tensor, dim: int, eps: float, to: torch.dtype) -> Tensor:
    """sum_d (x / |x|) (y / |y|), both norms at least eps; gradients do not stop there."""
    sides = []
    for side in (x.to(to), y.to(to)):
        norm = torch.linalg.vector_norm(side, dim=dim, keepdim=True)
        sides.append(side / (norm + (norm.clamp_min(eps) - norm).detach()))
    return (sides[0] * sides[1]).sum(dim)


def distance(x: Tensor, y: Tensor, found: Squared, rows: list[int], to: torch.dtype) -> Tensor:
    """|x - c|^2 + |y - c|^2 - 2 sum_d (x - c) (y - c), c the mean of y"""
    if found.pairs:
        x, y, rows = x.unsqueeze(-2), y.unsqueeze(-3), [-2]
    center = y.mean(rows, keepdim=True).detach()
    x, y = x - center, y - center
    lengths = [side.float().square().sum(found.dim) for side in (x, y)]
    return (lengths[0] + lengths[1] - 2 * (x * y).sum(found.dim)).to(to)


# ----------------------------------------------------------------------------------------------------------------
# How they are found


def squared(node: Node) -> Squared | None:
    """The squared distance that a node is."""
    if op_name(node) == "sum" and (body := root(node.args[0])) is not None and not argument(node, 2, "keepdim", False):
        dims = argument(node, 1, "dim")
        whole = isinstance(dims, list | tuple) and len(dims) == 1
        return difference(body, int(dims[0]), (node.args[0], body)) if whole else None  # type: ignore[arg-type]
    norm = root(node)
    if norm is None:
        return None
    if op_name(norm) == "cdist" and argument(norm, 2, "p", 2.0) == 2:
        return Squared(norm.args[0], norm.args[1], -1, (norm,), pairs=True)  # type: ignore[arg-type]
    dims = argument(norm, 2, "dim")
    euclidean = op_name(norm) in ("linalg_vector_norm", "norm") and argument(norm, 1, "ord", 2) == 2
    whole = isinstance(dims, list | tuple) and len(dims) == 1 and not argument(norm, 3, "keepdim", False)
    if not euclidean or not whole or not isinstance(norm.args[0], Node):
        return None
    return difference(norm.args[0], int(dims[0]), (norm, norm.args[0]))


def root(node: object) -> Node | None:
    """x of x^2"""
    if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node):
        return None
    two = op_name(node) == "pow" and number(node.args[1]) in (const(2), const(2.0))
    twice = op_name(node) == "mul" and node.args[0] is node.args[1]
    return node.args[0] if two or twice or op_name(node) == "square" else None


def difference(node: Node, dim: int, made: tuple[Node, ...]) -> Squared | None:
    """The rows and columns of x - y, each of which has axes of its own."""
    if op_name(node) != "sub" or not plain(node) or node.args[0] is node.args[1]:
        return None
    x, y = node.all_input_nodes
    dim = axis(dim, len(shape(node))) - len(shape(node))
    apart = alone(x, y) and alone(y, x)
    both = min(len(shape(x)), len(shape(y))) >= -dim and shape(x)[dim] == shape(y)[dim]
    return Squared(x, y, dim, made) if apart and both and {dtype(x), dtype(y)} == {dtype(node)} else None


def alone(x: Node, other: Node) -> list[int]:
    """The axes, counted from behind, along which x alone is long."""
    lengths, others = shape(x)[::-1], shape(other)[::-1]
    long = [n for n, size in enumerate(lengths) if size != ONE and (n >= len(others) or others[n] == ONE)]
    return [-n - 1 for n in long]


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
