"""Why a candidate is no attention, said of the operation that stands in the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Node

from fusecomp.graph.facts import is_getitem, op_name, reach, storage, written_arguments
from fusecomp.ir.algebra import substitute
from fusecomp.ir.expr import Expr, Load, Reduce, Var, parts, variables
from fusecomp.patterns.contraction import contraction
from fusecomp.patterns.lift import VIEWS, Decline, Lift, runs_over_keys

NO_SOFTMAX = "the left factor of the product is not a softmax over the axis that the product sums over"
AT_ONCE = "make all scores in one product and mask those outside the window: masked tiles are never visited"
A_ROW_EACH = (
    "give each sequence a row of its pages, table [B, pages], and read k = pool[table] with a mask past its length: "
    "pages behind the length are not read"
)
NOT_TIMES = "the weights are not a softmax of the scores times a factor"
ANOTHER_AXIS = "the softmax runs over another axis than the product of weights and values sums over"
NO_WEIGHTS = (NO_SOFTMAX, NOT_TIMES, ANOTHER_AXIS)
ON_ITS_OWN = "a score or weight may depend on its own query, key and position only: do this to q, k, v or the output"
SAME_AXIS = "normalise over the axis that the product with V sums over, the keys"
ONE_FACTOR = "multiply the softmax by what does not depend on the scores; other functions of it are not fused"
NEW_TENSOR = "write out of place: the kernel has no scores to write into"
BOTH_SIDES = "scores are a product of something with a query axis and something with a key axis"
OTHER_DTYPE = "products are taken in float32, bfloat16 or float16"
EACH_TIMES_V = "multiply each softmax by the values on its own, and combine the results"


def called(node: Node) -> str:
    """What a node calls, as the user would find it: `topk` for one of its results."""
    source = node.args[0] if is_getitem(node) and isinstance(node.args[0], Node) else node
    return f"`{op_name(source)}`" if op_name(source) else "the graph's output"


def no_weights(lift: Lift, e: Expr, key: Var, product: Node) -> Decline:
    """Why `e`, a function of `key`, is no softmax over it times a factor."""
    if (found := in_the_way(lift, e, "weights")) is not None:
        return found
    if not any(x.tensor in lift.products for x in loads(e)):
        return no_scores(lift, e, product)
    sums = [x for x in parts(e) if isinstance(x, Reduce) and x.op == "sum"]
    over_keys = [s for s in sums if normalises(s, e, key)]
    if len(over_keys) > 1:
        return Decline("the weights are made of more than one softmax", product, EACH_TIMES_V)
    if over_keys:
        return Decline(NOT_TIMES, product, ONE_FACTOR)
    if sums:
        return Decline(ANOTHER_AXIS, product, SAME_AXIS)
    if (adds := next(segments(product), None)) is not None:
        return Decline(f"the softmax runs over segments of a list, which {called(adds)} adds up", adds, A_ROW_EACH)
    return Decline(NO_SOFTMAX, product, SAME_AXIS)


def segments(product: Node) -> Iterator[Node]:
    """Where products of weights and values are added up by an index, behind pointwise operations."""
    below = reach([product], lambda n: () if n is not product and contraction(n) else n.users)
    return (n for n in below if op_name(n).removesuffix("_") in ("index_add", "scatter_add", "segment_reduce"))


def normalises(total: Reduce, e: Expr, key: Var) -> bool:
    """Whether `total` sums something over the keys that stands in `e` for each key."""
    if key.name in variables(total):
        return False
    here = substitute(total.body, {total.var: key})
    return bool({here, *here.args} & set(parts(e)))


def no_scores(lift: Lift, score: Expr, anchor: Node) -> Decline:
    """Why no product of queries and keys was found in `score`."""
    if (found := in_the_way(lift, score, "scores")) is not None:
        return found
    products = [lift.facts.names[x.tensor] for x in loads(score) if x.tensor in lift.products]
    for node in products:
        if under_scores(node.all_input_nodes):
            return Decline(f"{called(node)} mixes scores of different heads, queries or keys", node, ON_ITS_OWN)
    where = products[0] if products else anchor
    return Decline("no product of queries and keys lies under the softmax", where, BOTH_SIDES)


def in_the_way(lift: Lift, e: Expr, what: str) -> Decline | None:
    """The leaf of `e` that differs by key and was computed from scores."""
    for load in loads(e):
        node = lift.facts.names[load.tensor]
        scores = lift.products.get(load.tensor)
        if not runs_over_keys(load):
            continue
        if scores is None and (piece := first_piece(lift, node)) is not None:
            return Decline(f"{called(piece)} puts the scores together piece by piece in another tensor", piece, AT_ONCE)
        if not under_scores(node.all_input_nodes if scores is not None else [node]):
            continue
        writer = lift.facts.first_write(node, lift.facts.position[node], lift.reads[load.tensor].at)
        if writer is not None:
            return Decline(f"{called(writer)} writes into the {what} in place", writer, NEW_TENSOR)
        if scores is not None and what == "weights":
            return Decline(f"{called(node)} mixes weights of different heads, queries or keys", node, ON_ITS_OWN)
        if scores is None:
            return Decline(f"{called(node)} is not a pointwise function of the {what}", node, ON_ITS_OWN)
    return None


def first_piece(lift: Lift, node: Node) -> Node | None:
    """The first write of scores into the memory that `node` reads, where that was made blank: blocks of a band, say."""
    for memory in {storage(n) for n in (node, *node.all_input_nodes)} - {None}:
        maker = next(n for n in lift.facts.order if storage(n) == memory)
        for at in lift.facts.writes.get(memory, ()) if op_name(maker) in BLANK else ():  # type: ignore[arg-type]
            into = written_arguments(writer := lift.facts.order[at])
            if under_scores(n for n in writer.all_input_nodes if n not in into):
                return writer
    return None


BLANK = {"empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full"}


def loads(e: Expr) -> list[Load]:
    return [x for x in parts(e) if isinstance(x, Load)]


def under_scores(nodes: Iterable[Node]) -> bool:
    """Whether a product of two computed tensors lies above one of the nodes, with no other product between."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if (spec := contraction(node)) is None:
            stack += node.all_input_nodes
        elif not held(spec.left) and not held(spec.right):
            return True
    return False


def held(node: Node) -> bool:
    """Whether one side of a product is a matrix that the model holds: the product is a projection."""
    while op_name(node) in (*VIEWS, "to", "_to_copy", "type_as", "float") and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op != "call_function" and len(node.meta["val"].shape) < 3
