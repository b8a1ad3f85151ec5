"""A softmax that a loop makes chunk by chunk, with a maximum that runs along, as one softmax:

    N_c = N_(c-1) exp(m_(c-1) - m_c) + exp(s_c - m_c) V_c        N_C / D_C = softmax([s_1, .., s_C]) [V_1; ..; V_C]
    D_c = D_(c-1) exp(m_(c-1) - m_c) + sum_j exp(s_cj - m_c)

N and D are sums of terms, each times factors exp(a - b) of its rows. With what was subtracted from its scores, the
exponents of a term must add up to one and the same -m. So m may be anything: no weight depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import Facts, dtype, is_tensor, number, op_name, reach, shape
from fusecomp.graph.rewriting import Written, movable, write
from fusecomp.ir.algebra import const
from fusecomp.ir.expr import Const, Load, Var, parts
from fusecomp.patterns.contraction import Contraction, contraction
from fusecomp.patterns.lift import Decline, Lift, argument, axis
from fusecomp.patterns.masks import sees_a_key, split
from fusecomp.patterns.normalisers import LEAST
from fusecomp.patterns.sums import between

CASTS = ("to", "_to_copy", "type_as", "float", "half", "bfloat16")
ZEROS = ("zeros", "zeros_like", "new_zeros")
INF = float("inf")


@dataclass(frozen=True)
class Term:
    """exp(scores - shift), times exponentials of rows: summed over the keys, or times values."""

    made: Node
    """The exponential."""
    scores: Node
    exponents: frozenset[tuple[Node, int]] = frozenset()
    """Of the rows, by how often they are added."""
    spec: Contraction | None = None

    @property
    def values(self) -> Node:
        assert self.spec is not None
        return self.spec.right


def at_once(module: GraphModule) -> Iterator[Written]:
    """Write out every such quotient."""
    for node in list(module.graph.nodes):
        found = quotient(node)
        if found is None or not known_rows(module, found):
            continue
        inputs = inputs_of(found)
        inside = made_of(node, inputs)
        if movable(module, inside, inputs, node):
            before = node.prev
            output = inline(node, together(node, found), inputs)
            yield write(node, output, [n for n in between(before, node) if contraction(n)])


def made_of(node: Node, inputs: list[Node]) -> list[Node]:
    """What lies between the inputs and the node."""
    above = reach([node], lambda n: [x for x in n.all_input_nodes if x not in inputs])
    return [n for n in above if n.op == "call_function"]


def inputs_of(terms: list[Term]) -> list[Node]:
    return [*(t.scores for t in terms), *(t.values for t in terms)]


def quotient(node: Node) -> list[Term] | None:
    """The terms of N, where `node` is N / D and both are made of the same exponentials."""
    sides = divided(node)
    if sides is None:
        return None
    try:
        products, sums = list(terms(sides[0], product)), list(terms(sides[1], total))
    except Other:
        return None
    if len(products) < 2 or len({t.exponents for t in (*products, *sums)}) > 1:
        return None
    pairs = Counter(t.made for t in products), Counter(t.made for t in sums)
    return products if pairs[0] == pairs[1] and max(pairs[0].values()) == 1 and one_equation(products) else None


def divided(node: Node) -> tuple[Node, Node] | None:
    """(x, y) of x / y or x * (1 / y), where y has one number for each row of x"""
    if op_name(node) not in ("div", "true_divide", "mul") or not plain(node):
        return None
    inverse = op_name(node) == "mul"
    for x, y in (node.args, node.args[::-1]) if inverse else (node.args,):
        if shape(y) == (*shape(x)[:-1], const(1)) and (not inverse or op_name(row(y)) == "reciprocal"):  # type: ignore[arg-type]
            return x, row(y).args[0] if inverse else y  # type: ignore[return-value]
    return None


class Other(Exception):
    """It is not made so."""


def terms(node: Any, leaf: Callable[[Node], Term | None], so_far: Counter[Node] | None = None) -> Iterator[Term]:
    """The terms of a sum, with the exponents of what each is multiplied by."""
    so_far = so_far or Counter()
    node, name = row(node), op_name(row(node))
    if name in ZEROS or (name == "mul" and 0 in node.args):
        return
    if (found := leaf(node)) is not None:
        exponents = Counter(dict(found.exponents))
        for n, times in so_far.items():
            exponents[n] += times
        yield replace(found, exponents=frozenset((n, c) for n, c in exponents.items() if c))
    elif (name == "add" or in_place(node, "add_")) and len(node.args) == 2 and not node.kwargs:
        for x in node.args:
            if x != 0:
                yield from terms(x, leaf, so_far)
    elif (name == "mul" or in_place(node, "mul_")) and (parted := factor(node)):
        exponents = Counter(so_far)
        for n, times in parted[1].items():
            exponents[n] += times
        yield from terms(parted[0], leaf, exponents)
    else:
        raise Other


def in_place(node: Node, name: str) -> bool:
    """Whether a node writes into what nothing else reads."""
    return op_name(node) == name and len(node.args[0].users) == 1  # type: ignore[union-attr]


def row(node: Any) -> Node:
    """A node without casts and without an axis of length 1 behind the others."""
    while isinstance(node, Node):
        last = op_name(node) in ("unsqueeze", "squeeze") and len(node.args) > 1 and trailing(node)
        if not last and op_name(node) not in CASTS:
            return node
        node = node.args[0]
    raise Other


def trailing(node: Node) -> bool:
    rank = max(len(shape(node)), len(shape(node.args[0])))
    return isinstance(node.args[1], int) and axis(node.args[1], rank) == rank - 1


def factor(node: Node) -> tuple[Node, Counter[Node]] | None:
    """(x, exponents of f) of x * f or f * x, where f is an exponential of rows and as long as x."""
    for x, f in (node.args, node.args[::-1]):
        if is_tensor(x) and is_tensor(f) and shape(x) == shape(node) and len(shape(f)) == len(shape(x)):  # type: ignore[arg-type]
            e = row(f)
            difference = row(e.args[0]) if op_name(e) == "exp" else e
            if op_name(difference) == "sub" and plain(difference):
                a, b = (row(finite(row(y))) for y in difference.args)
                counted = Counter({a: 1})
                counted[b] -= 1
                return x, counted  # type: ignore[return-value]
    return None


def plain(node: Node) -> bool:
    return len(node.args) == 2 and not node.kwargs and all(map(is_tensor, node.args))


def finite(m: Node) -> Node:
    """m of where(m == -inf, 0, m) and its like: where m is -inf, all its exponentials are 0 either way"""
    name = op_name(m)
    if name == "masked_fill" and tests(m.args[1], m.args[0]):
        return m.args[0]  # type: ignore[return-value]
    if name == "where" and len(m.args) == 3 and tests(m.args[0], m.args[2]):
        return m.args[2]  # type: ignore[return-value]
    return m


def tests(c: Any, m: Any) -> bool:
    """Whether `c` says that m is -inf."""
    if not isinstance(c, Node):
        return False
    equal = op_name(c) == "eq" and len(c.args) > 1 and c.args[1] == -INF
    return (equal or op_name(c) in ("isinf", "isneginf")) and c.args[0] is m


def exponential(node: Node) -> Term | None:
    """exp(s - m) for an m without an axis of keys"""
    while op_name(node) in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    shifted = node.args[0] if op_name(node) == "exp" else None
    if not isinstance(shifted, Node) or op_name(shifted) != "sub" or not plain(shifted):
        return None
    s, m = shifted.args
    aligned = (*shape(s)[:-1], const(1)) == shape(m)  # type: ignore[arg-type]
    return Term(node, s, frozenset({(finite(row(m)), -1)})) if aligned else None  # type: ignore[arg-type]


def product(node: Node) -> Term | None:
    """exp(s - m) V"""
    spec = contraction(node)
    if spec is None or spec.added is not None or spec.scale != Const(1.0):
        return None
    found, other = exponential(spec.left), spec.out_axes[-1:]
    own = other in spec.right_axes and other not in spec.left_axes and "." not in spec.right_axes
    whole = spec.out_axes == spec.left_axes[:-1] + other and spec.contracted == spec.left_axes[-1]
    return replace(found, spec=spec) if found and own and whole else None


def total(node: Node) -> Term | None:
    """sum_j exp(s_j - m)"""
    if op_name(node) != "sum" or not is_tensor(node.args[0]):
        return None
    dims, rank = argument(node, 1, "dim"), len(shape(node.args[0]))
    last = isinstance(dims, list | tuple) and [axis(d, rank) for d in dims] == [rank - 1]
    return exponential(node.args[0]) if last else None


def one_equation(found: list[Term]) -> bool:
    """Whether all products are alike but for the number of keys."""
    specs = [t.spec for t in found if t.spec is not None]
    kinds = {(s.left_axes, s.right_axes, s.out_axes, dtype(s.left), dtype(s.right)) for s in specs}
    return len(kinds) == 1 and len({dtype(t.made) for t in found}) == 1


def known_rows(module: GraphModule, found: list[Term]) -> bool:
    """Whether m is finite in every row: it begins at a number below all scores, or the first chunk has a key."""
    above = [x for n, _ in found[0].exponents for x in reach([n], maxima)]
    begins = [number(argument(x, FILL[op_name(x)], "fill_value")) for x in above if op_name(x) in FILL]
    if any(not isinstance(b, Const) or b.value > LEAST for b in begins):
        return False
    finite = bool(begins) and all(isinstance(b, Const) and b.value > -INF for b in begins)
    facts = Facts(module.graph)
    return finite or sees_keys(Lift(facts), min(found, key=lambda t: facts.position[t.made]))


FILL = {"full": 1, "full_like": 1, "new_full": 2}
"""Where a call has the number that it fills with."""


def maxima(node: Node) -> list[Node]:
    return node.all_input_nodes if op_name(node) in ("maximum", "max", "unsqueeze", "squeeze", *CASTS) else []


def sees_keys(lift: Lift, first: Term) -> bool:
    """Whether every query provably sees a key of these scores."""
    lengths = shape(first.scores)
    index = tuple(Var(f"i{n}", size) for n, size in enumerate(lengths))
    index = (*index[:-2], Var("q_idx", lengths[-2]), Var("kv_idx", lengths[-1]))
    try:
        masked = split(lift.lift(first.scores, index))
    except Decline:
        return False
    read = {x.tensor for x in parts(masked.score) if isinstance(x, Load)}
    seen = masked.fill != -INF or sees_a_key(masked.keep, index[-2], index[-1])
    return read <= set(lift.products) and seen


def together(node: Node, found: list[Term]) -> Callable[..., Tensor]:
    """scores, .., values, .. -> softmax(scores) values"""
    spec = found[0].spec
    assert spec is not None
    at, equation = spec.right_axes.index(spec.contracted), f"{spec.left_axes},{spec.right_axes}->{spec.out_axes}"
    weights, out = spec.left.meta["val"].dtype, node.meta["val"].dtype
    whole = found[0].made.meta["val"].dtype

    def product(*tensors: Tensor) -> Tensor:
        scores, values = tensors[: len(found)], tensors[len(found) :]
        p = torch.softmax(torch.cat(scores, -1).to(whole), -1).to(weights)
        return torch.einsum(equation, p, torch.cat(values, at)).to(out)

    return product
