"""Scores that are made piece by piece and then put together, as one product of what the pieces are made of.

    [Q K_1^T, .., Q K_n^T] = Q [K_1; ..; K_n]^T,    [f(a_1), .., f(a_n)] = f([a_1, .., a_n])

for stack and cat, along an axis of the keys, the queries or the heads. So are pages of keys, blocks and heads, where a
loop goes over them. Only above a softmax or an exponential, and where the pieces are one function.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, is_tensor, op_name, reach, shape, value
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.expr import Const
from fusecomp.patterns.contraction import Contraction, contraction
from fusecomp.patterns.folding import ANCHORS
from fusecomp.patterns.lift import VIEWS, argument, axis
from fusecomp.patterns.sums import between

POINTWISE = {
    "mul", "div", "add", "sub", "neg", "to", "_to_copy", "type_as", "float", "tanh", "masked_fill", "where", "clamp",
}  # fmt: skip
"""What may stand between a product and the place where the scores are put together."""


@dataclass(frozen=True)
class Joint:
    """How tensors are put together: along a new axis, or along one that they have."""

    new: bool
    dim: int
    lengths: tuple[int, ...] = ()
    """Of the axis in each, where they have it: numbers."""

    def of(self, tensors: Sequence[Tensor], rank: int) -> Tensor:
        """Tensors that broadcast to the pieces, with all of a piece's axes, put together."""
        aligned = [x[(None,) * (rank - x.dim())] for x in tensors]
        if self.new:
            return torch.stack(aligned, self.dim)
        sizes = [[length if n == self.dim else -1 for n in range(rank)] for length in self.lengths]
        return torch.cat([x.expand(size) for x, size in zip(aligned, sizes, strict=True)], self.dim)


@dataclass
class Pieces:
    """Reads pieces of scores; `read` and `made` are what they read from outside, and what they are made by."""

    joint: Joint
    rank: int
    read: list[Node] = field(default_factory=list)
    made: list[Node] = field(default_factory=list)
    watched: list[Node] = field(default_factory=list)
    """What is computed once in place of several times."""
    products: int = 0

    def put(self, parts: Sequence[Any]) -> Any:
        """A tree of calls that makes the pieces at once: (call, its arguments)."""
        first = parts[0]
        if not is_tensor(first):
            return self.number(first)
        if self.alike(parts) and (tree := self.product(parts) or self.pointwise(parts)):
            self.made += parts
            return tree
        self.read += parts
        return ("join", tuple(parts))

    def number(self, x: Any) -> Any:
        """A number, which may be one that the graph computes."""
        if not isinstance(x, Node):
            return x
        self.read.append(x)
        return ("keep", x, "")

    def alike(self, parts: Sequence[Node]) -> bool:
        """Whether the pieces are made by one call each, which nothing else reads, and of the shape of the scores."""
        once = all(isinstance(x, Node) and x.op == "call_function" and len(x.users) == 1 for x in parts)
        return once and len({(x.target, dtype(x)) for x in parts}) == 1 and len(shape(parts[0])) == self.rank

    def pointwise(self, parts: Sequence[Node]) -> Any:
        rest = [[x for x in (*n.args, *n.kwargs.values()) if not is_tensor(x)] for n in parts]
        if op_name(parts[0]) not in POINTWISE or any(x != rest[0] for x in rest) or parts[0].kwargs:
            return None
        return ("call", parts[0].target, tuple(self.put(row) for row in zip(*(n.args for n in parts), strict=True)))

    def product(self, parts: Sequence[Node]) -> Any:
        """Products of one equation: sides that have the axis are put together, the others must be the same."""
        specs = [s for s in map(contraction, parts) if s is not None and alone(s)]
        if len(specs) < len(parts) or len({(s.left_axes, s.right_axes, s.out_axes) for s in specs}) > 1:
            return None
        left, right, out = specs[0].left_axes, specs[0].right_axes, specs[0].out_axes
        if self.joint.new:
            fresh = next(a for a in string.ascii_uppercase[::-1] if a not in left + right)
            out = out[: self.joint.dim] + fresh + out[self.joint.dim :]
        one = self.side([s.left for s in specs], left, out[self.joint.dim])
        other = self.side([s.right for s in specs], right, out[self.joint.dim])
        if one is None or other is None or one[0] == other[0] == "keep":
            return None
        self.products += 1
        return ("einsum", f"{one[-1]},{other[-1]}->{out}", (one, other))

    def side(self, tensors: Sequence[Node], axes: str, letter: str) -> tuple[Any, ...] | None:
        """(how one side is made, of what, its letters)"""
        within = letter in axes
        if not within and all(self.same(x, tensors[0]) for x in tensors):
            self.read.append(tensors[0])
            return ("keep", tensors[0], axes)
        lengths = [[n for a, n in zip(axes, shape(x), strict=True) if a != letter] for x in tensors]
        if within != (not self.joint.new) or any(n != lengths[0] for n in lengths) or len(set(map(dtype, tensors))) > 1:
            return None
        self.read += tensors
        return ("cat", tuple(tensors), axes.index(letter), axes) if within else ("stack", tuple(tensors), letter + axes)

    def same(self, x: Any, y: Any) -> bool:
        """Whether two nodes compute the same from the same: a loop makes its queries anew each time."""
        if not (isinstance(x, Node) and isinstance(y, Node)) or x is y:
            return type(x) is type(y) and x == y
        self.watched += [x, y]
        if x.target != y.target or op_name(x) not in (*POINTWISE, *VIEWS) or x.kwargs != y.kwargs:
            return False
        return len(x.args) == len(y.args) and all(map(self.same, x.args, y.args))


