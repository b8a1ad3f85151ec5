"""Calls of a program that are written out for a while, and put back where nothing came of it.

A call that is written out leaves the graph, so that its operands have no second reader. What stands for it may be
replaced in its turn, and so may its operands: the graph remembers what stands for what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fusecomp.graph.facts import Facts
from fusecomp.graph.modes import Modes, in_their_modes
from fusecomp.graph.program import WRITTEN, Call

log = logging.getLogger(__name__)
INSTEAD = "fusecomp_instead"
"""In the meta of a graph: {a node that left it: what stands for it}."""


@dataclass(frozen=True)
class Written:
    """What was written out."""

    output: Node
    """What stands for it."""
    parts: tuple[Node, ...]
    """Nodes that become part of a kernel where it is fused."""
    calls: tuple[Call, ...]
    """As the program has it, in order."""
    whole: Node | None = None
    """What it stands for where that stays, and the calls only write into it; the last of the calls otherwise."""


def write(call: Node, output: Node, parts: Sequence[Node] = ()) -> Written:
    """Let `output` stand for `call`, which leaves the graph with what nothing else reads."""
    stand_for(call, output)
    return Written(output, tuple(parts) or (output,), tuple(erased(call)))


def write_over(call: Node, whole: Node, later: Iterable[Node], output: Node) -> Written:
    """Let `later` read `output` in place of `whole` as `call` left it, which leaves the graph."""
    for reader in later:
        reader.replace_input_with(whole, output)
    return Written(output, (output,), tuple(erased(call)), whole)


def attempt(
    module: GraphModule, rewriting: Callable[[GraphModule], Iterator[Written]]
) -> tuple[list[Written], Exception | None]:
    """What a rewriting writes out, and the error that ended it: the call that it stopped at is as it was."""
    before, written = set(module.graph.nodes), list[Written]()
    try:
        for one in rewriting(module):
            written.append(one)
    except Exception as error:
        log.debug("fusecomp failed to rewrite a graph", exc_info=True)
        for node in reversed(list(module.graph.nodes)):
            if node not in before and not node.users:
                module.graph.erase_node(node)
        return written, error
    return written, None


AS_READ = "fusecomp_as_read"
"""In the meta of a graph: what was last read of it."""


def facts_of(module: GraphModule) -> Facts:
    """The facts of a graph as it is now, made anew where its nodes changed."""
    held: tuple[Facts, dict[Node, Modes]] | None = module.meta.get(AS_READ)
    if held is None or held[0].order != list(module.graph.nodes):
        held = module.meta[AS_READ] = Facts(module.graph), {}
    return held[0]


def modes_of(module: GraphModule) -> dict[Node, Modes]:
    """The modes of every node."""
    facts_of(module)
    modes: dict[Node, Modes] = module.meta[AS_READ][1]
    if not modes:
        modes.update(in_their_modes(module.graph))
    return modes


def movable(module: GraphModule, nodes: Sequence[Node], read: Iterable[Node], to: Node) -> bool:
    """Whether nodes may as well be computed where `to` is: in the same modes, with what is `read` not written since."""
    facts, modes = facts_of(module), modes_of(module)
    first, last = min(map(facts.position.__getitem__, nodes)), facts.position[to]
    alike = all(modes[n] == modes[to] for n in nodes)
    return alike and not any(facts.written_between(x, first, last) for x in read)


def put_back(module: GraphModule, written: Sequence[Written], fused: Container[Node]) -> None:
    """Give every call its place again of which no part left the graph for good. `fused`: outputs of attention."""
    instead, alive, gone = _instead(module), set(module.graph.nodes), set[Node]()

    def now(node: Node) -> Node:
        return list(_line(node, instead))[-1]

    def stays(part: Node) -> bool:
        return now(part) in alive and not any(n in fused or n in gone for n in _line(part, instead))

    for one in reversed(written):
        if all(map(stays, one.parts)):
            output = now(one.output)
            with module.graph.inserting_before(output):
                for call in one.calls:
                    args, kwargs = map_arg((call.args, call.kwargs), now)
                    new = module.graph.call_function(call.node.target, args, kwargs)  # type: ignore[arg-type]
                    new.meta = dict(call.node.meta)
                    instead[call.node] = new
                    alive.add(new)
            stand_for(output, new if one.whole is None else now(one.whole))
            alive.difference_update(call.node for call in erased(output))
        else:
            gone.update(call.node for call in one.calls)
    del module.meta[INSTEAD]
    for key in (AS_READ, WRITTEN):
        module.meta.pop(key, None)


def stand_for(old: Node, new: Node) -> None:
    """Let whatever reads `old` read `new`, in the graph or out of it."""
    remember(old, new)
    old.replace_all_uses_with(new)


def remember(old: Node, new: Node) -> None:
    """`new` stands for `old` in calls that are out of the graph."""
    assert old.graph.owning_module is not None
    _instead(old.graph.owning_module)[old] = new


def stood_for(node: Node) -> list[Node]:
    """The nodes whose value a node of the graph has: itself, what it stands for, what that stood for."""
    assert node.graph.owning_module is not None
    found, instead = [node], _instead(node.graph.owning_module)
    for n in found:
        found += [old for old, new in instead.items() if new is n]
    return found


def _instead(module: GraphModule) -> dict[Node, Node]:
    found: dict[Node, Node] = module.meta.setdefault(INSTEAD, {})
    return found


def _line(node: Node, instead: dict[Node, Node]) -> Iterator[Node]:
    """A node, what stands for it, what stands for that."""
    yield node
    while node in instead:
        node = instead[node]
        yield node


def erased(node: Node) -> list[Call]:
    """Erase a node, and what only it read: those calls, in order."""
    calls: dict[Node, Call] = {}
    stack = [node]
    while stack:
        n = stack.pop()
        if n.op == "call_function" and not n.users and n not in calls:  # two that are erased may read one
            above = n.all_input_nodes
            calls[n] = Call(n, n.args, n.kwargs)
            n.graph.erase_node(n)
            stack += above
    return list(calls.values())[::-1]
