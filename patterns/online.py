"""A softmax that a loop makes chunk by chunk, with a maximum that runs along, as one softmax:

    N_c = N_(c-1) exp(m_(c-1) - m_c) + exp(s_c - m_c) V_c        N_C / D_C = softmax([s_1, .., s_C]) [V_1; ..; V_C]
    D_c = D_(c-1) exp(m_(c-1) - m_c) + sum_j exp(s_cj - m_c)

N and D are sums of terms, each times factors exp(a - b) of its rows; where every step divides, as FlashAttention 1
does, its own D_(c-1) stands before N_(c-1) / D_(c-1) and cancels. With what was subtracted from its scores, the
exponents of a term must add up to one and the same -m, and m must be known to be finite. The sums of the chunks may
also be stacked first, each with a maximum of its own; c ? exp(s - m) : 0 is the exponential of c ? s : -inf. All of it
may be in powers of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, is_tensor, op_name, reach, shape, storage
from fusecomp.graph.rewriting import Written, facts_of, movable, write
from fusecomp.ir.algebra import const
from fusecomp.ir.expr import Const
from fusecomp.patterns.contraction import Contraction, contraction
from fusecomp.patterns.exponentials import INF
from fusecomp.patterns.lift import argument, axis
from fusecomp.patterns.rows import (
    BASES,
    Other,
    Power,
    added,
    chosen,
    finite,
    known_rows,
    plain,
    power,
    powers,
    row,
    uncast,
)
from fusecomp.patterns.sums import between

ZEROS = ("zeros", "zeros_like", "new_zeros")


@dataclass(frozen=True)
class Term:
    """exp(scores - shift), times exponentials of rows: summed over the keys, or times values."""

    made: Node
    """The exponential."""
    scores: Node
    shift: Node
    per: float = 1.0
    """The natural logarithm of what is raised to it."""
    shown: tuple[Node, bool] | None = None
    """(c, b) where it is 0 unless c is b."""
    exponents: frozenset[tuple[Power, int]] = frozenset()
    """Of the rows, by how often they are added."""
    spec: Contraction | None = None

    @property
    def values(self) -> Node:
        assert self.spec is not None
        return self.spec.right


def at_once(module: GraphModule) -> Iterator[Written]:
    """Write out every such quotient, the last step's first: those of the steps before are part of it."""
    for node in reversed(list(module.graph.nodes)):
        found = quotient(node) if node.users else None
        if found is None or not known_rows(module, found):
            continue
        inputs = inputs_of(found)
        inside = made_of(node, inputs)
        if own(module, inside, node) and movable(module, inside, inputs, node):
            before = node.prev
            output = inline(node, together(node, found), inputs)
            yield write(node, output, [n for n in between(before, node) if contraction(n)])


def made_of(node: Node, inputs: list[Node]) -> list[Node]:
    """What lies between the inputs and the node."""
    above = reach([node], lambda n: [x for x in n.all_input_nodes if x not in inputs])
    return [n for n in above if n.op == "call_function"]


def own(module: GraphModule, inside: list[Node], node: Node) -> bool:
    """Whether nothing but what is inside has written into it."""
    facts, known = facts_of(module), set(inside)
    places = {p for n in known for p in facts.writes.get(storage(n), ())}  # type: ignore[arg-type]
    return all(facts.order[p] in known for p in places if p < facts.position[node])


def inputs_of(terms: list[Term]) -> list[Node]:
    return [*(t.scores for t in terms), *(t.values for t in terms), *(t.shown[0] for t in terms if t.shown)]


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


def terms(node: Any, leaf: Callable[[Node], Term | None], so_far: Counter[Power] | None = None) -> Iterator[Term]:
    """The terms of a sum, with the exponents of what each is multiplied by. A factor that is no exponential must be
    what the other one is divided by."""
    so_far = so_far or Counter()
    node, name = row(node), op_name(row(node))
    if name in ZEROS or (name == "mul" and any(map(nought, node.args))):
        return
    if (found := leaf(node)) is not None:
        exponents = added(so_far, Counter(dict(found.exponents)))
        yield replace(found, exponents=frozenset((n, c) for n, c in exponents.items() if c))
    elif (name == "add" or in_place(node, "add_")) and len(node.args) == 2 and not node.kwargs:
        for x in node.args:
            if x != 0:
                yield from terms(x, leaf, so_far)
    elif (name == "mul" or in_place(node, "mul_")) and (parted := factor(node)):
        yield from terms(parted[0], leaf, added(so_far, parted[1]))
    elif name == "mul" and (whole := undivided(node)):
        yield from terms(whole[0], leaf, added(so_far, whole[1]))
    elif name == "sum" and (pieces := stacked(node)):
        for x, more in pieces:
            yield from terms(x, leaf, added(so_far, more))
    else:
        raise Other


def nought(x: Any) -> bool:
    """Whether a factor is 0, where a loop begins."""
    return op_name(x) in ZEROS if isinstance(x, Node) else x == 0


def stacked(node: Node) -> list[tuple[Node, Counter[Power]]] | None:
    """x_c and the exponents of what each is times, in sum_c x_c exp(m_c - m), where x and m are stacked in front"""
    inner = row(node.args[0])
    if not in_front(node) or op_name(inner) != "mul" or not plain(inner):
        return None
    for x, f in (inner.args, inner.args[::-1]):
        e, parts = row(f), row(x)
        difference = row(e.args[0]) if op_name(e) in BASES else e
        if difference is not e and op_name(parts) == "stack" and op_name(difference) == "sub" and plain(difference):
            of, whole = map(row, difference.args)
            alike = shape(x) == shape(inner) and len(shape(f)) == len(shape(x)) and shape(e)[1:] == shape(of)[1:]  # type: ignore[arg-type]
            if alike and op_name(of) == "stack" and len(parts.args) + len(of.args) == 2:
                return [(a, power(e, row(b), whole)) for a, b in zip(parts.args[0], of.args[0], strict=True)]  # type: ignore[arg-type]
    return None


