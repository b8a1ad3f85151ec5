"""What a graph calls at one time, whatever becomes of it later: as the program was written, before a call of it was
written out, or as it is now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusecomp.graph.facts import is_tensor, op_name, storage, written_arguments
from fusecomp.graph.holding import STATE, held

WRITTEN = "fusecomp_program"
"""In the meta of a graph: the program as it was written."""
FIRST_LENDS = {
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty", "sym_size",
}  # fmt: skip
SECOND_LENDS = {"expand_as", "view_as", "reshape_as", "type_as"}
"""Calls to which one argument lends its shape or its dtype, not its values."""


@dataclass(frozen=True)
class Call:
    """A call, with what it was given then."""

    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    instead: Any = None
    """What is called in its place, where what it calls draws numbers."""

    @property
    def target(self) -> Any:
        return self.node.target if self.instead is None else self.instead

    def nodes(self) -> list[Node]:
        """All that it was given."""
        found = list[Node]()
        torch.fx.map_arg((self.args, self.kwargs), found.append)
        return found

    def reads(self) -> Iterator[Node]:
        """The nodes whose values it reads."""
        name, found = op_name(self.node), list[Node]()
        lends = 0 if name in FIRST_LENDS else 1 if name in SECOND_LENDS else None
        args = [x for i, x in enumerate(self.args) if i != lends]
        torch.fx.map_arg((args, self.kwargs), found.append)
        return iter(found)


class Elsewhere(Exception):
    """A value is made of more than what is given."""

    def __init__(self, node: Node) -> None:
        self.node = node


class Program:
    """The calls of a graph as they are now, in order."""

    def __init__(self, module: GraphModule) -> None:
        self.calls = {n: Call(n, n.args, dict(n.kwargs)) for n in module.graph.nodes}
        self.place = {n: i for i, n in enumerate(self.calls)}
        self.writers: dict[int | None, list[Node]] = defaultdict(list)
        for node in self.calls:
            for target in written_arguments(node):
                self.writers[storage(target)].append(node)

    def seeded(self, draws: Node, output: Node, instead: Any, seed: Node, p: Any) -> None:
        """Let what draws numbers for its output make them of a seed, which is given: `instead`(x, seed, p)."""
        if draws in self.calls:
            self.calls[output] = Call(output, (self.calls[draws].args[0], seed, p), {}, instead)
            self.place[seed] = -1

    def between(
        self, given: Collection[Node], results: Sequence[Node], within: Container[Node] | None = None
    ) -> list[Call]:
        """The calls that make the results of what is given, in order, with those that write into what they read. Raises
        Elsewhere where they are made of more; but what is not `within` some nodes lends its shape."""
        found, stack, memory = set[Node](), list(results), {storage(n) for n in given} - {None}
        while stack:
            node = stack.pop()
            if node in found or node in given or not computed(node) or (within is not None and off(node, within)):
                continue
            if node not in self.calls or node.op != "call_function":
                raise Elsewhere(node)
            if storage(node) in memory and node in self.writers.get(storage(node), ()):
                raise Elsewhere(node)
            found.add(node)
            above = list(self.calls[node].reads())
            stack += above
            stack += [w for x in above for w in self.writers.get(storage(x), ()) if self.place[w] < self.place[node]
                      and storage(x) not in memory]  # fmt: skip
        return [self.calls[n] for n in sorted(found, key=self.place.__getitem__)]

    def stale(self, given: Collection[Node], calls: Sequence[Call]) -> Node | None:
        """What calls read of memory that is given and that the program then writes into, before the last of them: a
        kernel reads all that it is given at one time."""
        memory = {storage(n) for n in given} - {None}
        last = max((self.place[call.node] for call in calls), default=0)
        for call in calls:
            since = range(self.place[call.node] + 1, last)
            for n in call.reads() if storage(call.node) not in memory else ():  # a view of it reads nothing yet
                if storage(n) in memory and any(self.place[w] in since for w in self.writers.get(storage(n), ())):
                    return n
        return None


def computed(node: Node) -> bool:
    """Whether a node is more than a number that the graph is compiled for, a symbol, or a number written down."""
    val = node.meta.get("val")
    if node.op == "get_attr":
        return bool(node.meta.get(STATE)) or not isinstance(held(node.graph.owning_module, node.target), torch.Tensor)
    return is_tensor(node) or (node.op != "placeholder" and not fixed(val))


def off(node: Node, within: Container[Node]) -> bool:
    """Whether a node lends only its shape; parts of a tensor are what it is."""
    on = node in within or isinstance(node.meta.get("val"), list | tuple)
    return not on or node.op != "call_function"


def fixed(n: Any) -> bool:
    """Whether a node's value is a number that the graph is compiled for: what it is read from lends only its shape."""
    if isinstance(n, torch.SymInt | torch.SymFloat):
        return bool(n.node.expr.is_number)
    return isinstance(n, int | float)


def keep(module: GraphModule) -> None:
    """Remember the program as it is written."""
    module.meta[WRITTEN] = Program(module)


def as_written(module: GraphModule) -> Program:
    """The program as it was written; as it is now where nothing was rewritten."""
    return module.meta.get(WRITTEN) or Program(module)
