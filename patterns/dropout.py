"""Dropout of attention weights, as a function of a seed and of where a weight stands.

    dropout(P, p) = P * (random(seed, batch, row, key) >= p 2^32 ? 1 / (1 - p) : 0)

Before recognition each training dropout is written as that, its seed drawn in the graph by `aten.randint`, so that
PyTorch's generators decide it. So forward and backward, eager nodes under verification and every kernel drop the same
weights. What is not fused is put back as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.facts import is_getitem, number, op_name, shape, value
from fusecomp.graph.program import as_written
from fusecomp.graph.rewriting import Written, write
from fusecomp.ir.algebra import ZERO, apply, const, draws
from fusecomp.ir.expr import Apply, Const, Expr, Var
from fusecomp.ir.philox import WORDS, random_words
from fusecomp.patterns.lift import Decline, Index, Lift, argument, rule
from fusecomp.patterns.weights import Weights

RANDINT, SEEDS = torch.ops.aten.randint.default, (1 << 63) - 1
"""What draws a seed, and how many there are."""


def threshold(p: float) -> int:
    """Words below this drop their weight."""
    return round(p * WORDS)


def seeded_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x with the elements dropped that the words of their places say, the others divided by 1 - p."""
    shape = (1, 1, *x.shape)
    batch = shape[:-2]
    lines = [torch.arange(n, device=x.device) for n in (math.prod(batch), *shape[-2:])]
    places = lines[0].view(*batch, 1, 1), lines[1].view(-1, 1), lines[2]
    kept = (random_words(seed, *places) >= threshold(p)).view(x.shape)
    exact = torch.promote_types(x.dtype, torch.float32)
    return (x * (kept.to(exact) / (1 - p))).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------
# In the graph


def seed_dropouts(module: GraphModule) -> Iterator[Written]:
    """Write each dropout that drops with a seed of its own."""
    return (seeded(node) for node in list(module.graph.nodes) if drops(node))


def drops(node: Node) -> bool:
    """Whether `node` is a dropout in training, 0 < p < 1, of which the values alone are used."""
    if op_name(node) not in ("dropout", "native_dropout") or not node.args or not node.users:
        return False
    whole = op_name(node) == "dropout" or [is_getitem(u) and u.args[1] for u in node.users] == [0]
    p = number(argument(node, 1, "p"))
    return whole and argument(node, 2, "train") is not False and isinstance(p, Const) and 0 < p.value < 1


def seeded(node: Node) -> Written:
    """The same dropout of a seed."""
    graph, output = node.graph, next(iter(node.users)) if op_name(node) == "native_dropout" else node
    x, p, val = node.args[0], number(argument(node, 1, "p")), value(output)
    with graph.inserting_before(node):
        seed = graph.create_node("call_function", RANDINT, (SEEDS, []), {"device": val.device}, name="seed")
        new = graph.call_function(seeded_dropout, (x, seed, p.value))  # type: ignore[union-attr]
    new.meta = dict(output.meta)
    with val.fake_mode:
        seed.meta = {**output.meta, "val": torch.empty((), dtype=torch.int64, device=val.device)}
    as_written(graph.owning_module).seeded(node, output, seeded_dropout, seed, p.value)  # type: ignore[union-attr, arg-type]
    return write(output, new)


# ----------------------------------------------------------------------------------------------------------------
# In the mathematics


@rule("seeded_dropout")
def dropped(lift: Lift, node: Node, index: Index) -> Expr | None:
    """x * (random(seed, batch, row, key) >= p 2^32 ? 1 / (1 - p) : 0), where x holds scores"""
    x, seed, p = node.args
    kept = lift.lift(x, index)
    if not lift.holds_score(kept):
        return None
    batch: Expr = ZERO
    for i, n in zip(index[:-2], shape(node), strict=False):
        batch = apply("add", apply("mul", batch, n), i)
    place = (lift.lift(seed, ()), batch, index[-2] if len(index) > 1 else ZERO, index[-1])
    live = apply("ge", Apply("random", place), Const(threshold(p)))
    return apply("mul", kept, apply("where", live, Const(1 / (1 - p)), Const(0.0)))


@rule("dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def constant(lift: Lift, node: Node, index: Index) -> Expr:
    """The identity, or 0 x, unless it really drops"""
    p, train = number(argument(node, 1, "p")), argument(node, 2, "train")
    if train is False or p in (const(0), const(0.0)):
        return lift.lift(node.args[0], index)
    if op_name(node) in ("dropout", "native_dropout") and p in (const(1), const(1.0)):
        return apply("mul", lift.lift(node.args[0], index), const(0.0))
    what = p.value if isinstance(p, Const) else "that is no constant"
    raise Decline(f"`{op_name(node)}` with p = {what} in training", node, "use F.dropout(weights, p) on the weights")


def check(weights: Weights, key: Var, anchor: Node) -> None:
    """Raise Decline unless what is dropped are weights, laid out with the keys last."""
    if any(draws(e) for e in (weights.scores, weights.sink or ZERO)):
        raise Decline("dropout of the scores, before the softmax", anchor, "drop the weights, behind the softmax")
    if any(word.operands[3] != key for word in draws(weights.factor)):
        raise Decline("dropout of weights whose last axis is not the keys", anchor)
