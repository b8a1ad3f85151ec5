"""Columns of values: more of them than V has, and one that is written without its axis.

    (E [V, 1])[.., :D] = E V        (E [V, 1])[.., D] = E 1 = sum E
    sum_j p_j x_j = (p [x])[.., 0]

The sum of a softmax comes out of one product with its numerator so: only where every reader takes V's columns, or those
of the ones. A number of each key, weighted by a softmax, is a value of one column.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import is_getitem, number, op_name, reach, shape, size_expr, value
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.algebra import ONE, ZERO, apply
from fusecomp.ir.expr import Const, Expr
from fusecomp.patterns.contraction import Contraction, contraction, without_ones
from fusecomp.patterns.folding import ones, unwritten, whole
from fusecomp.patterns.lift import argument, axis
from fusecomp.patterns.sums import between, leads_to_softmax

EXPONENTIALS = ("exp", "exp2", "exp_", "exp2_", "pow")
Columns = tuple[Expr, Expr]
"""[first, end) along the values' own axis."""


@dataclass(frozen=True)
class Reader:
    """What takes some columns of a product, with their axis or without."""

    node: Node
    columns: Columns
    gone: bool = False


def take_apart(module: GraphModule) -> Iterator[Written]:
    """Write out every such product."""
    anchors = [n for n in module.graph.nodes if op_name(n) in EXPONENTIALS]
    weights = reach(anchors, lambda n: [] if contraction(n) and n not in anchors else n.users)
    for node in list(module.graph.nodes) if anchors else ():
        spec = contraction(node)
        for side in (spec, spec.swapped()) if spec is not None and whole(spec) else ():
            own = [a for a in side.out_axes if a != "." and a not in side.left_axes]
            if len(own) == 1 and own[0] in side.right_axes and side.left in weights and "." not in side.left_axes:
                yield from apart(module, node, side, own[0])
                break


def widen(module: GraphModule) -> Iterator[Written]:
    """Write out every product of a softmax with one number for each key."""
    for node in list(module.graph.nodes):
        spec = contraction(node) if op_name(node) != "sum" else None
        for side in (spec, spec.swapped()) if spec is not None and whole(spec) else ():
            free = not {".", "z"} & set(side.left_axes)
            kept = free and set(side.out_axes) == set(side.left_axes) - set(side.contracted)
            if kept and set(side.right_axes) - {"."} <= set(side.left_axes) and leads_to_softmax(side.left):
                before = node.prev
                output = inline(node, one_column(side), [side.left, side.right])
                yield write(node, output, [n for n in between(before, node) if contraction(n)])
                break


def one_column(spec: Contraction) -> Callable[[Tensor, Tensor], Tensor]:
    """left, a number for each key -> their product"""
    equation = f"{spec.left_axes},{spec.right_axes.replace('.', '')}z->{spec.out_axes}z"

    def product(left: Tensor, values: Tensor) -> Tensor:
        return torch.einsum(equation, left, without_ones(values, spec.right_axes).unsqueeze(-1)).squeeze(-1)

    return product


def apart(module: GraphModule, node: Node, spec: Contraction, column: str) -> Iterator[Written]:
    """Each reader of a product as a product with the columns that it takes."""
    parts = dict(columns(module, spec.right, spec.right_axes.index(column)))
    found = readers(node, spec.out_axes.index(column)) if parts else []
    if not found or any(r.columns not in parts for r in found):
        return
    sources = [parts[r.columns] or spec.right.args[0] for r in found]
    pairs = list(zip(found, sources, strict=True))
    joined = all(movable(module, [spec.right], [x, spec.right], node) for x in sources)  # type: ignore[list-item]
    if not joined or not all(movable(module, [node], [spec.left, spec.right, x], r.node) for r, x in pairs):  # type: ignore[list-item]
        return
    outputs, first = list[Node](), node
    for r, x in pairs:  # the product is put back with the last, which stands before the others
        before = first.prev
        taken = product(spec, column, r.gone, filled=parts[r.columns] is None)
        outputs.append(inline(first, taken, [spec.left, x]))  # type: ignore[list-item]
        first = before.next
    for r, output in zip(found, outputs, strict=True):
        yield write(r.node, output, outputs)


