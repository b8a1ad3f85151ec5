"""The pieces of one softmax, each multiplied by values of its own, as one product:

    p[.., :n] V + p[.., n:] W = p [V; W],    f(x) + f(y) = f(x + y)  where f only rearranges

Prefixes, memories and sinks with values are written so. Only where the pieces are all of p, each once.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, is_tensor, number, op_name, shape, size_expr, value
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.algebra import ZERO, apply, const
from fusecomp.ir.expr import Const, Expr
from fusecomp.patterns.contraction import Contraction, contraction, without_ones
from fusecomp.patterns.lift import VIEWS, argument, axis
from fusecomp.patterns.sums import between, leads_to_softmax
from fusecomp.patterns.views import clamped_start

ADDS = ("add", "add_")


@dataclass(frozen=True)
class Piece:
    """whole[.., start : start + length] along the axis `key`, times values. Letters name axes, the whole's by place."""

    whole: Node
    start: Expr
    length: Expr
    key: str
    values: Node
    right_axes: str
    out_axes: str

    @property
    def width(self) -> Expr | None:
        """The length of the values' own axis, None where the piece is the same along it."""
        return shape(self.values)[self.right_axes.index("z")] if "z" in self.right_axes else None


def join(module: GraphModule) -> Iterator[Written]:
    """Write out each such sum as one product."""
    for node in reversed(list(module.graph.nodes)):
        if op_name(node) in ADDS and node.users:
            terms, moves = rearranged(summands(node, node))
            found = [p for p in map(piece, terms) if p is not None]
            if 1 < len(found) == len(terms) and fits(found) and movable(module, terms, read_by(terms), node):
                read = [x for m in moves for x in m.all_input_nodes[1:]]
                inputs = list(dict.fromkeys([found[0].whole, *(p.values for p in found), *read]))
                before, output = node.prev, inline(node, joined(found, inputs, moves), inputs)
                yield write(node, output, [n for n in between(before, node) if contraction(n)])


def summands(node: Node, root: Node) -> list[Node]:
    """The terms of a sum that nothing else reads. Python's sum() begins with 0."""
    if op_name(node) in ADDS and node.args[1:] == (0,) and not node.kwargs and len(node.users) == 1:
        return summands(node.args[0], root)  # type: ignore[arg-type]
    plain = len(node.args) == 2 and not node.kwargs and all(map(is_tensor, node.args))
    if op_name(node) in ADDS and plain and (node is root or len(node.users) == 1):
        return [x for a in node.args for x in summands(a, root)]  # type: ignore[arg-type]
    return [node]


def rearranged(terms: list[Node]) -> tuple[list[Node], list[Node]]:
    """What the terms rearrange, all of them alike, and the calls that do, the last first."""
    moves: list[Node] = []
    while all(map(moved, terms)) and len({(t.target, str(t.args[1:]), shape(t.args[0])) for t in terms}) == 1:  # type: ignore[arg-type]
        moves.append(terms[0])
        terms = [t.args[0] for t in terms]  # type: ignore[misc]
    return terms, moves


def moved(node: Node) -> bool:
    """Whether `node` is all of one tensor, each element once, in another arrangement, which nothing else reads: a sum
    of parts is laid out anew."""
    only = not node.kwargs and len(node.users) == 1 and not any(map(is_tensor, node.args[1:]))
    source = node.args[0] if only and op_name(node) in VIEWS else None
    return is_tensor(source) and dtype(node) == dtype(source) and count(node) == count(source)  # type: ignore[arg-type]


def count(node: Node) -> Expr:
    """How many elements it has."""
    one: Expr = const(1)
    return reduce(partial(apply, "mul"), shape(node), one)


def read_by(terms: list[Node]) -> list[Node]:
    return [x for t in terms for x in t.all_input_nodes]


def piece(product: Node) -> Piece | None:
    """`product` as a piece of weights times values."""
    spec = contraction(product) or outer(product)
    if spec is None or spec.added is not None or spec.scale != Const(1.0) or len(product.users) != 1:
        return None
    return cut(spec) or cut(spec.swapped())


def outer(product: Node) -> Contraction | None:
    """[.., M, 1] * [.., 1, D], a product over an axis of length 1."""
    if op_name(product) != "mul" or len(product.args) != 2 or not all(map(is_tensor, product.args)):
        return None
    x, y = product.args
    rank = len(shape(product))
    for left, right in ((x, y), (y, x)):
        thin = (*shape(product)[:-1], const(1)) == shape(left)  # type: ignore[arg-type]
        if rank > 1 and thin and (len(shape(right)) == 1 or shape(right)[-2] == const(1)):  # type: ignore[arg-type]
            batch = string.ascii_lowercase[: rank - 2]
            axes = (batch + "KN")[rank - len(shape(right)) :]  # type: ignore[arg-type]
            known = "".join("." if a in batch and s == const(1) else a for a, s in zip(axes, shape(right), strict=True))  # type: ignore[arg-type]
            return Contraction(left, right, batch + "MK", known, batch + "MN")  # type: ignore[arg-type]
    return None


