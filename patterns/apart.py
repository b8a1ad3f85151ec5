"""Products that take tensors of their own: gradients of these are plain, whatever they are views of.

    q @ k.mT    ->    q.expand(..) @ k.mT.expand(..)

A kernel writes each element of a gradient once. Where Q, K or V is read in unequal steps, by several heads or requests
in another order than theirs, or by two products, that of the tensor in memory is a sum or a scatter: the graph's own
views then are left to autograd, which knows theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import op_name, written_arguments
from fusecomp.graph.learning import carry
from fusecomp.patterns.attention import Recogniser
from fusecomp.patterns.build import Match
from fusecomp.patterns.contraction import Contraction, contraction
from fusecomp.patterns.lift import inside
from fusecomp.patterns.operands import exact

TURNS = ("transpose", "permute", "t", "mT", "movedim", "moveaxis", "swapaxes", "swapdims")
"""Views that order the axes of a tensor, each of whose elements they hold once."""


def own_operands(match: Match) -> list[Node]:
    """A new tensor in the graph for each side of each product, but for the weights."""
    within = {*match.interior, match.output}
    made = []
    for product in [n for n in (*match.interior, match.output) if contraction(n) is not None]:
        spec = contraction(product)
        assert spec is not None
        sides = (spec.left, spec.right), (spec.right, spec.left)
        made += [own_operand(product, spec, x, other, match) for x, other in sides if x not in within]
    return [node for node in made if node is not None]


def found_apart(module: GraphModule, match: Match, own: Iterable[Node]) -> Match | None:
    """The attention again, of these tensors; None where it is not found so."""
    again = Recogniser(module, frozenset(own)).one(match.anchor)
    return again if isinstance(again, Match) and again.output is match.output else None


def withdraw(own: Iterable[Node]) -> None:
    """Take the tensors out of the graph again."""
    for node in own:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)


def own_operand(product: Node, spec: Contraction, x: Node, other: Node, match: Match) -> Node | None:
    """A view of one side, of the whole batch, or under the casts and turns that a kernel reads through. It is made
    where the kernel will run, which may be before the product: where the log-sum-exp is read."""
    readers = {n for n in (product, *inside(product, spec)) if x in n.all_input_nodes}
    if not readers:
        return None
    if broadcasts(product, x, other):
        inputs = [x, other]
    else:
        while exact(x) or op_name(x) in TURNS:
            readers, x = {x}, x.args[0]  # type: ignore[assignment]
        inputs = [x]
    for node in made_later(inputs, match):
        match.place.prepend(node)
    early = readers | {match.place} if all(n < match.place for n in inputs) else readers
    new = inline(min(early), expanded, inputs)
    carry(x, new)
    for reader in readers:
        replace_first(reader, x, new)
    return new


def made_later(inputs: Iterable[Node], match: Match) -> list[Node]:
    """What a kernel that reads through it would not wait for, in the order of the graph."""
    found, left = set(), list(inputs)
    while left:
        node = left.pop()
        if node > match.place and node in match.path and node not in found:
            found.add(node)
            left += node.all_input_nodes
    return sorted(found) if not any(map(written_arguments, found)) else []


def replace_first(reader: Node, old: Node, new: Node) -> None:
    """Let a node read another at the first place where it reads `old`, which may be both sides of a product."""
    left, arguments = [new], (reader.args, dict(reader.kwargs))
    reader.args, reader.kwargs = torch.fx.map_arg(arguments, lambda n: left.pop() if n is old and left else n)


def broadcasts(product: Node, x: Node, other: Node) -> bool:
    """Whether the side, a stack of matrices, has fewer requests or heads than the product."""
    matrices = op_name(product) == "matmul" and all(n.meta["val"].dim() > 1 for n in (x, other))
    mine, theirs = (n.meta["val"].shape[:-2] for n in (x, other))
    return matrices and len(theirs) >= len(mine) and torch.broadcast_shapes(mine, theirs) != mine


def expanded(x: Tensor, *other: Tensor) -> Tensor:
    """x itself, or with the leading axes of another tensor."""
    batch = torch.broadcast_shapes(x.shape[:-2], other[0].shape[:-2]) if other else x.shape[:-2]
    return x.expand(*batch, *x.shape[-2:])