def columns(module: GraphModule, values: Node, at: int) -> Iterator[tuple[Columns, Node | None]]:
    """The columns of values with ones beside them, and what each are; None of ones that a pad adds behind."""
    rank, width = value(values).dim(), shape(values)[at]
    if op_name(values) in ("cat", "concat", "concatenate") and axis(argument(values, 1, "dim", 0), rank) == at:
        pieces: list[Node] = values.args[0]  # type: ignore[assignment]
        if any((made := ones(p)) and unwritten(module, made, values) for p in pieces):
            ends = running(shape(p)[at] for p in pieces)
            yield from zip(ends, pieces, strict=True)
    by_mode = op_name(values) == "pad"
    if (by_mode or op_name(values) == "constant_pad_nd") and at == rank - 1:
        mode = argument(values, 2, "mode", "constant") if by_mode else "constant"
        if mode == "constant" and values.args[1] == [0, 1] and argument(values, 3 if by_mode else 2, "value") == 1:
            last = apply("sub", width, ONE)
            yield (ZERO, last), values.args[0]  # type: ignore[misc]
            yield (last, width), None


def running(lengths: Iterable[Expr]) -> Iterator[Columns]:
    """[first, end) of each piece, one behind the other."""
    end: Expr = ZERO
    for length in lengths:
        first, end = end, apply("add", end, length)
        yield first, end


def readers(node: Node, at: int) -> list[Reader]:
    """What reads columns of a product; empty where something reads other than these."""
    found: list[Reader] = []
    rank, width = value(node).dim(), shape(node)[at]
    for user in node.users:
        name = op_name(user)
        if name == "slice" and axis(argument(user, 1, "dim", 0), rank) == at and len(user.args) < 5:
            first, end = bound(argument(user, 2, "start"), ZERO, width), bound(argument(user, 3, "end"), width, width)
            found.append(Reader(user, (first, end)))
        elif name == "select" and axis(user.args[1], rank) == at:
            first = bound(user.args[2], ZERO, width)
            found.append(Reader(user, (first, apply("add", first, ONE)), gone=True))
        elif name in ("split", "split_with_sizes") and axis(argument(user, 2, "dim", 0), rank) == at:
            pieces = list(running(size_expr(x.shape[at]) for x in value(user)))
            found += [Reader(n, pieces[n.args[1]]) for n in user.users if is_getitem(n)]  # type: ignore[index]
        else:
            return []
    return found


def bound(n: Any, otherwise: Expr, width: Expr) -> Expr:
    """A bound of a slice, as Python counts."""
    found = otherwise if n is None else number(n)
    if isinstance(found, Const):
        if found.value == sys.maxsize:
            return width
        return apply("add", width, found) if found.value < 0 else found
    return found if found is not None else apply("sub", ZERO, ONE)


def product(spec: Contraction, column: str, gone: bool, filled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """left, the columns -> their product; or with ones in the place of the last column"""
    at, axes = spec.right_axes.index(column), spec.right_axes.replace(".", "")

    def taken(left: Tensor, values: Tensor) -> Tensor:
        values = torch.ones_like(values.narrow(at, 0, 1)) if filled else values
        values = values if values.dtype == left.dtype else values.to(left.dtype)  # as beside what is wider in a cat
        right, out = without_ones(values, spec.right_axes), spec.out_axes
        if gone:
            right = right.reshape([n for a, n in zip(axes, right.shape, strict=True) if a != column])
        equation = f"{spec.left_axes},{axes}->{out}"
        return torch.einsum(equation.replace(column, "") if gone else equation, left, right)

    return taken
