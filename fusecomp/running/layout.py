"""What a kernel reads for each query and key lies with its keys beside each other.

    table[bucket]  [M, N, H], read at [q_idx, kv_idx, h]    ->    the same of strides of [H, M, N]

Heads that lie innermost, as in T5's and Swin's tables of relative positions, would have each of them read the memory
of all. The copy is differentiable, and a compiler fuses it with what makes the tensor.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import overwritten
from fusecomp.graph.learning import carry, records
from fusecomp.ir.expr import Load, Var, parts
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.build import Match
from fusecomp.planning.backward import pairs
from fusecomp.planning.facts import Lengths, lengths
from fusecomp.running.inputs import Example, example_of
from fusecomp.running.subgraph import seen

Order = tuple[int, ...]
"""The axes of a tensor, outermost first."""
COPIES = "fusecomp_laid_out"


def examples(match: Match) -> list[Example]:
    """How the operands lie as a kernel is given them."""
    made = []
    for node, order in zip(match.inputs, orders(match), strict=True):
        shape, strides, dtype = example_of(node.meta["val"])
        made.append((shape, strides if order is None else dense(shape, order), dtype))
    return made


def orders(match: Match) -> list[Order | None]:
    """The order that each operand is copied into; None of those that lie well."""
    at = lengths(match.region, {name: seen(source) for name, source in match.sizes.items()})
    operands = zip(match.region.operands, match.inputs, strict=True)
    return [order(match.region, o.name, example_of(n.meta["val"]), at) for o, n in operands]


def order(region: AttentionRegion, operand: str, example: Example, at: Lengths) -> Order | None:
    """Queries and keys innermost, where keys do not lie beside each other, queries are several, and the tensor has room
    for no others: a table for the longest sequence would be copied whole at every call."""
    shape, strides, _ = example
    read = [x for e in (region.score, *region.keep) for x in parts(e) if isinstance(x, Load) and x.tensor == operand]
    found = {(place(x, region.q_idx), place(x, region.kv_idx)) for x in read if pairs(x, region)}
    if len(found) != 1 or None in (axes := found.pop()) or 0 in strides:
        return None
    q, kv = axes
    assert q is not None
    assert kv is not None
    if strides[kv] == 1 or min(at.m, at.n) == 1 or (shape[q], shape[kv]) != (at.m, at.n):
        return None
    rest = sorted(set(range(len(shape))) - {q, kv}, key=lambda i: -strides[i])
    return (*rest, q, kv)


def place(x: Load, v: Var) -> int | None:
    """The axis that an index runs along, by itself."""
    return next((i for i, e in enumerate(x.index) if e == v), None)


def dense(shape: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """Strides without gaps."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def copy(node: Node, order: Order | None, before: Node) -> Node:
    """The tensor in that order; one copy for all layers that read it."""
    if order is None:
        return node
    known: dict[tuple[Order, bool], Node] = node.meta.setdefault(COPIES, {})
    found = known.get(kind := (order, records(before)))
    if found is None or not found < before or overwritten(node, found):
        found = known[kind] = inline(before, partial(laid, order=order), [node])
        carry(node, found)
    return found


def laid(x: Tensor, order: Order) -> Tensor:
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