def in_front(node: Node) -> bool:
    """Whether a sum runs over the first axis, and drops it."""
    return list(argument(node, 1, "dim") or ()) == [0] and not argument(node, 2, "keepdim", False)


def in_place(node: Node, name: str) -> bool:
    """Whether a node writes into what nothing else reads."""
    return op_name(node) == name and len(node.args[0].users) == 1  # type: ignore[union-attr]


def factor(node: Node) -> tuple[Node, Counter[Power]] | None:
    """(x, exponents of f) of x * f or f * x, where f is an exponential of rows and as long as x."""
    for x, f in (node.args, node.args[::-1]):
        whole = is_tensor(x) and is_tensor(f) and shape(x) == shape(node) and len(shape(f)) == len(shape(x))  # type: ignore[arg-type]
        if whole and (found := powers(row(f))) is not None:
            return x, found  # type: ignore[return-value]
    return None


def undivided(node: Node) -> tuple[Node, Counter[Power]] | None:
    """(N, exponents of f) of (D f) (N / D), D and f of rows."""
    for x, f in (node.args, node.args[::-1]) if plain(node) else ():
        quotient = divided(row(x)) if shape(x) == shape(node) else None  # type: ignore[arg-type]
        for d, e in factors(row(f)) if quotient is not None else ():
            found = powers(e)
            if d is row(quotient[1]) and found is not None:  # type: ignore[index]
                return quotient[0], found  # type: ignore[index]
    return None


def factors(f: Node) -> Iterator[tuple[Node, Node]]:
    """Both orders of a product of two."""
    if op_name(f) == "mul" and plain(f):
        yield from (tuple(map(row, pair)) for pair in (f.args, f.args[::-1]))  # type: ignore[misc]


def exponential(node: Node) -> Term | None:
    """exp(s - m) for an m without an axis of keys, or 0 where a mask hides the key"""
    made = node = uncast(node)
    node, shown = chosen(made) or (made, None)
    shifted = node.args[0] if op_name(node := uncast(node)) in BASES else None
    if not isinstance(shifted, Node) or op_name(shifted) != "sub" or not plain(shifted):
        return None
    s, m = shifted.args
    aligned = (*shape(s)[:-1], const(1)) == shape(m) and shape(s) == shape(made)  # type: ignore[arg-type]
    shift = finite(row(m))
    counted = frozenset({((op_name(node), shift), -1)})
    return Term(made, s, shift, BASES[op_name(node)], shown, counted) if aligned else None  # type: ignore[arg-type]


def product(node: Node) -> Term | None:
    """exp(s - m) V"""
    spec = contraction(node)
    if spec is None or spec.added is not None or spec.scale != Const(1.0):
        return None
    return weighed(spec) or weighed(spec.swapped())


def weighed(spec: Contraction) -> Term | None:
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
    """Whether all products are alike but for the number of keys, and for axes along which some values are the same."""
    specs, axes = [t.spec for t in found if t.spec is not None], fullest(found).right_axes
    kinds = {(s.left_axes, s.contracted, s.out_axes, dtype(s.left), dtype(s.right)) for s in specs}
    alike = all(s.right_axes == axes or set(s.right_axes) < set(axes) for s in specs)
    return alike and len(kinds) == 1 and len({dtype(t.made) for t in found}) == 1


def fullest(found: list[Term]) -> Contraction:
    """The product whose values have the most axes."""
    return max((t.spec for t in found if t.spec is not None), key=lambda s: len(s.right_axes))


def spread(x: Tensor, own: str, axes: str, lengths: dict[str, Any]) -> Tensor:
    """x with the axes of the others, the same along those that are not its own."""
    if own == axes:
        return x
    x = x.permute([own.index(a) for a in axes if a in own])
    for n, a in enumerate(axes):
        x = x if a in own else x.unsqueeze(n)
    return x.expand([x.shape[n] if a in own else lengths[a] for n, a in enumerate(axes)])


def hidden(t: Term, known: Mapping[Node, Tensor]) -> Tensor:
    """The scores in natural logarithms, -inf where the exponentials are 0."""
    s = known[t.scores] if t.per == 1 else known[t.scores] * t.per
    if t.shown is None:
        return s
    c, seen = t.shown
    return s.masked_fill(~known[c] if seen else known[c], -INF)


def together(node: Node, found: list[Term]) -> Callable[..., Tensor]:
    """scores, .., values, .. -> softmax(scores) values"""
    spec, own = fullest(found), [t.spec.right_axes for t in found if t.spec is not None]
    at, equation = spec.right_axes.index(spec.contracted), f"{spec.left_axes},{spec.right_axes}->{spec.out_axes}"
    weights, out = spec.left.meta["val"].dtype, node.meta["val"].dtype
    whole = found[0].made.meta["val"].dtype

    def product(*tensors: Tensor) -> Tensor:
        known = dict(zip(inputs_of(found), tensors, strict=True))
        values, scores = [known[t.values] for t in found], [hidden(t, known) for t in found]
        p = torch.softmax(torch.cat(scores, -1).to(whole), -1).to(weights)
        most = values[own.index(spec.right_axes)]
        lengths = dict(zip(spec.right_axes, most.shape, strict=True))
        alike = [spread(x, a, spec.right_axes, lengths) for x, a in zip(values, own, strict=True)]
        return torch.einsum(equation, p, torch.cat(alike, at)).to(out)

    return product
