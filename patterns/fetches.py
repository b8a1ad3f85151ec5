"""Reads of one tensor at the places that another names, as index arithmetic: tables, slots, ids; and one number written
where another is true."""

from __future__ import annotations

import torch
from torch.fx import Node

from fusecomp.graph.facts import dtype, op_name, shape, size_expr, value
from fusecomp.graph.learning import learns
from fusecomp.ir.algebra import ONE, ZERO, apply
from fusecomp.ir.expr import Expr
from fusecomp.patterns.lift import Index, Lift, argument, axis, broadcast, rule
from fusecomp.patterns.rounding import retyped, stored, truth
from fusecomp.patterns.spellings import same_kind
from fusecomp.patterns.views import replaced, unravel, wrapped


@rule("index", "_unsafe_index")
def indexed(lift: Lift, node: Node, index: Index) -> Expr | None:
    """x[i0, :, i1]: the index tensors broadcast together; their axes stand where the first of them did, or in front."""
    source, indices = node.args[0], list(node.args[1])
    used = [k for k, i in enumerate(indices) if i is not None]
    tensors = [indices[k] for k in used]
    if not used or any(value(t).dtype == torch.bool for t in tensors):
        return None
    joint = torch.broadcast_shapes(*[tuple(value(t).shape) for t in tensors])
    outer = [size_expr(n) for n in joint]
    together = used == list(range(used[0], used[-1] + 1))
    start = used[0] if together else 0
    at = index[start : start + len(joint)]
    rest = [*index[:start], *index[start + len(joint) :]]
    found: list[Expr] = []
    for k, size in enumerate(shape(source)):
        if k in used:
            element = lift.lift(indices[k], broadcast(tuple(at), outer, shape(indices[k])))
            if not lift.indexes(element):
                return None
            found.append(wrapped(element, size))
        else:
            found.append(rest.pop(0))
    return lift.lift(source, tuple(found))


@rule("index_select")
def index_selected(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[.., i, ..] = x[.., positions[i], ..]"""
    source, dim, positions = node.args[:3]
    dim = axis(dim, len(index))
    at = lift.lift(positions, (index[dim],))
    return lift.lift(source, replaced(index, dim, lambda _: at)) if lift.indexes(at) else None


@rule("gather", "take_along_dim")
def gathered(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[i] = x[i with coordinate dim replaced by positions[i]]"""
    by_name = op_name(node) == "gather"
    source, positions = node.args[0], node.args[2] if by_name else node.args[1]
    dim = node.args[1] if by_name else argument(node, 2, "dim")
    if dim is None:
        return None
    at = lift.lift(positions, broadcast(index, shape(node), shape(positions)))
    if not lift.indexes(at):
        return None
    inner = replaced(index, axis(dim, len(index)), lambda _: at)
    return lift.lift(source, broadcast(inner, shape(node), shape(source)))


@rule("take")
def taken(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[i] = x[positions[i]], x flat"""
    source, positions = node.args[:2]
    at = lift.lift(positions, index)
    if not lift.indexes(at):
        return None
    size: Expr = ONE
    for n in shape(source):
        size = apply("mul", size, n)
    return lift.lift(source, unravel((wrapped(at, size),), (size,), shape(source)))


@rule("embedding")
def embedded(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[.., d] = table[ids[..], d]. What else it may do is done to the gradient."""
    table, ids, *more = node.args
    if learns(node) and (node.kwargs or more not in ([], [-1], [-1, False], [-1, False, False])):
        return None
    at = lift.lift(ids, index[:-1])
    return lift.lift(table, (at, index[-1])) if lift.indexes(at) else None


@rule("index_put")
def put(lift: Lift, node: Node, index: Index) -> Expr | None:
    """x[:, m] = c: c where m holds, x elsewhere. Positions, or more than one number, are not followed."""
    x, indices, number = node.args[:3]
    masks = [(k, m) for k, m in enumerate(indices) if m is not None]
    if argument(node, 3, "accumulate", False) or value(number).numel() != 1:
        return None
    if [dtype(m) for _, m in masks] != ["bool"]:
        return None
    start, m = masks[0]
    there = truth(lift.lift(m, index[start : start + len(shape(m))]))
    c = retyped(lift.lift(number, (ZERO,) * len(shape(number))), dtype(node))
    return stored(apply("where", there, *same_kind(c, lift.lift(x, index))), dtype(node))
