"""Canonical names of operands and lengths, and the order of O in memory: equal attentions make equal regions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch.fx import Node

from fusecomp.graph.facts import dtype, label, op_name, shape, size_expr, value
from fusecomp.graph.rewriting import stood_for
from fusecomp.ir.algebra import ZERO, const, draws, substitute
from fusecomp.ir.expr import Apply, Cast, Const, Expr, Load, Size, Var, kind, transform
from fusecomp.ir.region import Access, AttentionRegion, Operand
from fusecomp.ir.widths import in_64_bits, place_in_64_bits, widened
from fusecomp.patterns.lift import Decline, Lift
from fusecomp.patterns.masks import oriented
from fusecomp.patterns.products import Found, Pair

SizeSource: TypeAlias = "int | Node | tuple[Node, int]"
"""A run-time length: a number, a node that is one, or an axis of a tensor node."""


def operand_names(pairs: Sequence[Pair], v: Load, held: Sequence[Expr], products: set[Load]) -> dict[str, str]:
    """FX name -> operand name: q, k, v, then seed, seed1 ... of dropouts, load0, load1 ... in order of appearance."""
    names: dict[str, str] = {}
    for count, pair in enumerate(pairs):
        suffix = "" if count == 0 else str(count)
        names.setdefault(pair.q.tensor, f"q{suffix}")
        names.setdefault(pair.k.tensor, f"k{suffix}")
    names.setdefault(v.tensor, "v")
    seeds = [x.tensor for e in held for word in draws(e) for x in ordered_loads(word.operands[0])]
    names |= {seed: f"seed{i or ''}" for i, seed in enumerate(dict.fromkeys(seeds))}
    sides = [x for pair in pairs for x in (pair.q, pair.k)]
    for e in [*held, *(i for x in [*sides, v] for i in x.index)]:
        for x in ordered_loads(e):
            if x not in products and x.tensor not in names:
                names[x.tensor] = f"load{sum(n.startswith('load') for n in names.values())}"
    return names


def ordered_loads(e: Expr) -> Iterator[Load]:
    """Loads of `e` in the order in which they are written."""
    seen: set[Expr] = set()

    def walk(x: Expr) -> Iterator[Load]:
        if x in seen:
            return
        seen.add(x)
        for a in x.args:
            yield from walk(a)
        if isinstance(x, Load):
            yield x

    yield from walk(e)


def values(e: Expr) -> Iterator[Expr]:
    """The parts of `e` that its value is computed of: not the places at which it reads."""
    yield e
    for x in () if isinstance(e, Load) else e.args:
        yield from values(x)


@dataclass(frozen=True)
class Naming:
    """A graph's expressions in the words of its region."""

    lift: Lift
    names: dict[str, str]
    """FX name -> operand name."""
    sizes: Lengths
    products: dict[Expr, Expr]
    """A product of Q and K -> the score that it is."""

    def expr(self, e: Expr) -> Expr:
        return self._named(in_64_bits(e))

    def _named(self, e: Expr) -> Expr:
        return oriented(transform(transform(self._widened(e), self.products.get), self._renamed))

    def _widened(self, e: Expr) -> Expr:
        """The products in which a number of 32 bits may pass 2^31, as the graph has it: in int64."""

        def factor(x: Expr) -> Expr:
            narrow = (y for y in values(x) if isinstance(y, Load) and y.dtype != "int64")
            return widened(x) if any(y.tensor in self.lift.widened for y in narrow) else x

        def rule(x: Expr) -> Expr | None:
            match x:
                case Apply("mul", factors) if kind(x) == "int":
                    return Apply("mul", tuple(factor(transform(f, rule)) for f in factors))
            return None

        return transform(e, rule) if self.lift.widened else e

    def _renamed(self, x: Expr) -> Expr | None:
        """Tensors by operand name; batch, query and key lengths by their letter; other run-time lengths L0, L1 ..."""
        match x:
            case Var(name, _) if name in self.sizes.letters:
                return Var(name, Size(self.sizes.letters[name]))
            case Size():
                return self.sizes.rename(x)
            case Load(tensor, index, kind):
                lengths = shape(self.lift.reads[tensor].node)
                return Load(self.names[tensor], tuple(map(self._place, index, lengths)), kind)
        return None

    def _place(self, i: Expr, length: Expr) -> Expr:
        """x[.., q_idx + 1, ..] = x[.., 1, ..] of one query, and x[.., q_idx, ..] = x[.., 0, ..] where the axis has
        length 1: what one query reads does not vary with it."""
        q_idx = self.sizes.found.index("q_idx")
        alone = q_idx.size == const(1) or (length == const(1) and i == q_idx)
        i = place_in_64_bits(substitute(i, {q_idx: ZERO}) if alone else i)
        return transform(self._widened(i), self._renamed)

    def index(self, v: Var) -> Var:
        named = self.expr(v)
        assert isinstance(named, Var)
        return named

    def access(self, x: Load) -> Access:
        return Access(self.names[x.tensor], tuple(self._named(place_in_64_bits(i)) for i in x.index))

    def operands(self) -> tuple[Operand, ...]:
        nodes = {to: self.lift.reads[name].node for name, to in self.names.items()}
        return tuple(Operand(to, tuple(map(self._named, shape(n))), dtype(n), label(n)) for to, n in nodes.items())


