"""From Dynamo's graph to one small vocabulary: ATen before autograd, with the user's source lines kept.

Dynamo speaks in hundreds of spellings (`x.softmax(-1)`, `F.softmax(x, dim=-1)`, `torch.softmax`); re-tracing its graph
with `make_fx(pre_dispatch=True)` leaves about eighty, still whole (`einsum`, `matmul`, `softmax`) and still before
autograd, so that one rewrite serves training and inference alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

SOFTMAX_WORDS = ("softmax", "softmin", "exp", "scaled_dot_product", "multi_head_attention")
HIGHER_ORDER = torch._ops.HigherOrderOperator


def word(node: Node) -> str:
    """What a Dynamo or ATen node calls, as a lower-case word."""
    target = node.target
    if isinstance(target, str):
        return target.rpartition(".")[2].lower()
    return str(getattr(target, "__name__", target)).lower()


def may_hold_attention(gm: GraphModule) -> bool:
    """Whether a graph holds an exponential of some kind: without one, there is no attention and nothing to re-trace."""
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    return any(any(w in word(n) for w in SOFTMAX_WORDS) or is_power_of_number(n) for n in calls)


def is_power_of_number(node: Node) -> bool:
    """2 ** x, in Dynamo's words."""
    return "pow" in word(node) and isinstance(node.args[-1 if "rpow" in word(node) else 0], int | float)


def uses_functorch(gm: GraphModule) -> bool:
    """Whether `torch.vmap` and its kin are in the graph: re-tracing would bake their levels in as constants."""
    modules = ((n, str(getattr(n.target, "__module__", ""))) for n in gm.graph.nodes)
    return any("functorch" in module or "batch_dim" in word(n) for n, module in modules)


def higher_order_nodes(gm: GraphModule) -> list[Node]:
    """Calls whose arguments are graphs: activation checkpoints, `cond`, autocast regions."""
    return [n for n in gm.graph.nodes if isinstance(n.target, HIGHER_ORDER)]


def placeholder_values(gm: GraphModule) -> list[Any]:
    """The fake tensors and symbolic numbers of a graph's inputs, as Dynamo or make_fx recorded them."""
    nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [n.meta.get("example_value", n.meta.get("val")) for n in nodes]


def fake_mode(values: Sequence[Any]) -> FakeTensorMode | None:
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


class Retrace(Interpreter):
    """Runs Dynamo's graph while make_fx records it.

    Under a pre-dispatch trace `torch.autocast` is only recorded, not entered, so products of mixed dtypes would fail:
    here it is entered as well.
    """

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.entered: dict[Any, Any] = {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is torch.amp.autocast_mode._enter_autocast:
            self.entered[id(result)] = scope = torch.amp.autocast_mode.autocast(*args)
            scope.__enter__()
        elif target is torch.amp.autocast_mode._exit_autocast:
            self.entered.pop(id(args[0])).__exit__(None, None, None)
        return result


def capture(gm: GraphModule, values: Sequence[Any]) -> GraphModule:
    """Re-trace `gm` on fake inputs into pre-dispatch ATen, dead code removed.

    Inputs and outputs keep their order. In-place operations stay as written; autocast shows as enter and exit nodes.
    """
    mode = fake_mode(values)
    context = mode if mode is not None else contextlib.nullcontext()
    with context, fx_traceback.preserve_node_meta():
        traced = make_fx(Retrace(gm).run, pre_dispatch=True)(*values)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def inline(before: Node, fn: Callable[..., Any], inputs: Sequence[Node]) -> Node:
    """Put the ATen nodes of fn(*inputs) in front of `before`, as made at its source line. Returns fn's result."""
    values = [n.meta["val"] for n in inputs]
    with values[0].fake_mode:
        traced = make_fx(fn, pre_dispatch=True)(*values)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    names: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
    with before.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "call_function":
                names[node] = before.graph.node_copy(node, names.__getitem__)
                names[node].meta = {**node.meta, "stack_trace": before.meta.get("stack_trace")}
    return names[traced.graph.output_node().args[0]]  # type: ignore[index]