def cut(spec: Contraction) -> Piece | None:
    """The left side's part in what it is cut from."""
    node = spec.left
    key = spec.left_axes.find(spec.contracted or "K")
    if key < 0 or "." in spec.left_axes or len(spec.contracted) > 1:
        return None
    place = {a: string.ascii_lowercase[n] for n, a in enumerate(spec.left_axes)}
    names = place | {a: "." if a == "." else "z" for a in spec.right_axes + spec.out_axes if a not in place}
    found = within(node, key)
    if found is None or len(set(spec.out_axes) - set(place)) != 1:
        return None
    right, out = ("".join(names[a] for a in axes) for axes in (spec.right_axes, spec.out_axes))
    return Piece(found[0], found[1], shape(node)[key], string.ascii_lowercase[key], spec.right, right, out)


def within(node: Node, key: int) -> tuple[Node, Expr] | None:
    """(whole, start) of a slice of an axis."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    name, rank, start = op_name(node), len(shape(node)), None
    if name in ("slice", "narrow") and axis(argument(node, 1, "dim", 0), rank) == key:
        given = number(argument(node, 2, "start") or 0)
        if given is not None and (name == "narrow" or argument(node, 4, "step", 1) == 1):
            start = clamped_start(given, shape(source)[key])
    elif name == "getitem" and isinstance(node.args[1], int) and op_name(source) in SPLITS:
        if axis(argument(source, 2, "dim", 0), rank) == key:
            start = ZERO
            for part in value(source)[: node.args[1] % len(value(source))]:
                start = apply("add", start, size_expr(part.shape[key]))
        source = source.args[0]  # type: ignore[assignment]
    return None if start is None else (source, start)


SPLITS = ("split", "chunk", "split_with_sizes", "tensor_split")


def fits(pieces: list[Piece]) -> bool:
    """Whether the pieces are one softmax, each part once."""
    if len({(p.whole, p.key, p.out_axes) for p in pieces}) > 1:
        return False
    if {dtype(p.values) for p in pieces} != {dtype(pieces[0].whole)} or not leads_to_softmax(pieces[0].whole):
        return False
    if len({p.width for p in pieces}) > 1:  # one is added to every column of another
        return False
    ordered = in_order(pieces)
    first = pieces[0]
    whole = shape(first.whole)[string.ascii_lowercase.index(first.key)]
    return len(ordered) == len(pieces) and apply("add", ordered[-1].start, ordered[-1].length) == whole


def in_order(pieces: list[Piece]) -> list[Piece]:
    """The pieces from the first on, as far as each begins where the one before ends."""
    ordered: list[Piece] = []
    end: Expr = ZERO
    while (following := next((p for p in pieces if p not in ordered and p.start == end), None)) is not None:
        ordered.append(following)
        end = apply("add", end, following.length)
    return ordered


def joined(pieces: list[Piece], inputs: list[Node], moves: list[Node]) -> Callable[..., Tensor]:
    """whole, values... -> whole [values; ...], rearranged by the calls in `moves`, the last first"""
    first, order = pieces[0], in_order(pieces)
    rank = len(shape(first.whole))
    letters = string.ascii_lowercase[:rank]
    read = {a for p in pieces for a in p.right_axes} - {".", "z", first.key}
    axes = "".join(a for a in letters if a in read) + first.key + "z"

    def product(*tensors: Tensor) -> Tensor:
        known = dict(zip(inputs, tensors, strict=True))
        sizes = {a: n for p in order for a, n in zip(p.right_axes, known[p.values].shape, strict=True)}
        values = [laid_out(known[p.values], p.right_axes, axes, sizes) for p in order]
        x = torch.einsum(f"{letters},{axes}->{first.out_axes}", known[first.whole], torch.cat(values, -2))
        for move in reversed(moves):
            call = torch.reshape if op_name(move) in ("view", "_unsafe_view") else move.target
            x = call(x, *map_arg(move.args[1:], known.__getitem__))  # type: ignore[operator]
        return x

    return product


def laid_out(x: Tensor, own: str, axes: str, sizes: Mapping[str, int]) -> Tensor:
    """The values with the axes `axes`, repeated along those that they have not."""
    x, own, key = without_ones(x, own), own.replace(".", ""), axes[-2]
    if key not in own:
        x, own = x.unsqueeze(0), key + own
    x = x.permute([own.index(a) for a in axes if a in own])
    for n, a in enumerate(axes):
        x = x if a in own else x.unsqueeze(n)
    if set(axes) == set(own):
        return x
    return x.expand([x.shape[n] if a in (key, "z") else sizes[a] for n, a in enumerate(axes)])
