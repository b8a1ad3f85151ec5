"""Calls of more than one product, or of a product and a sum, written as products of two tensors.

    einsum("bhij,bhjd,hdo->bio", P, V, W)   einsum("bhid,hdo->bio", einsum("bhij,bhjd->bhid", P, V), W)
    multi_dot([P, V, W])                    (P V) W
    baddbmm(C, P, V, beta=b, alpha=a)       a (P V) + b C            addmm, linear with a bias
    (P * V).sum(n, keepdim=True)            (P * V).sum(n).unsqueeze(n)

Only around a softmax or an exponential. Products of more tensors begin with the weights, else where an axis is summed.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, op_name, reach, shape
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.expr import Const, Expr
from fusecomp.patterns.contraction import Contraction, contraction
from fusecomp.patterns.folding import ANCHORS, first_products
from fusecomp.patterns.sums import between

Term = tuple[Node, str]
"""A tensor, and a letter for each of its axes."""


def unchain(module: GraphModule) -> Iterator[Written]:
    """Write out every product of three tensors or more, then, of products of weights, every sum in one call
    with them, and every axis that is kept."""
    anchors = [n for n in module.graph.nodes if op_name(n) in ANCHORS]
    weights = reach(anchors, lambda n: [] if contraction(n) and n not in anchors else n.users)
    for node in list(module.graph.nodes) if anchors else ():
        if (found := chain(node)) is not None:
            steps = list(pairs(*found, weights))
            yield written(node, by_pairs(steps), [x for x, _ in found[0]])
    for node in list(dict.fromkeys(first_products(anchors, lambda n: n.users))):
        spec = contraction(node)
        if spec is not None and summed_with(spec, node):
            yield written(node, added(spec), [spec.left, spec.right, spec.added])  # type: ignore[list-item]
        elif spec is not None and "." in spec.out_axes and movable(module, *kept(spec, node), node):
            yield written(node, summed_apart(spec.out_axes.index(".")), [spec.left, spec.right])


def written(node: Node, f: Callable[..., Tensor], inputs: Sequence[Node]) -> Written:
    """f in the place of the node."""
    before = node.prev
    output = inline(node, f, inputs)
    return write(node, output, [n for n in between(before, node) if contraction(n)])


def chain(node: Node) -> tuple[list[Term], str] | None:
    """The factors of a product of three tensors or more, and the letters of its result."""
    if op_name(node) == "linalg_multi_dot":
        return dots(node.args[0])  # type: ignore[arg-type]
    if op_name(node) != "einsum" or len(node.args[1]) < 3 or not isinstance(node.args[0], str):  # type: ignore[arg-type]
        return None
    inputs, arrow, out = node.args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    letters = "".join(terms)
    if not arrow:
        out = "".join(sorted(a for a in set(letters) if letters.count(a) == 1))
    repeated = any(len(set(t)) < len(t) for t in (*terms, out))
    factors = list(zip(node.args[1], terms, strict=True))  # type: ignore[arg-type]
    return None if repeated or "." in letters or not in_step(factors) else (factors, out)


def in_step(factors: Sequence[Term]) -> bool:
    """Whether every letter has one length: an axis of length 1 may stand against a longer one in an einsum."""
    lengths = {(a, n) for x, axes in factors for a, n in zip(axes, shape(x), strict=True)}
    return len(lengths) == len({a for a, _ in lengths})


def dots(factors: Sequence[Node]) -> tuple[list[Term], str] | None:
    """Matrices that are multiplied one after another; the first and the last may be vectors."""
    ends = len(shape(factors[0])) == 1, len(shape(factors[-1])) == 1
    letters = string.ascii_lowercase[: len(factors) + 1]
    terms = [(x, letters[n : n + 2]) for n, x in enumerate(factors)]
    terms[0] = factors[0], terms[0][1][ends[0] :]
    terms[-1] = factors[-1], terms[-1][1][: 2 - ends[1]]
    return terms, ("" if ends[0] else letters[0]) + ("" if ends[1] else letters[-1])


Step = tuple[int, int, str]
"""Two places in the list of factors, and the equation of their product, which is put at its end."""


def pairs(factors: Sequence[Term], out: str, weights: set[Node]) -> Iterator[Step]:
    """The products of two that make the product of all."""
    left = [(axes, x in weights) for x, axes in factors]
    while len(left) > 1:
        i, j = min(combinations(range(len(left)), 2), key=lambda p: _late(left, p, out))
        (one, _), (other, _) = left[i], left[j]
        rest = out + "".join(axes for n, (axes, _) in enumerate(left) if n not in (i, j))
        made = "".join(a for a in dict.fromkeys(one + other) if a in rest)
        left = [x for n, x in enumerate(left) if n not in (i, j)] + [(made, False)]
        yield i, j, f"{one},{other}->{made if len(left) > 1 else out}"


def _late(left: Sequence[tuple[str, bool]], pair: tuple[int, int], out: str) -> tuple[bool, bool]:
    """What makes a pair wait: it has no weights to multiply, or sums over nothing."""
    (one, soft), (other, also) = (left[n] for n in pair)
    rest = out + "".join(axes for n, (axes, _) in enumerate(left) if n not in pair)
    sums = any(a in other and a not in rest for a in one)
    return not (sums and (soft or also)), not sums


def by_pairs(steps: Sequence[Step]) -> Callable[..., Tensor]:
    def product(*factors: Tensor) -> Tensor:
        left = list(factors)
        for i, j, equation in steps:
            left = [x for n, x in enumerate(left) if n not in (i, j)] + [of_two(equation, left[i], left[j])]
        return left[0]

    return product


def of_two(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """An einsum of two tensors, as a product of their elements where nothing is summed."""
    terms, out = equation.split("->")
    one, other = terms.split(",")
    if set(one + other) != set(out):
        return torch.einsum(equation, x, y)
    return laid_out(x, one, out) * laid_out(y, other, out)


def laid_out(x: Tensor, axes: str, out: str) -> Tensor:
    """x with the axes of the result, of length 1 where it has none."""
    order = [axes.index(a) for a in out if a in axes]
    x = x if order == sorted(order) else x.permute(order)
    for n, a in enumerate(out):
        x = x if a in axes else x.unsqueeze(n)
    return x


def summed_with(spec: Contraction, node: Node) -> bool:
    """Whether a product is added to another tensor, both times numbers."""
    numbers = isinstance(spec.scale, Const) and isinstance(spec.added_scale, Const)
    return spec.added is not None and numbers and dtype(spec.added) == dtype(node)


def kept(spec: Contraction, node: Node) -> tuple[list[Node], list[Node]]:
    """What makes a sum that keeps its axis, and what that reads."""
    return [node.args[0], node], [spec.left, spec.right]  # type: ignore[list-item]


def summed_apart(n: int) -> Callable[..., Tensor]:
    """left, right -> their product summed over an axis, and that axis put back after it."""
    return lambda left, right: (left * right).sum(n).unsqueeze(n)


def added(spec: Contraction) -> Callable[..., Tensor]:
    """left, right, added -> the product and, after it, the sum."""

    def product(left: Tensor, right: Tensor, more: Tensor) -> Tensor:
        made = torch.einsum(f"{spec.left_axes},{spec.right_axes}->{spec.out_axes}", left, right)
        return times(made, spec.scale) + times(more, spec.added_scale)

    return product


def times(x: Tensor, c: Expr) -> Tensor:
    return x if c == Const(1.0) else x * c.value  # type: ignore[attr-defined]
