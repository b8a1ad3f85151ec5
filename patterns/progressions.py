"""Differences and running sums along an axis, of what is known at every place.

    diff(x)[i]   = x[i + 1] - x[i]
    cumsum(c)[i] = c (i + 1)

So positions that count up are one document, as in (positions.diff(prepend=positions[:1] - 1) != 1).cumsum(0), by which
packed sequences are told apart. A running sum of data is read, not lifted.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from fusecomp.graph.facts import dtype, is_tensor, number, shape
from fusecomp.ir.algebra import ONE, ZERO, apply
from fusecomp.ir.expr import Const, Expr, dtype_kind
from fusecomp.ir.poly import from_poly, poly
from fusecomp.patterns.lift import Index, Lift, argument, axis, rule
from fusecomp.patterns.rounding import stored
from fusecomp.patterns.scalars import real
from fusecomp.patterns.views import replaced, within


@rule("diff")
def difference(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[i] = x[i + 1] - x[i] of integers; x may be pieces: within each, and where one follows another."""
    dim = axis(argument(node, 2, "dim", -1), len(index))
    if number(argument(node, 1, "n", 1)) != ONE or dtype_kind(dtype(node)) != "int":
        return None
    pieces = [argument(node, 3, "prepend"), node.args[0], argument(node, 4, "append")]
    steps = list(_steps(lift, [x for x in pieces if is_tensor(x)], index, dim))
    _, found = steps.pop()
    for end, step in reversed(steps):
        found = apply("where", apply("lt", index[dim], end), step, found)
    return stored(found, dtype(node))


def _steps(lift: Lift, pieces: list[Node], index: Index, dim: int) -> Iterator[tuple[Expr, Expr]]:
    """(end, y[i] for i before it, from the last end on)."""
    before: Expr = ZERO
    last: Expr | None = None
    for x in pieces:
        size = shape(x)[dim]
        if last is not None:
            yield before, _between(last, lift.lift(x, replaced(index, dim, lambda _: ZERO)))
        inner = apply("sub", size, ONE)
        if inner != ZERO:
            at = within(apply("sub", index[dim], before), inner)
            here, after = (lift.lift(x, replaced(index, dim, lambda _, i=i: i)) for i in (at, apply("add", at, ONE)))
            yield apply("add", before, inner), _between(here, after)
        last = lift.lift(x, replaced(index, dim, lambda _, i=inner: i))
        before = apply("add", before, size)


def _between(x: Expr, y: Expr) -> Expr:
    """y - x"""
    return from_poly(poly(apply("sub", y, x)))


@rule("cumsum")
def running_sum(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[i] = c (i + 1) where x is the integer c at every place."""
    source, dim = node.args[0], axis(argument(node, 1, "dim"), len(index))
    if dtype(node) != "int64" or dtype_kind(dtype(source)) == "float":
        return None
    anywhere = lift.fresh(shape(source)[dim])
    c = real(lift.lift(source, replaced(index, dim, lambda _: anywhere)))
    return apply("mul", c, apply("add", index[dim], ONE)) if isinstance(c, Const) else None
