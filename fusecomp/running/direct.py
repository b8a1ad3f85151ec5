"""A graph of which nothing is left to compile is called as it stands.

    def forward(q, k, v):
        assert_size_stride(q, (4, 16, 4096, 64), (4194304, 262144, 64, 1)) ...
        return (attend_fixed([q, k, v], '...'),)

Around a program of theirs, AOTAutograd and Inductor do as much at every call as a short kernel takes. That is worth it
where there is something to compile: a graph of attentions and views has nothing. Autograd records it as it records
eager's. Dynamo's guards hold the dtypes, devices, lengths and modes that the graph was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from fusecomp.graph.facts import copy_of, is_getitem, value
from fusecomp.graph.recordings import static
from fusecomp.running.calls import attend_fixed, attend_learning, attend_recomputed, fixed
from fusecomp.running.visits import visit_fixed

CALLS: dict[str, Callable[..., Any]] = {
    "attention": attend_fixed, "attention_recomputed": attend_recomputed, "attention_and_lse": attend_learning,
    "tile_visits": visit_fixed,
}  # fmt: skip
SDPA = torch.ops.aten.scaled_dot_product_attention.default


def direct(module: GraphModule) -> Callable[..., Any] | None:
    """What runs the graph; None where it holds more than attentions of fixed lengths, the tables of the tiles that they
    visit, and views, or is mapped over."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    made = copy_of(module)
    inputs = made.graph.find_nodes(op="placeholder")
    if not inputs or not all(map(kept, made.graph.nodes)):
        return None
    with made.graph.inserting_after(inputs[-1]):
        for x in reversed(inputs):
            val = x.meta["val"]
            made.graph.call_function(torch._C._dynamo.guards.assert_size_stride, (x, tuple(val.shape), val.stride()))
    made.recompile()
    return made.forward


def kept(node: Node) -> bool:
    """Whether a node may run as it stands; calls of ours become calls of functions."""
    if node.op in ("placeholder", "output"):
        return node.op == "output" or (isinstance(node.meta.get("val"), Tensor) and static(node.meta["val"]))
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return is_getitem(node)
    return view(node) or node.target is SDPA or called(node)


def view(node: Node) -> bool:
    """Whether an operator gives its first argument again, in another shape or order at most: no arithmetic."""
    schema, found = node.target._schema, node.meta.get("val")  # type: ignore[union-attr]
    if schema.is_mutable or not node.args or schema.arguments[0].alias_info is None:
        return False
    values = [value(node.args[0]), *(found if isinstance(found, list | tuple) else [found])]
    plain = all(isinstance(x, Tensor) and static(x) and not x.is_conj() and not x.is_neg() for x in values)
    return plain and len({(x.dtype, x.device) for x in values}) == 1


def called(node: Node) -> bool:
    """Let a node call the function instead of our operator; False where it is another's, or its lengths change."""
    target: OpOverload = node.target  # type: ignore[assignment]
    name = target._opname.removesuffix("_fixed")
    if target.namespace != "fusecomp" or name not in CALLS:
        return False
    call = fixed(*node.args[1:]) if target._opname == name else node.args[1]
    node.target, node.args = CALLS[name], (node.args[0], call)
    return call is not None
