"""From the mathematics found in a graph to a region and its binding: operands, canonical names, interior, layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusecomp.graph.facts import dtype, op_name, place, shape, size_expr, storage, value, written_arguments
from fusecomp.ir.algebra import ZERO, const
from fusecomp.ir.expr import Cast, Const, Expr, Load, Reduce, Score, Size, Var, parts, transform, variables
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product
from fusecomp.patterns.contraction import Contraction
from fusecomp.patterns.lift import Decline, Lift
from fusecomp.patterns.masks import Masked, sees_a_key, sees_nothing, split
from fusecomp.patterns.operands import operand
from fusecomp.patterns.weights import Weights

SizeSource = int | Node | tuple[Node, int]
"""A run-time length: a number, a node that is one, or an axis of a tensor node."""
HALF_OR_SINGLE = ("bfloat16", "float16", "float32")
MOST_D = 576


@dataclass(frozen=True)
class Found:
    """Weights times values at one product."""

    product: Node
    output: Node
    """The product, or the quotient that normalises it."""
    spec: Contraction
    axes: dict[str, Var]
    """The product's letters as indices."""
    weights: Weights

    def index(self, name: str) -> Var:
        return next(v for v in self.axes.values() if v.name == name)

    @property
    def out_axes(self) -> str:
        """The letters of O's axes; a query axis of length 1 is appended where the product has none."""
        return self.spec.out_axes + "".join(a for a, v in self.axes.items() if v.name == "q_idx" and a not in self.spec.out_axes)

    @property
    def batch(self) -> tuple[Var, ...]:
        return tuple(v for v in self.axes.values() if v.name not in ("q_idx", "kv_idx", "dv"))


@dataclass(frozen=True)
class Match:
    """A recognised attention, bound to its graph."""

    region: AttentionRegion
    output: Node
    """The node that holds O."""
    inputs: tuple[Node, ...]
    """The tensors the kernel reads, in the order of region.operands."""
    sizes: dict[str, SizeSource]
    """The value of each of region.sizes."""
    out_shape: tuple[SizeSource, ...]
    """Lengths of region.out_axes: O's shape, with an axis of length 1 at the end where O has no query axis."""
    interior: tuple[Node, ...]
    """Nodes on the way from the products to the output, in graph order: only they read each other."""
    path: frozenset[Node]
    """Every node whose value the region was read from, without inputs: what to run to get O from the inputs."""
    anchor: Node
    """The softmax or exponential that the candidate was found by."""


def build(lift: Lift, found: Found, anchor: Node) -> Match:
    """The region of what was found. Raises Decline with the reason why it is none."""
    scores = split(found.weights.scores)
    if any(isinstance(x, Reduce) for x in parts(scores.score)):
        raise Decline("each score depends on other keys through a reduction", anchor)
    if sees_nothing(scores.keep):
        raise Decline("no query sees any key", anchor)
    held = [scores.score, *scores.keep, found.weights.scores, found.weights.factor, found.weights.sink or ZERO]
    products = dict(score_products(lift, found, held))
    v = value_access(lift, found)
    names = operand_names(products.values(), v, held, set(products), lift)
    check_time(lift, names, found)
    interior = closed_interior(lift, [lift.reads[p.tensor].node for p in products], set(names), found.output)
    return bind(lift, found, scores, products, v, names, interior, anchor)


# ----------------------------------------------------------------------------------------------------------------
# Products and operands


@dataclass(frozen=True)
class Pair:
    """The two sides of one score product: which element of which tensor."""

    q: Load
    k: Load
    d: Var
    dtype: str


def score_products(lift: Lift, found: Found, held: list[Expr]) -> Iterator[tuple[Load, Pair]]:
    """The contractions in the scores that are Q K^T: one side runs over queries, the other over keys. Raises Decline."""
    loads = [x for x in parts(held[0]) if isinstance(x, Load) and x.tensor in lift.products]
    count = 0
    for load in sorted(loads, key=lambda x: lift.facts.position[lift.facts.names[x.tensor]]):
        pair = as_product(lift, found, load, count)
        if pair is not None:
            count += 1
            yield load, pair
    if not count:
        raise Decline("no product of queries and keys lies under the softmax", nearest(lift, loads, held[0]))


def nearest(lift: Lift, loads: list[Load], score: Expr) -> Node | None:
    """The node that stands where the scores should have come from."""
    names = [x.tensor for x in loads] or [x.tensor for x in parts(score) if isinstance(x, Load)]
    return lift.facts.names[names[0]] if names else None


