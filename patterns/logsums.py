"""The log-sum-exp of the scores, where the program uses it beside the output: returned, in a loss, to merge parts.

    L = log sum_j exp(S_j)             torch.logsumexp(s, -1)
    L = m + log sum_j exp(S_j - m)     for any m that is the same for every key
    L = S_n - log softmax(S)_n         for any key n
    c L                                in logarithms to another base, as kernels keep it
    L = log(exp(t) + sum_j exp(S_j))   where the softmax has the sink t too

The kernel holds it anyway, so what only leads to it needs no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse, permutations

from torch.fx import Node

from fusecomp.graph.facts import is_tensor, op_name, reach, shape, storage, written_arguments
from fusecomp.graph.learning import cut, floats, learns
from fusecomp.ir.algebra import ZERO, apply, const
from fusecomp.ir.expr import Apply, Const, Expr, Var, variables
from fusecomp.patterns.exponentials import collected, log_of, reduces, terms_of, total_of
from fusecomp.patterns.lift import Decline, Lift, Outside
from fusecomp.patterns.products import Found
from fusecomp.patterns.weights import normalised


@dataclass(frozen=True)
class LogSum:
    """A node that holds the log-sum-exp of the scores."""

    node: Node
    axes: tuple[str, ...]
    """The region's axis that each of its dimensions is; "" for one of length 1 that is none."""
    factor: float = 1.0
    """How many times the natural logarithm it is."""
    readers: tuple[Node, ...] = ()
    """What reads it outside of the attention."""


def log_sum(lift: Lift, found: Found, node: Node) -> LogSum | None:
    """`node` as the log-sum-exp of the scores whose softmax the weights are; None where it is anything else."""
    if not is_tensor(node) or lift.facts.writes.get(storage(node) or -1):
        return None
    before = set(lift.visited)
    for axes in arrangements(found, shape(node)):
        try:
            if per := log_of_sum(lift.lift_at(node, node, tuple(v or ZERO for v in axes)), found):
                return LogSum(node, tuple(v.name if v else "" for v in axes), 1 / per)
        except (Decline, Outside):
            pass
        lift.visited = set(before)
    return None


def arrangements(found: Found, lengths: tuple[Expr, ...]) -> Iterator[tuple[Var | None, ...]]:
    """Which axis of the weights each dimension may be: of the same length, the axes' own order first."""
    read = variables(found.weights.scores)
    axes = [v for v in (*found.batch, found.index("q_idx")) if v.size != const(1) or v.name in read]
    for places in permutations(range(len(lengths)), len(axes)):
        chosen = dict(zip(places, axes, strict=True))
        fits = all(chosen[i].size == n if i in chosen else n == const(1) for i, n in enumerate(lengths))
        if fits:
            yield tuple(chosen.get(i) for i in range(len(lengths)))


def log_of_sum(e: Expr, found: Found) -> float | None:
    """The p for which exp(S - p e) are the weights' own softmax: p e = m + log sum_j exp(S_j - m), with the sink."""
    terms = collected(terms_of(e))
    logs = [(x, *log) for sign, x in terms if sign > 0 and (log := log_of(x)) is not None and reduces(x)]
    if len(logs) != 1:
        return None
    ((whole, total, per),) = logs
    shift = total_of([t for t in terms if t[1] is not whole])
    weights, key = found.weights, found.index("kv_idx")
    again = normalised(apply("exp", less(weights.scores, shift, per)), total, key)
    same = again is not None and again.scores == weights.scores and again.sink == weights.sink
    return per if same and again is not None and again.factor == Const(1.0) else None


def less(scores: Expr, m: Expr, per: float) -> Expr:
    """S - p m; (s - m) p where S = s p"""
    if m == ZERO_SHIFT:
        return scores
    match scores:
        case Apply("mul", (s, Const(c))) if c == per:
            return apply("mul", apply("sub", s, m), const(per))
    return apply("sub", scores, apply("mul", m, const(per)))


ZERO_SHIFT = total_of([])


# ----------------------------------------------------------------------------------------------------------------
# In the graph


MAXIMA = ("amax", "max")
"""A maximum is only ever subtracted again, whatever becomes of its gradient."""
MOST_BETWEEN = 16
"""Nodes between the scores and their log-sum-exp."""


def leading_to_sums(
    lift: Lift, found: Found, node: Node, readers: Sequence[Node], way: set[Node], sums: dict[Node, LogSum]
) -> bool:
    """Whether all that `readers` of a node want of the scores is their log-sum-exp: it is added to `sums`, and the
    nodes before it to `way`."""
    own = log_sum(lift, found, node)
    if own is not None:
        sums[node] = own
        return True
    between: set[Node] = set()
    queue = list(readers)
    while queue:
        n = queue.pop()
        if n in between or n in sums:
            continue
        between.add(n)
        if (whole := log_sum(lift, found, n)) is not None:
            sums[n] = whole
        elif not n.users or written_arguments(n) or len(between) > MOST_BETWEEN:
            return False
        else:
            queue += n.users
    way |= between
    return True


def with_readers(
    sums: dict[Node, LogSum], interior: Iterable[Node], shared: Container[Node]
) -> tuple[LogSum, ...]:  # fmt: skip
    """Each log-sum-exp with what reads it outside."""
    inside = set(interior)
    readers = {n: tuple(u for u in n.users if u not in inside and u not in shared) for n in sums}
    return tuple(replace(s, readers=readers[n]) for n, s in sums.items() if readers[n])


def check_shifts(interior: Iterable[Node], results: Iterable[Node]) -> None:
    """exp(S - m) / sum exp(S - m) and m + log sum exp(S - m) have no gradient by m, as long as m is detached wherever
    it stands, or nowhere."""
    ends = set(filter(learns, results))
    inside = {n for n in interior if floats(n)} | ends
    maxima = [n for n in inside if op_name(n) in MAXIMA]

    def ways(start: Iterable[Node], through: Callable[[Node], bool] = lambda _: True) -> set[Node]:
        return reach(start, lambda n: filter(through, inside.intersection(n.users)))

    stops = filter(cut, ways(maxima))
    if ways(filterfalse(cut, maxima), lambda n: not cut(n)) & ends and ways(stops) & ends:
        raise Decline("the maximum is detached in one place and not in another", maxima[0],
                      "detach it wherever it stands, or use torch.softmax and torch.logsumexp")  # fmt: skip
