"""Where gradients stop inside of an attention: the kernel has those of the whole formula, and must be asked for fewer.

    p = softmax(q k^T).detach()    O = p v        dV = p^T dO, and q and k do not learn from it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from fusecomp.graph.facts import is_getitem, is_tensor, op_name, reach, written_arguments
from fusecomp.graph.learning import cut, floats, learns, records
from fusecomp.patterns.lift import Decline
from fusecomp.patterns.logsums import MAXIMA
from fusecomp.patterns.reasons import called


def stopped(
    products: Iterable[Node], interior: Sequence[Node], path: Iterable[Node], inputs: Iterable[Node],
    results: Sequence[Node],
) -> frozenset[Node]:  # fmt: skip
    """The inputs on all of whose ways to the results a stop lies; those on none of whose ways one does are not among
    them. Raises Decline where an input has ways of both kinds, or none that is known."""
    stops = [x for r in results if records(r) for x in stops_before(r, products, interior)]
    if not stops:
        return frozenset()
    inside = {n for n in (*path, *results) if op_name(n) not in MAXIMA and is_tensor(n) and floats(n)} | set(inputs)
    inside |= {n for x in inside if is_getitem(x) for n in x.all_input_nodes}  # of what `unbind` gives, one is read
    above = reach(results, lambda n: inside.intersection(n.all_input_nodes))
    open_ = reach(results, lambda n: {x for x in inside.intersection(n.all_input_nodes) if not cut(x)})
    behind = reach(filter(cut, above), lambda n: inside.intersection(n.all_input_nodes))
    learned = frozenset(filter(learns, inputs))
    unclear = any((n in open_) == (n in behind) for n in learned)
    if unclear or any(map(written_arguments, filter(cut, above))):  # what is written under no_grad learns on
        raise Decline(f"no gradient flows back through {called(stops[0])}, as it would through fused attention",
                      stops[0], "detach q, k and v, or the output; or put all of it under no_grad")  # fmt: skip
    return learned & behind


def stops_before(result: Node, products: Iterable[Node], interior: Sequence[Node]) -> list[Node]:
    """The nodes between the scores and a result through which no gradient flows. The maximum of a row, which shifts its
    scores, has none to lose."""
    inside = {n for n in interior if op_name(n) not in MAXIMA}
    scores = reach([n for n in products if n in inside], lambda n: inside.intersection(n.users))
    weights = reach([result], lambda n: inside.intersection(n.all_input_nodes))
    return [n for n in interior if cut(n) and n in scores and n in weights]