class Lengths:
    """Which run-time length is which: letters for the region's axes, and where to read each."""

    def __init__(self, lift: Lift, found: Found, names: dict[str, str], interior: tuple[Node, ...]) -> None:
        self.lift, self.found, self.names, self.interior = lift, found, names, frozenset(interior)
        self.letters = {v.name: v.name.upper() for v in found.batch} | {"q_idx": "M", "kv_idx": "N"}
        self.sources: dict[str, SizeSource] = {}
        self.known: dict[Expr, str] = {}
        for letter, v in found.axes.items():
            if v.name in self.letters:
                name = self.letters[v.name]
                self.sources[name] = self.axis(found, letter)
                if isinstance(v.size, Size):
                    self.known.setdefault(v.size, name)

    def axis(self, found: Found, letter: str) -> SizeSource:
        """The length of one of the product's letters."""
        return self.find(found.spec.size(letter))

    def rename(self, size: Size) -> Expr:
        """A symbol of the shape environment as a length of the region."""
        if size in self.known.values() or size.name in self.sources:
            return size
        if size not in self.known:
            name = f"L{sum(n.startswith('L') for n in self.sources)}"
            self.known[size] = name
            self.sources[name] = self.find(size)
        return Size(self.known[size])

    def find(self, size: Expr) -> SizeSource:
        """Where a length can be read without keeping the scores alive: off an operand, or off what was there before."""
        if isinstance(size, Const):
            return int(size.value)
        held = [self.lift.reads[n].node for n in self.names]
        for node in [*held, *self.lift.facts.graph.nodes]:
            if node is self.found.output:
                break
            if isinstance(value(node), torch.SymInt) and size_expr(value(node)) in (size, Cast(size, "int64")):
                return node
            if isinstance(value(node), torch.Tensor) and node not in self.interior and size in (s := shape(node)):
                return (node, s.index(size))
        raise Decline(f"the length {size} can be read off no tensor")

    def source(self, name: str) -> SizeSource:
        return self.sources[name]


def alike(region: AttentionRegion, sizes: Lengths) -> AttentionRegion:
    """The region with how many heads read the same K and V, where that is a number: those of the last batch axis."""
    last = region.batch[-1].name if region.batch else ""
    number = sizes.sources.get(sizes.letters.get(last, ""), 1)
    return replace(region, alike=number) if last in region.kv_shared_by() and isinstance(number, int) else region


def memory_order(output: Node) -> tuple[int, ...]:
    """The axes of O as they lie in memory: as its reader wants them, a permutation that is then made contiguous, or as
    the program has them, which a view of O may count on."""
    orders = {permutation(u, len(shape(output))) for u in output.users}
    wanted = orders.pop() if len(orders) == 1 else None
    return wanted or as_it_lies(value(stood_for(output)[-1]), len(shape(output)))


def as_it_lies(x: torch.Tensor, rank: int) -> tuple[int, ...]:
    """The axes of a tensor, those of the longest strides first."""
    strides = [n if isinstance(n, int) else n.node.hint for n in x.stride()]
    plain = range(rank)
    return tuple(sorted(plain, key=lambda i: -strides[i]) if x.dim() == rank and None not in strides else plain)


def permutation(user: Node, rank: int) -> tuple[int, ...] | None:
    """The permutation that `user` applies, where all that happens to its result is to be made contiguous."""
    if op_name(user) not in ("transpose", "permute", "movedim", "swapaxes") or not user.users:
        return None
    if any(op_name(u) not in ("contiguous", "reshape", "clone", "flatten") for u in user.users):
        return None
    toy = user.target(torch.empty(tuple(range(2, 2 + rank)), device="meta"), *user.args[1:], **user.kwargs)  # type: ignore[operator]
    return tuple(n - 2 for n in toy.shape)
