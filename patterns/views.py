"""Rearrangements as index arithmetic: where element `index` of the result stands in the source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from fusecomp.graph.facts import dtype, is_tensor, number, op_name, shape, size_expr, value
from fusecomp.ir.algebra import ONE, TRUE, ZERO, apply, cast, const, substitute
from fusecomp.ir.expr import Const, Expr, kind
from fusecomp.patterns.lift import Index, Lift, argument, axis, broadcast, rule
from fusecomp.patterns.series import series

PRIMES = (2, 3, 5, 7, 11, 13, 17)


@rule("contiguous", "clone", "detach", "detach_", "alias",
       "lift_fresh_copy", "lift_fresh", "lift", "positive", "detach_copy",
      moves=True)  # fmt: skip
def same(lift: Lift, node: Node, index: Index) -> Expr:
    """y[i] = x[i]"""
    return lift.lift(node.args[0], index)


@rule("view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "view_as", "reshape_as", "squeeze",
      "unsqueeze", "ravel", "view_copy", moves=True)  # fmt: skip
def reshaped(lift: Lift, node: Node, index: Index) -> Expr | None:
    """Row-major order is kept: the flat position, unravelled over the source's axes."""
    if value(node.args[0]).numel() != value(node).numel() or isinstance(argument(node, 1, "dtype"), torch.dtype):
        return None
    return lift.lift(node.args[0], unravel(index, shape(node), shape(node.args[0])))


@lru_cache(maxsize=1 << 12)
def unravel(index: Index, outer: tuple[Expr, ...], inner: tuple[Expr, ...]) -> Index:
    """The index into a tensor of lengths `inner` whose flat position is that of `index` in lengths `outer`."""
    flat: Expr = ZERO
    for i, size in zip(index, outer, strict=True):
        flat = flat if size == const(1) else apply("add", apply("mul", flat, size), i)
    found: list[Expr] = []
    first = next((k for k, size in enumerate(inner) if size != const(1)), 0)
    for place, size in reversed(list(enumerate(inner))):
        found.append(ZERO if size == const(1) else flat if place == first else apply("mod", flat, size))
        flat = apply("floordiv", flat, size)
    return tuple(kept(list(reversed(found)), index, outer, inner))


def kept(found: list[Expr], index: Index, outer: tuple[Expr, ...], inner: tuple[Expr, ...]) -> list[Expr]:
    """An axis of length 1 keeps the name of its index, though that is 0, where axes of length 1 alone came or went."""
    if [n for n in outer if n != ONE] != [n for n in inner if n != ONE]:
        return found
    for before, after in zip(runs_of_ones(outer), runs_of_ones(inner), strict=True):
        named = [index[place] for place in before if index[place] != ZERO]
        for place, name in zip(after, named, strict=False):
            found[place] = name
    return found


def runs_of_ones(lengths: tuple[Expr, ...]) -> list[list[int]]:
    """The places of axes of length 1 before each longer axis, and behind the last."""
    runs: list[list[int]] = [[]]
    for place, size in enumerate(lengths):
        if size == ONE:
            runs[-1].append(place)
        else:
            runs.append([])
    return runs


@rule("transpose", "permute", "t", "numpy_T", "mT", "matrix_H", "movedim", "moveaxis", "swapaxes", "swapdims",
      moves=True)  # fmt: skip
def permuted(lift: Lift, node: Node, index: Index) -> Expr:
    """y[i] = x[i permuted]: the permutation is read off a toy tensor whose axes have different lengths."""
    rank = len(index)
    toy = node.target(torch.empty(PRIMES[:rank], device="meta"), *node.args[1:], **others(node))  # type: ignore[operator]
    source: list[Expr] = [ZERO] * rank
    for i, length in zip(index, toy.shape, strict=True):
        source[PRIMES.index(length)] = i
    return lift.lift(node.args[0], tuple(source))


def others(node: Node) -> dict[str, Any]:
    """Keyword arguments that are not tensors."""
    return {k: v for k, v in node.kwargs.items() if not is_tensor(v)}


