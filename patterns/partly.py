"""Writes into a part of scores or weights, as choices by place:

    s[.., a:b] = c,  then f(s)        f(c where a <= n < b, else s)
    s[:, h] += x,    then f(s)        f(s + x where the head is h, else s)

Exact: what is chosen is computed from the same numbers. The choice stands where the write stood, and whatever reads the
whole afterwards reads it; what read it before is left as it is. Scores that are put together from pieces in this way
are no function of one score, and stay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import dtype, is_tensor, op_name, reach, size_expr, storage, value, written_arguments
from fusecomp.graph.learning import learns, records
from fusecomp.graph.rewriting import Written, erased, facts_of, write_over
from fusecomp.patterns.contraction import contraction
from fusecomp.patterns.folding import ANCHORS
from fusecomp.patterns.lift import argument, axis
from fusecomp.patterns.reasons import BLANK

OUTSIDE = {"fill_": 0, "zero_": 0, "copy_": 0, "masked_fill_": 0, "add_": 0, "sub_": 0, "mul_": 0, "div_": 1}
"""Pointwise writes, and what their argument is taken for where nothing is written: no gradient is NaN of it."""
MOST = 8
"""Writes into one memory that are followed: each is a choice for every score."""


@dataclass(frozen=True)
class Bound:
    """start <= n < end along one axis of the whole, which the part has not where it is `gone`."""

    axis: int
    start: int
    end: int | None = None
    gone: bool = False

    def holds(self, whole: Tensor) -> Tensor:
        n = torch.arange(whole.shape[self.axis], device=whole.device)
        start, end = (b if b is None or b >= 0 else whole.shape[self.axis] + b for b in (self.start, self.end))
        inside = n == start if self.gone else n >= start if end is None else (n >= start) & (n < end)
        return inside.view(-1, *[1] * (whole.dim() - self.axis - 1))

    def widened(self, x: Tensor, whole: Tensor, outside: int) -> Tensor:
        """x, which has an axis for each of the whole's and is as long as the part, as long as the whole."""
        if x.shape[self.axis] == 1:
            return x
        start, end, _ = slice(self.start, self.end).indices(whole.shape[self.axis])
        sides = [0, 0] * (whole.dim() - self.axis - 1) + [start, whole.shape[self.axis] - end]
        return F.pad(x, sides, value=outside)


@dataclass(frozen=True)
class Write:
    """One such write."""

    call: Node
    whole: Node
    views: tuple[Node, ...]
    """From the whole to the part."""
    bounds: tuple[Bound, ...]

    @property
    def inputs(self) -> list[Node]:
        return list(dict.fromkeys([self.whole, *(n for n in self.call.all_input_nodes if n not in self.views)]))


def choose(module: GraphModule) -> Iterator[Written]:
    """Write out every write into a part of scores or weights."""
    forget_copies(module)
    anchors = [n for n in module.graph.nodes if op_name(n) in ANCHORS]
    up = reach(anchors, lambda n: [] if contraction(n) else n.all_input_nodes)
    weights = reach(anchors, lambda n: [u for u in n.users if not contraction(u)])  # a write into O stays one
    products = reach((n for n in up if contraction(n)), lambda n: [u for u in n.users if u in up])
    count = Counter[int | None]()
    for node in list(module.graph.nodes):
        found = read(node) if op_name(node) in OUTSIDE else None
        if found is None or not (found.whole in products or found.whole in weights):
            continue
        pieced = op_name(found.whole) in BLANK or any(x in products or x in weights for x in found.inputs[1:])
        if not pieced and free(module, found):
            count[storage(found.whole)] += 1
            if count[storage(found.whole)] <= MOST:
                facts = facts_of(module)
                later = [u for u in found.whole.users if facts.position[u] > facts.position[node]]
                output = inline(node, choice(found), found.inputs)
                products.add(output)
                yield write_over(node, found.whole, later, output)


def forget_copies(module: GraphModule) -> None:
    """Erase what copies a part onto itself: `s[a:b] += x` ends so."""
    for node in list(module.graph.nodes):
        if op_name(node) == "copy_" and not node.users and all(map(is_tensor, node.args[:2])):
            to, source = (value(x) for x in node.args[:2])
            if storage(node.args[0]) == storage(node.args[1]) is not None and lies(to) == lies(source):  # type: ignore[arg-type]
                part = node.args[0]
                module.graph.erase_node(node)
                erased(part)  # type: ignore[arg-type]


