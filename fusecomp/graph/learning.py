"""Which nodes gradients flow through: autograd's story, read from a graph before autograd.

    x learns   if it is an input that requires a gradient, or is computed from one while gradients are recorded
    x is cut   if it is computed from one, but no gradient flows back: detach, torch.no_grad

A kernel has the gradient of the whole formula. Where the graph cuts it, the formula must stop there as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusecomp.graph import holding
from fusecomp.graph.facts import is_tensor, op_name, storage, value, written_arguments
from fusecomp.graph.modes import in_their_modes

LEARNS, CUT, RECORDS = "fusecomp_learns", "fusecomp_cut", "fusecomp_records"
MARKS = (LEARNS, CUT, RECORDS)
DETACHING = {"detach", "detach_", "detach_copy"}


def learns(node: Node) -> bool:
    """Whether gradients flow through this node."""
    return bool(node.meta.get(LEARNS))


def cut(node: Node) -> bool:
    """Whether gradients stop at this node, though something that it is computed from learns."""
    return bool(node.meta.get(CUT))


def records(node: Node) -> bool:
    """Whether gradients are recorded where this node runs."""
    return bool(node.meta.get(RECORDS, torch.is_grad_enabled()))


def mark(module: GraphModule, values: Sequence[Any]) -> None:
    """Write into each node's meta what the three questions above ask. `values` are the graph's inputs."""
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    wanted = {n for n, v in zip(inputs, values, strict=True) if isinstance(v, torch.Tensor) and v.requires_grad}
    below: set[Node] = set()
    held: dict[int | None, list[Node]] = defaultdict(list)
    for node, modes in in_their_modes(module.graph):
        given = node in wanted or parameter(module, node)
        flows = modes.grad and op_name(node) not in DETACHING
        node.meta |= {LEARNS: given or (flows and any(map(learns, node.all_input_nodes))), RECORDS: modes.grad}
        if learns(node) or not below.isdisjoint(node.all_input_nodes):
            below.add(node)
        node.meta[CUT] = node in below and not learns(node) and not flows and floats(node)
        held[storage(node)].append(node)
        for target in written_arguments(node) if learns(node) else ():
            spread(n for n in held[storage(target)] if not cut(n))
    for node in below:  # what only other nodes without gradients read cuts nothing
        node.meta[CUT] &= any(map(records, node.users))


def parameter(module: GraphModule, node: Node) -> bool:
    """Whether a node reads a parameter that the graph's module holds, and that is trained."""
    found = holding.held(module, node.target) if node.op == "get_attr" else None
    return isinstance(found, torch.Tensor) and found.requires_grad


def spread(nodes: Iterable[Node]) -> None:
    """What learns is written into memory: whatever else looks at that memory learns too."""
    for n in nodes:
        n.meta[LEARNS] = True


def floats(node: Node) -> bool:
    return not is_tensor(node) or bool(value(node).is_floating_point())


def carry(old: Node, new: Node) -> None:
    """`new` takes the place of `old`."""
    new.meta |= {k: old.meta[k] for k in MARKS if k in old.meta}
