"""The two products of an attention: which tensors are Q, K and V, and which element of each is read where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from fusecomp.graph.facts import dtype, value
from fusecomp.ir.algebra import TRUE, ZERO, apply, const
from fusecomp.ir.expr import Const, Expr, Load, Var, parts, variables
from fusecomp.patterns.contraction import Contraction
from fusecomp.patterns.lift import Decline, Lift
from fusecomp.patterns.operands import operand
from fusecomp.patterns.quantised import scaled_keys, scaled_values
from fusecomp.patterns.reasons import OTHER_DTYPE, no_scores
from fusecomp.patterns.weights import Weights

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
        rows = [a for a, v in self.axes.items() if v.name == "q_idx"]
        return self.spec.out_axes + "".join(a for a in rows if a not in self.spec.out_axes)

    @property
    def batch(self) -> tuple[Var, ...]:
        return tuple(v for v in self.axes.values() if v.name not in ("q_idx", "kv_idx", "dv"))


@dataclass(frozen=True)
class Pair:
    """The two sides of one score product: which element of which tensor."""

    q: Load
    k: Load
    d: Var
    dtype: str
    factor: Expr = Const(1.0)
    """Of the product: a scale of the keys."""


def score_products(lift: Lift, found: Found, held: list[Expr], anchor: Node) -> Iterator[tuple[Load, Pair]]:
    """The contractions in the scores that are Q K^T: one side over queries, the other over keys. Raises Decline."""
    loads = [x for x in parts(held[0]) if isinstance(x, Load) and x.tensor in lift.products]
    loads = [x for x in loads if "q_idx" in variables(x)] or loads  # a bias of each key is made once, outside
    count = 0
    for load in sorted(loads, key=lambda x: lift.facts.position[lift.facts.names[x.tensor]]):
        pair = as_product(lift, found, load, count) if reads_whole(lift, load) else None
        if pair is not None:
            count += 1
            yield load, pair
    if not count:
        shifted = [lift.facts.names[x.tensor] for x in loads if not reads_whole(lift, x)]
        raise Decline(MORE_KEYS, shifted[0]) if shifted else no_scores(lift, held[0], anchor)


MORE_KEYS = "the softmax runs over more keys than the product of queries and keys has"


def reads_whole(lift: Lift, load: Load) -> bool:
    """Whether a contraction is provably read inside itself; one that is not (a relative shift through padding, say) is
    computed outside, and its elements are loaded where the scores guard them."""
    spec = lift.products[load.tensor]
    at = zip(load.index, (spec.size(a) for a in spec.out_axes), strict=True)
    places = [(i, size) for i, size in at if variables(i) & {"q_idx", "kv_idx"}]
    return all((isinstance(i, Var) and i.size == size) or apply("lt", i, size) == TRUE for i, size in places)


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
    if "kv_idx" in rows[0] or "kv_idx" not in rows[1]:
        return None
    check_head(int(length), "head size", node)
    place_of = lift.facts.position[node]
    q = operand(lift, spec.left, left, d, place_of)
    k, factor = scaled_keys(lift, spec.right, right, d, place_of)
    if any("q_idx" in variables(e) for e in (*k.index, factor)):  # heads among the rows may share their keys
        return None
    return Pair(q, k, d, product_dtype(dtype(node), q.dtype, k.dtype, node), factor)


def check_head(size: int, what: str, node: Node) -> None:
    """Raise Decline where no kernel is made for heads so wide, or for empty ones."""
    if size > MOST_D:
        raise Decline(f"{what} {size} is above {MOST_D}", node, "split it, and add the products of the parts")
    if not size:
        raise Decline(f"{what} 0", node)


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
        raise Decline(f"products in {computed} have no kernel", node, OTHER_DTYPE)
    return q if computed == "float32" and q == k and q in HALF_OR_SINGLE else computed


def value_access(lift: Lift, found: Found, keep: tuple[Expr, ...]) -> tuple[Load, Expr]:
    """Which element of which tensor V is, and a factor of its weight. Keys outside `keep` have a weight of 0.
    Raises Decline."""
    spec, dv = found.spec, found.index("dv")
    if dtype(found.product) not in HALF_OR_SINGLE:
        raise Decline(f"products in {dtype(found.product)} have no kernel", found.product, OTHER_DTYPE)
    letter = next(a for a, v in found.axes.items() if v.name == "dv")
    size = dv.size.value if isinstance(dv.size, Const) else specialised(spec, letter)
    check_head(int(size), "value head size", found.product)
    fixed = Var("dv", const(int(size)))
    index = tuple(fixed if a == letter else found.axes.get(a, ZERO) for a in spec.right_axes)
    return scaled_values(lift, spec.right, index, fixed, lift.facts.position[found.product], keep)
