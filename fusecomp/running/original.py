"""What a kernel is held against: the program as it was written, between the kernel's operands and its result.

Where those are in the program, what runs is the program's own calls. Where a rewriting made an operand, or a result
that is only part of the program's, the graph as it was rewritten stands in for them, and both are held against each
other between the nearest values that both have.

    q -> q / |q| -> kernel               given q, the program's cosine_similarity and the graph's product
    kernel -> N / D                      given what N and D are made of, the program's quotient and the graph's
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch.fx import Node

from fusecomp.graph.facts import is_tensor, op_name, said
from fusecomp.graph.program import Call, Elsewhere, Program, as_written, computed
from fusecomp.graph.rewriting import stood_for
from fusecomp.graph.sdpa import CALL
from fusecomp.patterns.build import Match
from fusecomp.patterns.renormalised import POSITIVE
from fusecomp.running.subgraph import Section

REWRITTEN = "the graph as rewritten"
WIDER = 4
"""Times that the values between which is compared are looked for further up."""


def original(match: Match, result: Node | None = None) -> Section:
    """O, or another `result`, from the operands: as the program has it, or as the graph was rewritten."""
    result = result or match.output
    return written(match, result) or read(match, result)


def written(match: Match, result: Node) -> Section | None:
    """The program's calls between operands and a result; None where a rewriting made one of them."""
    program = as_written(match.output.graph.owning_module)
    try:
        return section(program, match.inputs, result, whole=result is match.output)  # V is not in a log-sum-exp
    except Elsewhere:
        return None


def read(match: Match, result: Node) -> Section:
    """The calls that the region was read from."""
    program, given = Program(match.output.graph.owning_module), tuple((n,) for n in match.inputs)
    calls = program.between(match.inputs, [result], match.path)
    return Section(given, tuple(calls), result, program, REWRITTEN)


def section(program: Program, inputs: tuple[Node, ...], result: Node, whole: bool = True) -> Section | None:
    """A program's calls between values that the graph has: where `whole`, all of them. Raises Elsewhere."""
    given = tuple(tuple(known(program, n)) for n in inputs)
    results = known(program, result)
    if not all(given) or not results:
        return None
    calls = program.between({n for held in given for n in held}, results[-1:])
    used = {n for call in calls for n in call.reads()}
    whole = all(map(used.intersection, given)) or not whole
    return Section(given, tuple(calls), results[-1], program) if whole else None


def known(program: Program, node: Node) -> list[Node]:
    """The nodes of a program that have the value of a node of the graph."""
    return [n for n in stood_for(node) if n in program.place]


def rewritten(match: Match) -> tuple[Section, Section] | None:
    """(the program's calls, those of the graph as it was rewritten) between the nearest values that both have, around
    the attention; None where there are none such, or the kernel is held against the program itself."""
    module, program = match.output.graph.owning_module, as_written(match.output.graph.owning_module)
    result = first_known(program, match.output)
    if result is None or written(match, match.output) is not None:
        return None
    now, passed = Program(module), set[Node]()
    for _ in range(WIDER):
        given = tuple(boundary(program, match, result, passed))
        try:
            before, after = section(program, given, result), now.between(given, [result])
            if before is None or any(map(random, (*before.calls, *after))):
                return None
            return before, Section(tuple((n,) for n in given), tuple(after), result, now)
        except Elsewhere as other:  # the program makes it of what one of these is made of
            near = {n for n in given if other.node in n.all_input_nodes}
            if not near:
                return None
            passed |= near
    return None


def first_known(program: Program, output: Node) -> Node | None:
    """The first value that is made of O and that the program has."""
    node, below = output, {output}
    while node.op != "root":
        if node in below or not below.isdisjoint(node.all_input_nodes):
            if known(program, node):
                return node
            below.add(node)
        node = node.next
    return None


def boundary(program: Program, match: Match, result: Node, passed: Container[Node]) -> Iterator[Node]:
    """The nearest values above a result, outside of the attention and not `passed`, that the program has and that may
    be any: what is positive is drawn so, as a rewriting may count on it."""
    seen, stack = {result}, [result]
    while stack:
        node = stack.pop()
        above = [n for n in Call(node, node.args, node.kwargs).reads() if computed(n)]
        inside = node in (result, match.output) or (node in match.path and node not in match.inputs) or node in passed
        made = above or node.op != "call_function" or node in match.inputs
        drawn = is_tensor(node) and made and op_name(node) not in POSITIVE
        if drawn and not inside and known(program, node):
            yield node
            continue
        stack += [n for n in above if n not in seen]
        seen.update(above)


def random(call: Call) -> bool:
    """Whether a call draws numbers, or is a kernel of ours: its part was looked at with the first that was fused."""
    if call.instead is not None:
        return False
    if op_name(call.node) == CALL:
        return bool(said(call.args, call.kwargs, 4, "dropout_p", 0.0))
    tags = getattr(call.node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or getattr(call.node.target, "namespace", "") == "fusecomp"
