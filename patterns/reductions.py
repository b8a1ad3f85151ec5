"""Reductions that a softmax is made of, lifted: max, sum, logsumexp, softmax itself."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fusecomp.graph.facts import dtype, op_name, shape
from fusecomp.ir.algebra import ONE, apply, cast, const, substitute
from fusecomp.ir.expr import Expr, Reduce, Var, parts
from fusecomp.patterns.lift import Index, Lift, argument, axis, rule

INF = float("inf")


def over(lift: Lift, source: Node, dim: Any, index: Index, keepdim: bool) -> tuple[Var, Expr]:
    """(j, source[.., j, ..]) for a reduction over one axis of `source`, several, or all; `index` indexes the result."""
    rank = len(shape(source))
    dims = dim if isinstance(dim, list | tuple) else [] if dim is None else [dim]
    summed = {axis(d, rank) for d in dims} or set(range(rank))
    kept = [i for n, i in enumerate(index) if n not in summed] if keepdim else list(index)
    j, places = together(lift, [shape(source)[d] for d in sorted(summed)])
    return j, lift.lift(source, tuple(places.pop(0) if d in summed else kept.pop(0) for d in range(rank)))


def together(lift: Lift, lengths: list[Expr]) -> tuple[Var, list[Expr]]:
    """One index over several axes, in row-major order, and the place that it means in each: pages and their slots."""
    total: Expr = ONE
    for length in lengths:
        total = apply("mul", total, length)
    j = lift.fresh(total)
    flat: Expr = j
    places: list[Expr] = []
    for n, length in reversed(list(enumerate(lengths))):
        places.insert(0, apply("mod", flat, length) if n else flat)
        flat = apply("floordiv", flat, length)
    return j, places


@rule("amax")
def amax(lift: Lift, node: Node, index: Index) -> Expr | None:
    """max_j x[.., j, ..]"""
    return reduced(lift, node, index, "max")


@rule("sum")
def summed(lift: Lift, node: Node, index: Index) -> Expr | None:
    """sum_j x[.., j, ..]"""
    return reduced(lift, node, index, "sum")


@rule("einsum")
def summed_by_letters(lift: Lift, node: Node, index: Index) -> Expr | None:
    """einsum("bhij->bhi", x)[b, h, i] = sum_j x[b, h, i, j]"""
    letters, arrow, out = str(node.args[0]).replace(" ", "").partition("->")
    once = len(set(letters)) == len(letters) and set(out) <= set(letters)
    operands = node.all_input_nodes
    if len(operands) != 1 or not (arrow and once) or "." in letters or set(out) == set(letters):
        return None
    dims = [n for n, a in enumerate(letters) if a not in out]
    j, e = over(lift, operands[0], dims, tuple(index[out.index(a)] for a in letters if a in out), False)
    return reduce(lift, node, "sum", j, e) if lift.holds_score(e) else None


@rule("mean")
def mean(lift: Lift, node: Node, index: Index) -> Expr | None:
    """sum_j x[.., j, ..] / N; of scores that a mask filled with -inf it is no number, and not lifted"""
    j, e = over(lift, node.args[0], argument(node, 1, "dim"), index, argument(node, 2, "keepdim", False))
    if not lift.holds_score(e) or const(-INF) in parts(e):
        return None
    return apply("div", reduce(lift, node, "sum", j, e), cast(j.size, "float32"))


@rule("any")
def some(lift: Lift, node: Node, index: Index) -> Expr | None:
    """any_j x[.., j, ..] of scores; of anything else, a tensor that is read"""
    if len(node.args) < 2 and "dim" not in node.kwargs:
        return None
    found = reduced(lift, node, index, "any")
    return found if isinstance(found, Reduce) and lift.holds_score(found.body) else None


def reduced(lift: Lift, node: Node, index: Index, op: str) -> Expr | None:
    """A reduction of what holds no score is computed once, outside."""
    j, e = over(lift, node.args[0], argument(node, 1, "dim"), index, argument(node, 2, "keepdim", False))
    return reduce(lift, node, op, j, e) if lift.holds_score(e) else None


def reduce(lift: Lift, node: Node, op: str, j: Var, body: Expr) -> Reduce:
    """op over j of body, the bound index named by the depth of reductions under it, so that equal sums are equal."""
    deepest = max((int(x.var.name[1:]) for x in parts(body) if isinstance(x, Reduce)), default=0)
    named = Var(f"_{deepest + 1}", j.size)
    made = Reduce(op, named, substitute(body, {j: named}))
    lift.reductions[made] = node
    return made


def reduced_values(lift: Lift, node: Node, which: int, index: Index) -> Expr | None:
    """max(x, dim).values"""
    if op_name(node) != "max" or which != 0 or len(node.args) < 2:
        return None
    lift.visited.add(node)
    return reduced(lift, node, index, "max")


@rule("logsumexp")
def logsumexp(lift: Lift, node: Node, index: Index) -> Expr | None:
    """log sum_j exp x[.., j, ..]"""
    j, e = over(lift, node.args[0], argument(node, 1, "dim"), index, argument(node, 2, "keepdim", False))
    return apply("log", reduce(lift, node, "sum", j, apply("exp", e)))


@rule("linalg_vector_norm", "norm")
def norm(lift: Lift, node: Node, index: Index) -> Expr | None:
    """sum_j |x[.., j, ..]|, the norm of order 1"""
    dim, keepdim = argument(node, 2, "dim"), argument(node, 3, "keepdim", False)
    if argument(node, 1, "ord", 2) not in (1, 1.0) or dim is None:
        return None
    j, e = over(lift, node.args[0], dim, index, keepdim)
    return reduce(lift, node, "sum", j, apply("abs", e)) if lift.holds_score(e) else None


def normalised(lift: Lift, node: Node, index: Index) -> tuple[Expr, Expr] | None:
    """(x[.., n, ..], sum_j exp x[.., j, ..]) for softmax and its kin."""
    source, dim = node.args[0], axis(argument(node, 1, "dim"), len(index))
    if not dtype(source).startswith(("float", "bfloat")):
        return None
    j = lift.fresh(shape(source)[dim])
    body = lift.lift(source, (*index[:dim], j, *index[dim + 1 :]))
    return lift.lift(source, index), reduce(lift, node, "sum", j, apply("exp", body))


@rule("softmax", "_softmax", "special_softmax")
def softmax(lift: Lift, node: Node, index: Index) -> Expr | None:
    """exp(x[n]) / sum_j exp(x[j])"""
    found = normalised(lift, node, index)
    return apply("div", apply("exp", found[0]), found[1]) if found else None


@rule("_safe_softmax")
def safe_softmax(lift: Lift, node: Node, index: Index) -> Expr | None:
    """softmax, and 0 where every score is -inf"""
    p = softmax(lift, node, index)
    return apply("where", apply("isnan", p), const(0.0), p) if p is not None else None


@rule("log_softmax", "_log_softmax")
def log_softmax(lift: Lift, node: Node, index: Index) -> Expr | None:
    """log(exp(x[n]) / sum_j exp(x[j]))"""
    p = softmax(lift, node, index)
    return apply("log", p) if p is not None else None