def as_product(lift: Lift, found: Found, load: Load, count: int) -> Pair | None:
    """The sides of a contraction that is read at (.., q_idx, .., kv_idx, ..), or None."""
    node, spec = lift.facts.names[load.tensor], lift.products[load.tensor]
    if len(spec.contracted) != 1:
        return None
    at = dict(zip(spec.out_axes, load.index, strict=True))
    size = spec.size(spec.contracted)
    length = size.value if isinstance(size, Const) else specialised(spec, spec.contracted)
    d = Var("d" if count == 0 else f"d{count}", const(int(length)))
    at[spec.contracted] = d
    left, right = (side(at, axes) for axes in (spec.left_axes, spec.right_axes))
    rows = [{"q_idx", "kv_idx"} & set().union(*(variables(i) for i in index)) for index in (left, right)]
    if "kv_idx" in rows[0] and "q_idx" not in rows[0]:
        spec, left, right, rows = spec.swapped(), right, left, rows[::-1]
    if "kv_idx" in rows[0] or rows[1] != {"kv_idx"}:
        return None
    if d.size.value > MOST_D:  # type: ignore[attr-defined]
        raise Decline(f"head size {d.size} is above {MOST_D}", node)
    q_idx, kv_idx = found.index("q_idx"), found.index("kv_idx")
    place_of = lift.facts.position[node]
    q = operand(lift, spec.left, left, q_idx, d, place_of)
    k = operand(lift, spec.right, right, kv_idx, d, place_of)
    return Pair(q, k, d, product_dtype(dtype(node), q.dtype, k.dtype, node))


def side(at: dict[str, Expr], axes: str) -> tuple[Expr, ...]:
    return tuple(at.get(a, ZERO) for a in axes)


def specialised(spec: Contraction, letter: str) -> int:
    """A head size that is symbolic is fixed, with a guard: kernels are built for one head size."""
    for node, axes in ((spec.left, spec.left_axes), (spec.right, spec.right_axes)):
        if letter in axes:
            return int(value(node).shape[axes.index(letter)])
    raise KeyError(letter)


def product_dtype(computed: str, q: str, k: str, node: Node) -> str:
    """What the tensor cores multiply: the dtype of the graph's product, or the narrower one that both sides have."""
    if computed not in HALF_OR_SINGLE:
        raise Decline(f"products in {computed} have no kernel", node)
    return q if computed == "float32" and q == k and q in HALF_OR_SINGLE else computed


def value_access(lift: Lift, found: Found) -> Load:
    """Which element of which tensor V is. Raises Decline."""
    spec, dv = found.spec, found.index("dv")
    if dtype(found.product) not in HALF_OR_SINGLE:
        raise Decline(f"products in {dtype(found.product)} have no kernel", found.product)
    letter = next(a for a, v in found.axes.items() if v.name == "dv")
    size = dv.size.value if isinstance(dv.size, Const) else specialised(spec, letter)
    if size > MOST_D:
        raise Decline(f"value head size {size} is above {MOST_D}", found.product)
    fixed = Var("dv", const(int(size)))
    index = tuple(fixed if a == letter else found.axes.get(a, ZERO) for a in spec.right_axes)
    return operand(lift, spec.right, index, found.index("kv_idx"), fixed, lift.facts.position[found.product])


def operand_names(
    pairs: Iterator[Pair] | object, v: Load, held: list[Expr], products: set[Load], lift: Lift
) -> dict[str, str]:
    """FX name -> operand name: q, k, v, then load0, load1 ... in order of appearance."""
    names: dict[str, str] = {}
    for count, pair in enumerate(pairs):  # type: ignore[arg-type, var-annotated]
        suffix = "" if count == 0 else str(count)
        names.setdefault(pair.q.tensor, f"q{suffix}")
        names.setdefault(pair.k.tensor, f"k{suffix}")
    names.setdefault(v.tensor, "v")
    sides = [x for pair in pairs for x in (pair.q, pair.k)]  # type: ignore[attr-defined]
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


# ----------------------------------------------------------------------------------------------------------------
# Soundness: nothing else reads the scores, and nothing writes the operands meanwhile


def closed_interior(lift: Lift, products: list[Node], leaves: set[str], output: Node) -> tuple[Node, ...]:
    """The nodes between the products and the output. Raises Decline where something outside reads one of them."""
    position = lift.facts.position
    below = reach(products, lambda n: n.users)
    above = reach([output], lambda n: n.all_input_nodes)
    inside = [n for n in below if n in above and n is not output]
    for node in sorted(inside, key=position.__getitem__):
        if node.name in leaves:
            raise Decline(f"`{op_name(node)}` is not a pointwise function of the scores", node)
        outside = [u for u in node.users if u not in above or u not in below]
        if outside:
            what = "scores" if node in products else "weights or scores"
            raise Decline(f"the {what} are read elsewhere too, by `{op_name(outside[0]) or 'the output'}`", node,
                          "return them only where they are needed")  # fmt: skip
        if any(w not in below for w in written_arguments(node)):
            raise Decline("scores are written into a tensor made elsewhere", node)
    return tuple(sorted(inside, key=position.__getitem__))


def reach(start: list[Node], step: object) -> set[Node]:
    """Everything reachable from `start`, itself included."""
    seen, stack = set(start), list(start)
    while stack:
        for n in step(stack.pop()):  # type: ignore[operator]
            if n not in seen:
                seen.add(n)
                stack.append(n)
    return seen


