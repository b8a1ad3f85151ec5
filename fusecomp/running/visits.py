"""The table of tiles that an attention visits, in the rewritten graph: made once for all that share a mask.

    fusecomp::tile_visits(masks, their lengths) -> int32 [rows, 4 + whole key tiles]        codegen/table.py
                                                         [rows, 5 + 2 BLOCK_M]              codegen/table_ranges.py

It stands before the first attention that uses it. Another attention takes the same node if its masks are the same
nodes, not written to since, its lengths are the same and its tiles too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusecomp.codegen.source import KernelSource
from fusecomp.codegen.table import table
from fusecomp.codegen.visited import HEAD
from fusecomp.errors import KernelError
from fusecomp.graph.facts import storage, value, written_arguments
from fusecomp.running.calls import as_given, fixed, replayed
from fusecomp.running.operator import Launch, on_device_of, operator

ListVisits = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
TABLES: dict[str, ListVisits] = {}
"""Signature -> what makes such a table."""


def launcher(module: ModuleType, source: KernelSource) -> Launch:
    """What launches a loaded kernel on the region's operands, with the table after them or without."""
    if source.plan.visits == "bounds":
        return module.launch  # type: ignore[no-any-return]
    made, region = table(source.region, source.plan), source.region
    TABLES.setdefault(made.signature, module.list_visits)
    names = [o.name for o in region.operands]
    tensors, sizes = [names.index(n) for n in made.tensors], [region.sizes.index(n) for n in made.sizes]

    def launch(out: Tensor, given: Sequence[Tensor], lengths: Sequence[int], *lse: Tensor) -> None:
        if len(given) == len(names):
            given = [*given, module.list_visits([given[i] for i in tensors], [lengths[i] for i in sizes])]
        module.launch(out, given, lengths, *lse)

    return launch


# ----------------------------------------------------------------------------------------------------------------
# The operator


def shape_of(axes: Sequence[int], lengths: Sequence[int], block_m: int, block_n: int) -> list[int]:
    """[rows, 4 + whole key tiles]; `block_n` is 0 where the table has ranges."""
    m, n = lengths
    return [math.prod(axes) * ((m + block_m - 1) // block_m), 4 + n // block_n if block_n else HEAD + 2 * block_m]


def visit(
    masks: Sequence[Tensor], sizes: Sequence[int], axes: Sequence[int], lengths: Sequence[int], block_m: int,
    block_n: int, signature: str,
) -> Tensor:  # fmt: skip
    """The table of `signature`; `axes` are the lengths of the batch axes that the masks differ along, `lengths` M
    and N."""
    if signature not in TABLES:
        raise KernelError(f"table {signature} is not loaded in this process; compile the model here")
    if not math.prod(shape_of(axes, lengths, block_m, block_n)):
        return visit_fake(masks, sizes, axes, lengths, block_m, block_n, signature)
    return on_device_of(masks[0], TABLES[signature], masks, sizes)


def visit_fake(
    masks: Sequence[Tensor], sizes: Sequence[int], axes: Sequence[int], lengths: Sequence[int], block_m: int,
    block_n: int, signature: str,
) -> Tensor:  # fmt: skip
    return masks[0].new_empty(shape_of(axes, lengths, block_m, block_n), dtype=torch.int32)


def visit_fixed(masks: list[Tensor], call: str) -> Tensor:
    """The same of lengths that never change, done again and again."""
    return replayed(visit, call)(masks)  # type: ignore[no-any-return]


def visit_fixed_fake(masks: Sequence[Tensor], call: str) -> Tensor:
    return visit_fake(masks, *as_given(call))


LENGTHS = "SymInt[] axes, SymInt[] lengths, int block_m, int block_n"
operator("tile_visits", f"(Tensor[] masks, SymInt[] sizes, {LENGTHS}, str signature) -> Tensor", visit, visit_fake)
operator("tile_visits_fixed", "(Tensor[] masks, str call) -> Tensor", visit_fixed, visit_fixed_fake)


# ----------------------------------------------------------------------------------------------------------------
# The graph


def table_node(
    output: Node, source: KernelSource, tensors: Sequence[Node], length: Callable[[str], Any]
) -> Node:  # fmt: skip
    """The node that makes the table, before `output`: one that is there already where it holds the same.

    `tensors` follow the operands of the region; `length` is the node or number of one of its sizes."""
    region, plan = source.region, source.plan
    made = table(region, plan)
    by_name = dict(zip([o.name for o in region.operands], tensors, strict=True))
    masks = [by_name[name] for name in made.tensors]
    axes = [length(v.name.upper()) for v in made.axes]
    more = ([length(n) for n in made.sizes], axes, [length("M"), length("N")], plan.block_m,
            0 if plan.visits == "ranges" else plan.block_n, made.signature)  # fmt: skip
    call, visits = fixed(*more), torch.ops.fusecomp
    target = visits.tile_visits.default if call is None else visits.tile_visits_fixed.default
    args = (masks, *(more if call is None else (call,)))
    known = standing(output, target, args)
    if known is not None:
        return known
    node = output.graph.call_function(target, args)
    node.meta = {k: v for k, v in output.meta.items() if k in ("stack_trace", "nn_module_stack")}
    with value(masks[0]).fake_mode:
        node.meta["val"] = visit_fake(*torch.fx.map_arg((masks, *more), value))
    return node


def standing(before: Node, target: Any, args: tuple[Any, ...]) -> Node | None:
    """A table of the same arguments made before a node, with no write to its masks since."""
    memory = {storage(mask) for mask in args[0]}
    node = before.prev
    while node.op != "root":
        if any(storage(target) in memory for target in written_arguments(node)):
            return None
        if node.target is target and same(node.args, args):
            return node
        node = node.prev
    return None


def same(a: Any, b: Any) -> bool:
    """Equal arguments: the same nodes, or lengths of the same value."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(value(a), torch.SymInt) and isinstance(value(b), torch.SymInt):
        return bool(value(a).node.expr == value(b).node.expr)
    return bool(a == b)
