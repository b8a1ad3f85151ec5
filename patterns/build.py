"""From the mathematics found in a graph to a region and its binding: what it reads and replaces, whether it may."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fusecomp.graph.facts import dtype, op_name, place, reach, storage, written_arguments
from fusecomp.graph.learning import cut, learns, records
from fusecomp.ir.algebra import ZERO, apply, const
from fusecomp.ir.expr import Const, Expr, Largest, Load, Reduce, Score, Var, parts, variables
from fusecomp.ir.region import AttentionRegion, Operand, Product
from fusecomp.patterns import dropout
from fusecomp.patterns.lift import Decline, Lift, Outside
from fusecomp.patterns.logsums import MAXIMA, LogSum, check_shifts, leading_to_sums, with_readers
from fusecomp.patterns.masks import Masked, check_safe, sees_a_key, sees_nothing, split, sure, without_scores
from fusecomp.patterns.naming import Lengths, Naming, SizeSource, alike, memory_order, operand_names
from fusecomp.patterns.products import Found, Pair, score_products, value_access
from fusecomp.patterns.reasons import NEW_TENSOR, ON_ITS_OWN, ONE_FACTOR, called
from fusecomp.patterns.stops import stopped
from fusecomp.patterns.weights import ADRIFT, OTHER_ZEROS, Weights


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
    sums: tuple[LogSum, ...] = ()
    """Nodes that hold the log-sum-exp of the scores, and that something outside reads."""
    reader: Node | None = None
    """What reads a log-sum-exp before the output is due: the kernel must then be called before it."""
    stopped: frozenset[str] = frozenset()
    """Operands that learn, but not from this: no gradient flows back to them."""

    @property
    def place(self) -> Node:
        """The node that the kernel is called before."""
        return self.reader or self.output

    @property
    def device(self) -> torch.device:
        """Where O is, and what kernel makes it depends on."""
        return self.output.meta["val"].device  # type: ignore[no-any-return]

    @property
    def learned(self) -> frozenset[str]:
        """The operands whose gradient will be asked for: none under no_grad."""
        wanted = {o.name for o, n in self.operands if learns(n) and n.meta["val"].is_floating_point()}
        return frozenset(wanted - self.stopped) if records(self.output) else frozenset()

    @property
    def operands(self) -> tuple[tuple[Operand, Node], ...]:
        """Each operand of the region, and the node that holds it."""
        return tuple(zip(self.region.operands, self.inputs, strict=True))


def build(lift: Lift, found: Found, anchor: Node, shared: Container[Node] = ()) -> Match:
    """The region of what was found. Raises Decline with the reason why it is none, Outside where a sum stands in the
    scores: of a projection of the queries, say, in a gate on the bias. Nodes in `shared` may read the scores too."""
    scores = split(found.weights.scores)
    for total in (x for x in parts(scores.score) if isinstance(x, Reduce)):
        if total in lift.reductions:
            raise Outside(lift.reductions[total])
        raise Decline("each score depends on others through a reduction", anchor, ON_ITS_OWN)
    if sees_nothing(scores.keep):
        raise Decline("no query sees any key", anchor, "look at the sense of the mask")
    dropout.check(found.weights, found.index("kv_idx"), anchor)
    held = [scores.score, *scores.keep, found.weights.scores, found.weights.factor, found.weights.sink or ZERO]
    products = dict(score_products(lift, found, held, anchor))
    before, scores = scores, without_scores(scores, found.weights.scores, products)
    if scores != before and scores.fill == float("-inf") == before.fill and learns(found.output):
        raise Decline("it is trained, and its mask asks for the scores, by which it may hide every key", anchor,
                      "fill with a finite number, such as -1e9")  # fmt: skip
    check_free(found.weights, products, found.index("kv_idx").name)
    v, factor = value_access(lift, found, scores.keep if scores.fill == float("-inf") else ())
    found = replace(found, weights=found.weights.times(factor))
    held += [factor, *(p.factor for p in products.values())]
    names = operand_names(list(products.values()), v, held, set(products))
    made = [lift.reads[p.tensor].node for p in products]
    interior, sums = closed_interior(lift, made, set(names), found, shared)
    early = first_reader(lift, found.output, sums)
    check_time(lift, names, found, early)
    check_shifts(interior, [found.output, *(s.node for s in sums)])
    check_largest(found, scores, interior, sums)
    match = bind(lift, found, scores, products, v, names, interior, anchor)
    check_safe(match.region, sums)
    match = with_sums(lift, match, sums, early) if sums else match
    results = [found.output, *(s.node for s in sums if learns(s.node))]
    still = stopped(made, interior, match.path, match.inputs, results)
    return replace(match, stopped=frozenset(o.name for o, n in match.operands if n in still))


def check_free(weights: Weights, products: dict[Load, Pair], key: str) -> None:
    """Neither the factor nor the sink may depend on the scores, nor the sink on the key. Raises Decline."""
    if any(x in products for x in parts(weights.factor)):
        raise Decline("the weights are multiplied by something that depends on the scores", advice=ONE_FACTOR)
    if weights.sink is not None and (key in variables(weights.sink) or any(x in products for x in parts(weights.sink))):
        raise Decline("the normaliser adds something that depends on the scores or differs by key",
                      advice="add the exponential of a number, or of a logit for each head or query")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# Soundness: nothing else reads the scores, and nothing writes the operands meanwhile


class ReadElsewhere(Decline):
    """Something outside of the attention reads its scores or weights."""


def closed_interior(
    lift: Lift, products: list[Node], leaves: set[str], found: Found, shared: Container[Node]
) -> tuple[tuple[Node, ...], tuple[LogSum, ...]]:
    """The nodes between the products and the output, and the log-sum-exps that others read. Raises Decline where
    something outside, and not in `shared`, needs another of them."""
    position, output = lift.facts.position, found.output
    first, last = min(map(position.__getitem__, products)), position[output]
    below = reach(products, lambda n: (u for u in n.users if position[u] <= last))
    above = reach([output], lambda n: (x for x in n.all_input_nodes if position[x] >= first))
    inside = {n for n in below if n in above and n is not output}
    way, sums = set(inside), dict[Node, LogSum]()
    for node in sorted(inside, key=position.__getitem__):
        if node.name in leaves:
            raise Decline(f"{called(node)} is not a pointwise function of the scores", node, ON_ITS_OWN)
        outside = [u for u in node.users if (u not in above or u not in below) and u not in shared]
        if outside and not leading_to_sums(lift, found, node, outside, way, sums):
            what = "scores" if node in products else "weights or scores"
            raise ReadElsewhere(f"the {what} are read elsewhere too, by {called(outside[0])}", node,
                                USE_ONCE if op_name(outside[0]) else RETURN_LESS)  # fmt: skip
        if any(w not in below for w in written_arguments(node)):
            raise Decline("scores are written into a tensor made elsewhere", node, NEW_TENSOR)
    if any(w not in below for w in written_arguments(output)):
        raise Decline("the result is written into a tensor made elsewhere", output, "let the product make its own")
    interior = tuple(sorted(way, key=position.__getitem__))
    return interior, with_readers(sums, (*interior, output), shared)


USE_ONCE = (
    "a kernel never holds them: take from them one product with values, and their log-sum-exp over the keys (masked "
    "and scaled as the softmax sees them)"
)
RETURN_LESS = (
    "return them only where they are needed; a graph break while a variable still holds them makes them an output too"
)


def first_reader(lift: Lift, output: Node, sums: Iterable[LogSum]) -> Node | None:
    """What reads a log-sum-exp before the output is due. Raises Decline where the kernel cannot run there."""
    position = lift.facts.position
    early = min((u for s in sums for u in s.readers), key=position.__getitem__, default=output)
    if position[early] >= position[output]:
        return None
    if records(early) != records(output):
        raise Decline(f"{called(early)} reads the log-sum-exp before the output is due, where gradients are recorded "
                      "otherwise", early, AFTERWARDS)  # fmt: skip
    return early


AFTERWARDS = "use it after the product with V"


def with_sums(lift: Lift, match: Match, sums: tuple[LogSum, ...], early: Node | None) -> Match:
    """The match whose kernel gives the log-sum-exp too. Raises Decline where it is read too early."""
    position = lift.facts.position
    lengths = (s[0] if isinstance(s, tuple) else s for s in (*match.sizes.values(), *match.out_shape))
    for node in (*match.inputs, *(n for n in lengths if isinstance(n, Node))):
        if early is not None and position[node] >= position[early]:
            raise Decline(f"{called(early)} reads the log-sum-exp before {called(node)} has made what the output needs",
                          early, AFTERWARDS)  # fmt: skip
    return replace(match, region=replace(match.region, lse=True), sums=sums, reader=early)


def check_time(lift: Lift, names: dict[str, str], found: Found, early: Node | None) -> None:
    """The kernel reads where the output stands, or `early`: an operand must be then what it was to the graph."""
    last = lift.facts.position[found.output]
    start = lift.facts.position[early] if early is not None else last
    for name in names:
        read = lift.reads[name]
        writer = lift.facts.first_write(read.node, min(read.at, start) - 1, last)
        if writer is not None:
            reason = f"{called(writer)} overwrites an operand between its use in the scores and the output"
            raise Decline(reason, writer, "write after the attention, or give it a copy")
        if storage(read.node) is None:
            raise Decline("an operand has no memory of its own", read.node)
        changed = lift.facts.first_write(read.node, lift.facts.position[read.node], read.at)
        if changed is not None and read.node in lift.visited:
            raise Decline(f"{called(changed)} writes a tensor that is read before and after", changed,
                          "give one of the reads a copy")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# The region, in canonical names


def bind(
    lift: Lift, found: Found, scores: Masked, products: dict[Load, Pair], v: Load, names: dict[str, str],
    interior: tuple[Node, ...], anchor: Node,
) -> Match:  # fmt: skip
    """Rename tensors and lengths, so that equal attentions make equal regions, and remember what each name is."""
    sizes = Lengths(lift, found, names, interior)
    of_products: dict[Expr, Expr] = {x: apply("mul", Score(t), p.factor) for t, (x, p) in enumerate(products.items())}
    named = Naming(lift, names, sizes, of_products)
    region = alike(sure(region_of(found, scores, list(products.values()), v, named, anchor)), sizes)
    known = {name: sizes.source(name) for name in region.sizes}
    out_shape = tuple(sizes.axis(found, a) for a in found.out_axes)
    nodes = tuple(lift.reads[name].node for name in names)
    path = frozenset({*lift.visited, *interior, found.output} - set(nodes))
    return Match(region, found.output, nodes, known, out_shape, interior, path, anchor)


def region_of(
    found: Found, scores: Masked, pairs: list[Pair], v: Load, named: Naming, anchor: Node
) -> AttentionRegion:
    """The mathematics, field by field."""
    weights, blind, at = found.weights, filled_rows(found, scores, anchor), place(anchor)
    return AttentionRegion(
        operands=named.operands(),
        batch=tuple(map(named.index, found.batch)),
        q_idx=named.index(found.index("q_idx")),
        kv_idx=named.index(found.index("kv_idx")),
        products=tuple(Product(named.access(p.q), named.access(p.k), p.d, p.dtype) for p in pairs),
        v=named.access(v),
        dv=Var("dv", const(found_dv(v))),
        score=named.expr(scores.score),
        keep=tuple(map(named.expr, scores.keep)),
        filled_score=named.expr(weights.scores) if blind else None,
        fill=scores.fill if blind else float("-inf"),
        subtracted=blind and weights.subtracted,
        weight=named.expr(weights.factor),
        sink=named.expr(weights.sink) if weights.sink is not None else None,
        empty_row=weights.empty_row,
        pv_dtype=dtype(found.product),
        out_dtype=dtype(found.output),
        out_axes=tuple(found.axes[a].name for a in found.out_axes),
        out_order=(*memory_order(found.output), *range(len(found.spec.out_axes), len(found.out_axes))),
        precision="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        origin=at.where,
        source=at.source,
    )


def filled_rows(found: Found, scores: Masked, anchor: Node) -> bool:
    """Whether a query may see no key, and then weighs the filled scores. Raises Decline where no kernel does as it."""
    finite = scores.fill != float("-inf")
    if not (finite or found.weights.zeroed) or sees_a_key(scores.keep, found.index("q_idx"), found.index("kv_idx")):
        return False
    if found.weights.zeroed:
        raise Decline(OTHER_ZEROS, anchor, "zero the output, or fill the weights where the scores are filled")
    blind = finite and found.weights.sink is None
    if blind and found.weights.adrift:
        raise Decline(ADRIFT, anchor, "subtract each row's own maximum, or fill with -inf")
    if blind and found.weights.subtracted and learns(found.output):
        raise Decline(f"it is trained, and a query that sees no key loses the logarithm of the sum in {scores.fill:g}",
                      anchor, "use softmax or log_softmax, or fill with -inf")  # fmt: skip
    return blind


BESIDE = "the normaliser adds a number to exponentials that were shifted by their maximum"
BY_SHIFT = "add it times exp(-m), m being the maximum: that is softmax beside a logit; or detach m"


def check_largest(found: Found, scores: Masked, interior: tuple[Node, ...], sums: tuple[LogSum, ...]) -> None:
    """Raise Decline where a sink that is told by the row's largest score has more of a meaning than the kernel's."""
    if found.weights.sink is None or not any(isinstance(x, Largest) for x in parts(found.weights.sink)):
        return
    finite = scores.keep and scores.fill != float("-inf")
    if sums or (finite and not sees_a_key(scores.keep, found.index("q_idx"), found.index("kv_idx"))):
        raise Decline(f"{BESIDE}, and {'its logarithm is read' if sums else 'a query may see no key'}", advice=BY_SHIFT)
    inside = {*interior, found.output}
    largest = [n for n in interior if op_name(n) in MAXIMA and learns(n) and not cut(n)]
    open_ = reach(largest, lambda n: {u for u in inside.intersection(n.users) if not cut(u)})
    if learns(found.output) and found.output in open_:
        raise Decline(f"{BESIDE}, and its gradient flows through the maximum too", largest[0], BY_SHIFT)


def found_dv(v: Load) -> int:
    dv = next(x for i in v.index for x in parts(i) if isinstance(x, Var) and x.name == "dv")
    assert isinstance(dv.size, Const)
    return int(dv.size.value)
