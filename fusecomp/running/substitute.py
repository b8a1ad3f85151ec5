"""Putting a kernel's operator in the place of the nodes that it computes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fusecomp.codegen.logsumexp import saved
from fusecomp.codegen.source import KernelSource
from fusecomp.graph.facts import overwritten
from fusecomp.graph.learning import carry
from fusecomp.graph.rewriting import stand_for
from fusecomp.patterns.build import Match
from fusecomp.patterns.naming import SizeSource
from fusecomp.running import layout
from fusecomp.running.calls import fixed
from fusecomp.running.operator import empty_ordered
from fusecomp.running.sums import put_sums
from fusecomp.running.visits import table_node


def substitute(
    module: GraphModule, match: Match, key: str, operation: str = "attention", source: KernelSource | None = None
) -> Node:
    """Replace match.output by an operator and remove the nodes between inputs and output. Returns the new node.

    `operation`: "attention", "attention_recomputed" or "attention_and_lse", as `running.operator` says. `source`: of a
    generated kernel.
    """
    graph, region, output, saves = module.graph, match.region, match.output, operation == "attention_and_lse"
    with graph.inserting_before(match.place):
        length = Lengths()
        shape = [length(s) for s in match.out_shape]
        sizes = {name: length(s) for name, s in match.sizes.items()}
        rows = [*(sizes[v.name.upper()] for v in region.batch), sizes["M"], *saved(region)]
        args = ([sizes[name] for name in region.sizes], shape, list(region.out_order), *([rows] if saves else []),
                getattr(torch, region.out_dtype), key)  # fmt: skip
        called = call(graph, operation, operands(match, source, sizes), args)
        new = graph.call_function(operator.getitem, (called, 0)) if saves else called
        described(new, output, shape, region.out_order)
        if match.sums:
            lse = graph.call_function(operator.getitem, (called, 1))
            described(lse, output, rows, tuple(range(len(rows))), torch.float32)
            put_sums(match, lse)
        if len(shape) > output.meta["val"].dim():  # the query axis that O itself does not have
            new = graph.call_function(torch.ops.aten.squeeze.dim, (new, len(shape) - 1))
            described(new, output)
        if saves and match.learned and overwritten(output, match.place):
            new = copied(new)
    take_place(match, new)
    return new


def operands(match: Match, source: KernelSource | None, sizes: Mapping[str, Any]) -> list[Node]:
    """The tensors that the kernel reads, its table of tiles included."""
    tensors = [on_device(n, match.output) for n in match.inputs]
    if source is not None:
        tensors = [layout.copy(n, o, match.place) for n, o in zip(tensors, layout.orders(match), strict=True)]
    if match.learned:
        tensors = [kept(n, match.place) for n in tensors]
    tensors = behind_stops(match, tensors)
    if source is not None and source.plan.visits != "bounds":
        tensors.append(table_node(match.place, source, tensors, sizes.__getitem__))
    return tensors


def behind_stops(match: Match, tensors: Sequence[Node]) -> list[Node]:
    """The operands' nodes, detached where they do not learn from this."""
    return [detached(n) if o.name in match.stopped else n for n, (o, _) in zip(tensors, match.operands, strict=True)]


def call(graph: Graph, operation: str, tensors: list[Node], args: tuple[Any, ...]) -> Node:
    """The operator, of lengths that never change where that is so."""
    known = fixed(*args) if operation == "attention" else None
    target = getattr(torch.ops.fusecomp, operation if known is None else f"{operation}_fixed")
    return graph.call_function(target.default, (tensors, *(args if known is None else (known,))))


class Lengths:
    """The nodes and numbers that lengths are; each is read once."""

    def __init__(self) -> None:
        self.read: dict[tuple[Node, int], Any] = {}

    def __call__(self, source: SizeSource) -> Any:
        if not isinstance(source, tuple):
            return source
        if source not in self.read:
            self.read[source] = length_node(source)
        return self.read[source]


def kept(node: Node, place: Node) -> Node:
    """What a backward pass may read after the whole graph has run: a copy of what is written into after `place`.
    Eager's own backward may not need it."""
    return copied(node) if overwritten(node, place) else node


def copied(node: Node) -> Node:
    new = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    described(new, node)
    carry(node, new)
    return new


def detached(node: Node) -> Node:
    new = node.graph.call_function(torch.ops.aten.detach.default, (node,))
    described(new, node)
    return new


def take_place(match: Match, new: Node) -> None:
    """Let `new` stand for match.output, and remove the nodes between inputs and output that nothing else reads."""
    carry(match.output, new)
    stand_for(match.output, new)
    at = {n: i for i, n in enumerate(match.output.graph.nodes)} if match.sums else {}
    for dead in sorted([match.output, *reversed(match.interior)], key=lambda n: -at.get(n, 0)):
        if not dead.users:
            dead.graph.erase_node(dead)


def length_node(source: tuple[Node, int]) -> Node | int:
    """The node that reads the length of one axis of a tensor."""
    node, axis = source
    n = node.meta["val"].shape[axis]
    if isinstance(n, int):
        return n
    size = node.graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
    size.meta["val"] = n
    return size


def on_device(node: Node, output: Node) -> Node:
    """A scalar that lies on the CPU beside operands on a GPU is moved there."""
    device = output.meta["val"].device
    if node.meta["val"].device == device:
        return node
    moved = node.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"device": device})
    described(moved, node)
    with node.meta["val"].fake_mode:
        moved.meta["val"] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device=device)
    return moved


def described(
    node: Node, like: Node, shape: list[Any] | None = None, order: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Metadata of a new node: the source line of the node it stands for, and a fake tensor."""
    kept = ("stack_trace", "nn_module_stack", "source_fn_stack", "val")
    node.meta = {k: v for k, v in like.meta.items() if k in kept}
    val = like.meta["val"]
    if shape is None or not isinstance(val, Tensor):
        return
    with val.fake_mode:
        lengths = [n.meta["val"] if isinstance(n, Node) else n for n in shape]
        node.meta["val"] = empty_ordered(lengths, order, val, dtype or val.dtype)