def lies(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in its memory."""
    return x.dtype, *map(size_expr, (x.storage_offset(), *x.shape, *x.stride()))


def read(call: Node) -> Write | None:
    """A call that writes into slices of a tensor, whose bounds are numbers."""
    if call.users or call.kwargs or written_arguments(call) != [call.args[0]]:
        return None
    part: Node = call.args[0]  # type: ignore[assignment]
    views, bounds, reader = list[Node](), list[Bound](), call
    while (bound := bound_of(part)) is not None:
        if list(part.users) != [reader]:
            return None
        bounds = [bound, *(moved(b, bound) for b in bounds)]
        views.insert(0, part)
        part, reader = part.args[0], part  # type: ignore[assignment]
    axes = [b.axis for b in bounds]
    plain = views and value(part).is_floating_point() and len(set(axes)) == len(axes)
    found = Write(call, part, tuple(views), tuple(b for b in bounds if b.gone or (b.start, b.end) != (0, None)))
    return found if plain and all(fits(x, found) for x in call.args[1:]) else None


def bound_of(view: Node) -> Bound | None:
    """What part of its input a view is; None of what is no such view, or not by numbers."""
    if op_name(view) == "select" and isinstance(view.args[2], int):
        return Bound(axis(view.args[1], value(view).dim() + 1), view.args[2], gone=True)
    if op_name(view) != "slice" or argument(view, 4, "step", 1) != 1:
        return None
    dim, start, end = argument(view, 1, "dim", 0), argument(view, 2, "start"), argument(view, 3, "end")
    if not isinstance(start, int | None) or not isinstance(end, int | None):
        return None
    end = None if end is not None and end >= torch.iinfo(torch.int64).max else end
    return Bound(axis(dim, value(view).dim()), start or 0, end)


def moved(b: Bound, outer: Bound) -> Bound:
    """A bound on a part as one on what that is a part of, which has an axis more where `outer` is gone."""
    return Bound(b.axis + (outer.gone and b.axis >= outer.axis), b.start, b.end, b.gone)


def fits(x: Any, found: Write) -> bool:
    """Whether the whole may be computed with an argument: a number, or what is as long as the part, by numbers."""
    if not is_tensor(x):
        known = isinstance(x, bool | int | float)
        return known and (math.isinf(x) or abs(x) <= torch.finfo(value(found.whole).dtype).max)
    lengths = [value(found.whole).shape[b.axis] for b in found.bounds]
    alike = dtype(x) == dtype(found.whole) or (dtype(x) == "bool" and op_name(found.call) == "masked_fill_")
    return value(x).dim() == 0 or (alike and all(isinstance(n, int) for n in lengths))


def free(module: GraphModule, found: Write) -> bool:
    """Whether the memory is the graph's own, and whatever reads it after the write reads the whole by name."""
    facts = facts_of(module)
    alike = [n for n in facts.order if storage(n) == storage(found.whole)]
    at = facts.position[found.call]
    late = [n for n in alike if n is not found.whole and any(facts.position[u] > at for u in n.users)]
    early = [n for n in late if facts.position[n] < at]
    given = any(n.op != "call_function" for n in alike)
    return not early and not given and records(found.call) >= learns(found.whole)


def choice(found: Write) -> Callable[..., Tensor]:
    """The whole, and the arguments of the write -> the whole as it is then."""
    name, outside = op_name(found.call), OUTSIDE[op_name(found.call)]

    def chosen(*tensors: Tensor) -> Tensor:
        known = dict(zip(found.inputs, tensors, strict=True))
        whole = known[found.whole]
        args = [widened(x, whole, found.bounds, outside) for x in map_arg(found.call.args[1:], known.__getitem__)]
        inside = torch.ones((), dtype=torch.bool, device=whole.device)
        for b in found.bounds:
            inside = inside & b.holds(whole)
        return torch.where(inside, written(name, whole, args), whole)

    return chosen


def written(name: str, whole: Tensor, args: Sequence[Any]) -> Tensor:
    """The whole, if all of it were written."""
    match name:
        case "zero_":
            return torch.zeros_like(whole)
        case "copy_":
            return args[0].to(whole.dtype)
        case "fill_":
            return args[0].to(whole.dtype) if isinstance(args[0], Tensor) else whole.new_full((), args[0])
    return getattr(torch.Tensor, name[:-1])(whole, *args).to(whole.dtype)  # type: ignore[no-any-return]


def widened(x: Any, whole: Tensor, bounds: Sequence[Bound], outside: int) -> Any:
    """An argument that broadcasts to the part, as one that broadcasts to the whole."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    x = x[(None,) * (whole.dim() - sum(b.gone for b in bounds) - x.dim())]
    for b in bounds:
        x = x.unsqueeze(b.axis) if b.gone else x
    for b in bounds:
        x = b.widened(x, whole, outside)
    return x