def alone(spec: Contraction) -> bool:
    """Whether a product is nothing but one."""
    axes = spec.left_axes + spec.right_axes + spec.out_axes
    return spec.added is None and spec.scale == Const(1.0) and "." not in axes


def bring_together(module: GraphModule) -> Iterator[Written]:
    """Write out all scores that are put together from pieces."""
    anchors = [n for n in module.graph.nodes if op_name(n) in ANCHORS]
    above = reach(anchors, lambda n: [] if contraction(n) else n.all_input_nodes)
    for node in [n for n in module.graph.nodes if n in above and op_name(n) in ("stack", "cat")]:
        parts = list(node.args[0])
        dim = axis(argument(node, 1, "dim", 0), len(shape(node)))
        new = op_name(node) == "stack"
        lengths = () if new else tuple(value(x).shape[dim] for x in parts if len(shape(x)) == len(shape(node)))
        if len(parts) < 2 or (not new and len(lengths) < len(parts)) or not all(isinstance(n, int) for n in lengths):
            continue
        pieces = Pieces(Joint(new, dim, lengths), len(shape(parts[0])))
        tree = pieces.put(parts)
        if pieces.products and movable(module, [*pieces.made, node], [*pieces.read, *pieces.watched], node):
            before, inputs = node.prev, sorted(dict.fromkeys(pieces.read), key=lambda n: not is_tensor(n))
            output = inline(node, at_once(tree, inputs, pieces), inputs)
            yield write(node, output, [n for n in between(before, node) if contraction(n)])


def at_once(tree: Any, inputs: Sequence[Node], pieces: Pieces) -> Callable[..., Tensor]:
    return lambda *tensors: made(tree, dict(zip(inputs, tensors, strict=True)), pieces)  # type: ignore[no-any-return]


def made(tree: Any, known: Mapping[Node, Tensor], pieces: Pieces) -> Any:
    """The value of a tree of calls."""
    match tree:
        case ("join", parts):
            return pieces.joint.of([known[x] for x in parts], pieces.rank)
        case ("keep", x, _):
            return known[x]
        case ("stack", parts, _):
            return torch.stack([known[x] for x in parts])
        case ("cat", parts, at, _):
            return torch.cat([known[x] for x in parts], at)
        case ("einsum", equation, sides):
            return torch.einsum(equation, *(made(x, known, pieces) for x in sides))
        case ("call", target, args):
            return target(*(made(x, known, pieces) for x in args))
    return tree