@rule("expand", "expand_as", "broadcast_to", moves=True)
def expanded(lift: Lift, node: Node, index: Index) -> Expr:
    """y[i] = x[i, 0 along repeated axes]"""
    return lift.lift(node.args[0], broadcast(index, shape(node), shape(node.args[0])))


@rule("repeat_interleave", moves=True)
def repeat_interleaved(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[.., i, ..] = x[.., i // r, ..]"""
    times, dim = number(argument(node, 1, "repeats")), argument(node, 2, "dim")
    if times is None or dim is None:
        return None
    return lift.lift(node.args[0], replaced(index, axis(dim, len(index)), lambda i: apply("floordiv", i, times)))


@rule("repeat", "tile", moves=True)
def repeated(lift: Lift, node: Node, index: Index) -> Expr:
    """y[.., i, ..] = x[.., i mod n, ..]"""
    inner = shape(node.args[0])
    kept = index[len(index) - len(inner) :]
    return lift.lift(node.args[0], tuple(apply("mod", i, n) for i, n in zip(kept, inner, strict=True)))


@rule("select", moves=True)
def selected(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[i] = x[i with a fixed coordinate put in]"""
    rank = len(index) + 1
    dim, at = axis(node.args[1], rank), number(node.args[2])
    if at is None:
        return None
    return lift.lift(node.args[0], (*index[:dim], wrapped(at, shape(node.args[0])[dim]), *index[dim:]))


@rule("slice", moves=True)
def sliced(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[.., i, ..] = x[.., start + i step, ..]"""
    dim, start, step = argument(node, 1, "dim", 0), argument(node, 2, "start"), argument(node, 4, "step", 1)
    dim = axis(dim, len(index))
    first, stride = number(0 if start is None else start), number(step)
    if first is None or stride is None:
        return None
    first = clamped_start(first, shape(node.args[0])[dim])
    return lift.lift(node.args[0], replaced(index, dim, lambda i: apply("add", first, apply("mul", i, stride))))


def clamped_start(start: Expr, size: Expr) -> Expr:
    """A slice's start as Python clamps it."""
    if isinstance(start, Const) and isinstance(size, Const):
        return const(slice(int(start.value), None).indices(int(size.value))[0])
    return wrapped(start, size)


@rule("narrow", moves=True)
def narrowed(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[.., i, ..] = x[.., start + i, ..]"""
    dim, start = axis(node.args[1], len(index)), number(node.args[2])
    if start is None:
        return None
    start = wrapped(start, shape(node.args[0])[dim])
    return lift.lift(node.args[0], replaced(index, dim, lambda i: apply("add", start, i)))


@rule("getitem", moves=True)
def piece(lift: Lift, node: Node, index: Index) -> Expr | None:
    """One result of unbind, split or chunk: the pieces before it are skipped."""
    source, which = node.args[:2]
    if not isinstance(source, Node) or not isinstance(which, int):
        return None
    name = op_name(source)
    if name == "unbind":
        dim = axis(argument(source, 1, "dim", 0), len(index) + 1)
        at = wrapped(const(which), shape(source.args[0])[dim])
        return lift.lift(source.args[0], (*index[:dim], at, *index[dim:]))
    if name in ("split", "chunk", "split_with_sizes", "tensor_split", "split_copy", "hsplit"):
        dim = axis(argument(source, 2, "dim", 0), len(index))
        first: Expr = ZERO
        for part in value(source)[: which % len(value(source))]:
            first = apply("add", first, size_expr(part.shape[dim]))
        return lift.lift(source.args[0], replaced(index, dim, lambda i: apply("add", first, i)))
    from fusecomp.patterns.reductions import reduced_values

    return reduced_values(lift, source, which, index)


@rule("pad", "constant_pad_nd")
def padded(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[i] = x[i - before] inside x, else the value"""
    source, pad = node.args[:2]
    inside: Expr = TRUE
    by_mode = op_name(node) == "pad"
    if by_mode and argument(node, 2, "mode", "constant") != "constant":
        return None
    fill = const(0) if (given := argument(node, 3 if by_mode else 2, "value")) is None else number(given)
    inner, at = shape(source), list(index)
    for place, (before, after) in zip(reversed(range(len(index))), zip(pad[::2], pad[1::2], strict=True), strict=False):
        low, high = number(before), number(after)
        if low is None or high is None or fill is None:
            return None
        unbounded = apply("sub", index[place], low)
        inside = apply("and", inside, apply("ge", unbounded, ZERO))
        inside = apply("and", inside, apply("lt", unbounded, inner[place]))
        at[place] = within(unbounded, inner[place])
    x = lift.lift(source, tuple(at))
    return apply("where", inside, x, cast(fill, dtype(node)))  # type: ignore[arg-type]


@rule("cat", "concat", "concatenate")
def concatenated(lift: Lift, node: Node, index: Index) -> Expr:
    """y[.., i, ..] = a[.., i, ..] if i < |a| else b[.., i - |a|, ..]. Empty legacy pieces of shape [0] are skipped."""
    dim = axis(argument(node, 1, "dim", 0), len(index))
    if (whole := pieces_in_step(lift, node, index)) is not None:
        return whole
    parts = [x for x in node.args[0] if len(shape(x)) == len(index)]
    ends: list[Expr] = []
    for x in parts:
        ends.append(apply("add", ends[-1] if ends else ZERO, shape(x)[dim]))
    chosen: Expr | None = None
    for k in reversed(range(len(parts))):
        before = ends[k - 1] if k else ZERO
        inside = apply("lt", index[dim], ends[k])
        if inside == const(False) or apply("ge", index[dim], before) == const(False):
            continue
        own = within(apply("sub", index[dim], before), shape(parts[k])[dim])
        at = lift.lift(parts[k], replaced(index, dim, lambda _, own=own: own))
        chosen = at if chosen is None else apply("where", inside, at, chosen)
    assert chosen is not None
    return chosen


def within(i: Expr, size: Expr) -> Expr:
    """i, moved to the edge outside of [0, size), where something else is chosen: a kernel reads there all the same."""
    return apply("min", apply("max", i, ZERO), apply("sub", size, ONE))


def pieces_in_step(lift: Lift, node: Node, index: Index) -> Expr | None:
    """cat of equal pieces that are one function of their number, at index // length."""
    dim = axis(argument(node, 1, "dim", 0), len(index))
    lengths = {shape(x)[dim] for x in node.args[0] if len(shape(x)) == len(index)}
    if len(lengths) != 1 or len(node.args[0]) == 1 or isinstance(index[dim], Const):
        return None
    length = lengths.pop()
    inside = replaced(index, dim, lambda i: apply("mod", i, length))
    return numbered(lift, node.args[0], inside, apply("floordiv", index[dim], length))


def numbered(lift: Lift, pieces: Sequence[Node], index: Index, which: Expr) -> Expr | None:
    """pieces[which][index], where they are one function of their number."""
    found = series([lift.lift(x, index) for x in pieces])
    return None if found is None else substitute(found[1], {found[0]: which})


@rule("stack")
def stacked(lift: Lift, node: Node, index: Index) -> Expr | None:
    """y[.., k, ..] = x_k[..]"""
    dim = axis(argument(node, 1, "dim", 0), len(index))
    rest = (*index[:dim], *index[dim + 1 :])
    match index[dim]:
        case Const(int(k)):
            return lift.lift(node.args[0][k], rest)
    return numbered(lift, node.args[0], rest, index[dim])


def replaced(index: Index, dim: int, f: Any) -> Index:
    """`index` with f applied to one coordinate."""
    return (*index[:dim], f(index[dim]), *index[dim + 1 :])


def wrapped(i: Expr, size: Expr) -> Expr:
    """Python's negative indices: i + size where i < 0."""
    if kind(i) == "bool" or is_tensor(i):
        raise TypeError("a boolean is no index")
    below = apply("lt", i, ZERO)
    return apply("where", below, apply("add", i, size), i)