def check_time(lift: Lift, names: dict[str, str], found: Found) -> None:
    """The kernel reads where the output stands: an operand overwritten since the graph read it would be another."""
    last = lift.facts.position[found.output]
    for name in names:
        read = lift.reads[name]
        if lift.facts.written_between(read.node, min(read.at, last) - 1, last):
            raise Decline("a tensor that the scores were read from is overwritten before the output", read.node)
        if storage(read.node) is None:
            raise Decline("an operand has no memory of its own", read.node)


# ----------------------------------------------------------------------------------------------------------------
# Canonical names


def bind(
    lift: Lift, found: Found, scores: Masked, products: dict[Load, Pair], v: Load, names: dict[str, str],
    interior: tuple[Node, ...], anchor: Node,
) -> Match:  # fmt: skip
    """Rename tensors and lengths, so that equal attentions make equal regions, and remember what each name is."""
    sizes = Lengths(lift, found, names, interior)
    score_of: dict[Expr, Expr] = {load: Score(t) for t, load in enumerate(products)}

    def named(e: Expr) -> Expr:
        e = transform(e, score_of.get)
        return transform(e, lambda x: renamed(x, names, sizes))

    def access(x: Load) -> Access:
        return Access(names[x.tensor], tuple(map(named, x.index)))

    blind = scores.fill != float("-inf") and not sees_a_key(scores.keep, found.index("q_idx"), found.index("kv_idx"))
    blind = blind and found.weights.sink is None
    v_named = named(Var("dv", const(int(found_dv(v)))))
    at = place(anchor)
    region = AttentionRegion(
        operands=tuple(Operand(to, tuple(map(named, shape(lift.reads[name].node))), dtype(lift.reads[name].node))
                       for name, to in names.items()),
        batch=tuple(named(b) for b in found.batch),  # type: ignore[arg-type, misc]
        q_idx=named(found.index("q_idx")),  # type: ignore[arg-type]
        kv_idx=named(found.index("kv_idx")),  # type: ignore[arg-type]
        products=tuple(Product(access(p.q), access(p.k), p.d, p.dtype) for p in products.values()),
        v=access(v),
        dv=v_named,  # type: ignore[arg-type]
        score=named(scores.score),
        keep=tuple(map(named, scores.keep)),
        filled_score=named(found.weights.scores) if blind else None,
        fill=scores.fill if blind else float("-inf"),
        weight=named(found.weights.factor),
        sink=named(found.weights.sink) if found.weights.sink is not None else None,
        empty_row=found.weights.empty_row,
        pv_dtype=dtype(found.product),
        out_dtype=dtype(found.output),
        out_axes=tuple(found.axes[a].name for a in found.out_axes),
        out_order=(*memory_order(found.output), *range(len(found.spec.out_axes), len(found.out_axes))),
        precision="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        origin=at.where,
        source=at.source,
    )  # fmt: skip
    known = {name: sizes.source(name) for name in region.sizes}
    out_shape = tuple(sizes.axis(found, a) for a in found.out_axes)
    nodes = tuple(lift.reads[name].node for name in names)
    path = frozenset({*lift.visited, *interior, found.output} - set(nodes))
    return Match(region, found.output, nodes, known, out_shape, interior, path, anchor)


def found_dv(v: Load) -> int:
    dv = next(x for i in v.index for x in parts(i) if isinstance(x, Var) and x.name == "dv")
    assert isinstance(dv.size, Const)
    return int(dv.size.value)


def renamed(x: Expr, names: dict[str, str], sizes: Lengths) -> Expr | None:
    """Tensors by operand name; batch, query and key lengths by their letter; other run-time lengths L0, L1 ..."""
    match x:
        case Var(name, _) if name in sizes.letters:
            return Var(name, Size(sizes.letters[name]))
        case Size():
            return sizes.rename(x)
        case Load(tensor, index, kind):
            return Load(names[tensor], tuple(transform(i, lambda y: renamed(y, names, sizes)) for i in index), kind)
    return None


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


def memory_order(output: Node) -> tuple[int, ...]:
    """The axes of O in the order that its reader wants in memory: that of a permutation which is then made contiguous."""
    rank = len(shape(output))
    plain = tuple(range(rank))
    orders = {permutation(u, rank) for u in output.users}
    if len(orders) != 1:
        return plain
    return orders.pop() or plain


def permutation(user: Node, rank: int) -> tuple[int, ...] | None:
    """The permutation that `user` applies, where all that happens to its result is to be made contiguous."""
    if op_name(user) not in ("transpose", "permute", "movedim", "swapaxes") or not user.users:
        return None
    if any(op_name(u) not in ("contiguous", "reshape", "clone", "flatten") for u in user.users):
        return None
    toy = user.target(torch.empty(tuple(range(2, 2 + rank)), device="meta"), *user.args[1:], **user.kwargs)  # type: ignore[operator]
    return tuple(n - 2 for n in toy.shape)


