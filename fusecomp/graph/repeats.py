"""The quick way from Dynamo's graph to ATen where layers repeat: equal calls are traced once.

Which ATen calls a call of PyTorch becomes depends on what is called, on its numbers, on the shapes, strides, dtypes and
devices of its tensors, and on the modes in force; not on their values. So `make_fx` traces each kind of call once, and
what it recorded is written again for each call of that kind. The fake tensors that Dynamo recorded stand for the
results: they tell shapes, and which nodes share memory.

Only graphs of plain calls on tensors of known shape are read so. Others (operators with graphs of their own, vmap,
symbolic lengths, tensors that change their shape in place) are traced whole.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.amp import autocast_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from fusecomp.graph.facts import KEPT, erase_dead
from fusecomp.graph.recordings import Unusual, described, dynamo_value, record, reshapes, results, static

log = logging.getLogger(__name__)

ENTER, EXIT = autocast_mode._enter_autocast, autocast_mode._exit_autocast
SWITCHES = {torch._C._set_grad_enabled, ENTER, EXIT}
PURE = {"torch", "_operator", "math", "builtins"}
"""Where functions are defined that do no more than compute tensors, except in:"""
STATEFUL = ("functorch", "autograd", "torch._dynamo")
NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "recompute", "ac_graph_id", "custom")
"""What a Dynamo node says about itself that its ATen nodes say too."""
WORTH = 8
"""Calls for each function called from which on a graph is repetitive: tracing one call by itself has its price."""


def repetitive(gm: GraphModule) -> bool:
    """Whether a graph calls the same few functions again and again."""
    targets = [n.target for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    return len(targets) >= WORTH * len(set(targets))


def expanded(gm: GraphModule, values: Sequence[Any]) -> GraphModule | None:
    """`gm` in ATen without dead code, each kind of call traced once; None where it must be traced whole.

    To be called in the fake mode of `values`, the graph's inputs as Dynamo recorded them.
    """
    recorded = [dynamo_value(n) for n in gm.graph.nodes if n.op == "placeholder"]
    if not all(map(plain, gm.graph.nodes)) or any(r is not v for r, v in zip(recorded, values, strict=True)):
        return None
    expansion = Expansion(gm)
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            return expansion.run()
    except Unusual as reason:
        log.debug("a graph is traced whole: %s", reason)
        return None
    finally:
        expansion.leave()


# ----------------------------------------------------------------------------------------------------------------
# Which graphs


def plain(node: Node) -> bool:
    """Whether a Dynamo node is an input, an output, a switch of modes, or a call on tensors of known shape."""
    if node.op not in ("placeholder", "call_function", "call_method", "output"):
        return False
    switches = node.target in SWITCHES
    if node.op == "call_function" and not switches and not computes(node.target):
        return False
    told = dynamo_value(node) is not None or switches or not node.users
    return told and all(map(static, pytree.tree_leaves(dynamo_value(node)))) and not reshapes(node)


def computes(target: Any) -> bool:
    """Whether a function is PyTorch's or Python's own, and no more than a function of its arguments."""
    module = str(getattr(target, "__module__", None) or "builtins")
    stateful = isinstance(target, HigherOrderOperator) or any(m in module for m in STATEFUL)
    return module.partition(".")[0] in PURE and not stateful


# ----------------------------------------------------------------------------------------------------------------
# Writing them


class Expansion:
    """Writes one graph in ATen."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph, self.root = gm, Graph(), torch.nn.Module()
        self.graph.set_codegen(copy.copy(gm.graph._codegen))
        self.env: dict[Node, Any] = {}
        """The value of each node read."""
        self.made: dict[int, tuple[Node, Any]] = {}
        """id of a value -> the node that made it or wrote into it last, and the value, which keeps its id taken."""
        self.entered: list[tuple[Any, tuple[Any, ...]]] = []
        """Autocasts in force, and how they were asked for."""
        self.known: dict[Hashable, GraphModule] = {}

    def run(self) -> GraphModule:
        """The whole graph. Raises Unusual."""
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self.hold(self.graph.placeholder(node.name), dynamo_value(node))
            elif node.op == "output":
                self.graph.output(self.nodes(self.arguments(node)[0][0]))
            elif node.target in SWITCHES:
                self.env[node] = self.switch(node)
            else:
                self.env[node] = self.call(node)
        erase_dead(self.graph)
        return GraphModule(self.root, self.graph)

    def arguments(self, node: Node) -> Any:
        """(args, kwargs), values in the place of nodes."""
        return map_arg((node.args, dict(node.kwargs)), self.env.__getitem__)

    def nodes(self, values: Any) -> Any:
        """Nodes in the place of values that some node made."""
        return map_aggregate(values, lambda v: self.made[id(v)][0] if isinstance(v, Tensor | torch.autocast) else v)

    def hold(self, new: Node, value: Any) -> Any:
        """`new` stands for `value` from now on."""
        new.meta["val"] = pytree.tree_map_only(Tensor, lambda t: t.detach() if t.requires_grad else t, value)
        self.made[id(value)] = new, value
        return value

    def switch(self, node: Node) -> Any:
        """Turn a mode on or off for the calls that follow, as the graph does."""
        args, _ = self.arguments(node)
        scope = node.target(*args)  # type: ignore[operator]
        new = self.graph.call_function(node.target, self.nodes(args))  # type: ignore[arg-type]
        new.meta = {**notes(node), "val": None}
        if node.target is ENTER:
            self.entered.append((scope, args))
            self.made[id(scope)] = new, scope
        elif node.target is EXIT:
            self.entered = [e for e in self.entered if e[0] is not args[0]]
        return scope

    def leave(self) -> None:
        """Leave what a graph that could not be read to its end has entered."""
        while self.entered:
            self.entered.pop()[0].__exit__(None, None, None)

    def call(self, node: Node) -> Any:
        """Write one call. Returns its value."""
        args, kwargs = self.arguments(node)
        tensors: list[Tensor] = []
        modes = torch.is_grad_enabled(), tuple(how for _, how in self.entered)
        kind = node.op, node.target, modes, described((args, kwargs), tensors)
        if kind not in self.known:
            self.known[kind] = record(node, args, kwargs, tensors)
        recorded = self.known[kind]
        value = self.write(recorded, tensors, node)
        if value is None and not node.users and not any(n.op == "call_function" for n in recorded.graph.nodes):
            new = self.graph.create_node(node.op, node.target, *self.nodes((args, kwargs)))
            new.meta = {**node.meta, KEPT: True}
        return value

    def write(self, recorded: GraphModule, tensors: Sequence[Tensor], node: Node) -> Any:
        """Write the ATen calls of one call. What they give is what Dynamo says; what lies between is computed."""
        told = results(recorded, node)
        values: dict[Node, Any] = {}
        names: dict[Node, Node] = {}
        given = iter(tensors)
        for old in recorded.graph.nodes:
            if old.op == "placeholder":
                values[old] = next(given)
                names[old] = self.made[id(values[old])][0]
            elif old.op == "get_attr":
                values[old] = getattr(recorded, old.target)
                names[old] = self.constant(values[old], old.meta["val"])
            elif old.op == "call_function":
                names[old] = new = self.graph.node_copy(old, names.__getitem__)
                new.meta = notes(node)
                values[old] = self.hold(new, told[old] if old in told else run(old, values))
        return map_arg(recorded.graph.output_node().args[0], values.__getitem__)

    def constant(self, tensor: Tensor, fake: Any) -> Node:
        """A node that reads a number of the program's own."""
        name = f"_tensor_constant{sum(n.op == 'get_attr' for n in self.graph.nodes)}"
        self.root.register_buffer(name, tensor)
        new = self.graph.create_node("get_attr", name)
        with fake.fake_mode:
            new.meta["val"] = fake.clone()
        return new


def run(node: Node, values: Mapping[Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def notes(node: Node) -> dict[str, Any]:
    return {k: node.meta[k] for k in NOTES if k in node.meta}
