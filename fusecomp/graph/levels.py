"""torch.vmap written out, so that what it wraps are plain tensors again.

    vmap(f)(x), x [B, ..]     the operations of f, each with a batch axis more

Dynamo records vmap as calls that open a level, put tensors into it, take them out and close it. Re-traced as they are,
the tensors inside would become constants. Here each stretch from an outermost opening to its closing is run under a
trace of its own, levels and all: PyTorch's own batching rules leave ATen operations on tensors with all their axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._functorch.predispatch import lazy_load_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from fusecomp.errors import CaptureError
from fusecomp.graph import sdpa
from fusecomp.graph.facts import copy_of, recorded_value, said
from fusecomp.graph.learning import DETACHING
from fusecomp.graph.modes import Modes, in_their_modes

OPENS, CLOSES = "_vmap_increment_nesting", "_vmap_decrement_nesting"
DIFFERENTIATES = ("_grad_increment_nesting", "_jvp_increment_nesting")
LEVEL = {"_add_batch_dim": 2, "_remove_batch_dim": 1}
"""Calls that name a level, and which argument does."""
DERIVATIVE = "torch.func (grad, vjp, jvp) differentiates inside the graph, where the weights are read once more"


def callee(node: Node) -> str:
    return str(getattr(node.target, "__name__", ""))


class Levels(Interpreter):
    """Runs one stretch for real. What its tensors meet is recorded below the levels, before autograd."""

    def run_node(self, n: Node) -> Any:
        name = callee(n)
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            raise CaptureError(f"{name} stands under torch.vmap; write the batch axis out")
        if name in LEVEL and n.args[LEVEL[name]] > (functorch.maybe_current_level() or 0):
            raise CaptureError(f"{name} names a level of torch.vmap that is not open")
        detaches = name in DETACHING or n.target in DETACHING
        if detaches:
            self.record_gradients(False)  # some batching rules of detach leave an alias, through which gradients flow
        result = defined(*self.fetch_args_kwargs_from_env(n)) if name == sdpa.CALL else super().run_node(n)
        if detaches or n.target is torch._C._set_grad_enabled:
            self.record_gradients(torch.is_grad_enabled())
        return result

    def record_gradients(self, whether: bool) -> None:
        """Write into the trace whether gradients are recorded from here on: no operation, so nothing else does."""
        mode = get_proxy_mode()
        if mode is not None:
            mode.tracer.create_proxy("call_function", torch._C._set_grad_enabled, (whether,), {})


def defined(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What a call of scaled_dot_product_attention means: a level would take it apart into kernels that have no gradient
    of their own. Raises CaptureError where the meaning is PyTorch's kernel's, or draws a number for each sample."""
    how, mask = sdpa.How.of(args, kwargs), sdpa.mask_of(args, kwargs)
    if how.p or (how.causal and mask is not None):
        what = "dropout" if how.p else "both a mask and is_causal"
        raise CaptureError(f"{sdpa.CALL} with {what} stands under torch.vmap; write the batch axis out")
    q, k, v = (said(args, kwargs, place, name) for place, name in enumerate(("query", "key", "value")))
    return sdpa.definition(how, q, k, v, mask)


def written_out(gm: GraphModule) -> GraphModule:
    """`gm`, or a copy of it without levels. Raises CaptureError, or what the trace raises."""
    calls = {callee(n) for n in gm.graph.nodes}
    if calls.intersection(DIFFERENTIATES):
        raise CaptureError(DERIVATIVE)
    if OPENS not in calls:
        return gm
    lazy_load_decompositions()
    copy = copy_of(gm)
    modes = dict(in_their_modes(copy.graph))
    numbers_first(copy.graph)
    for nodes in list(stretches(copy.graph)):
        write_out(copy, nodes, modes[nodes[0]])
    for node in copy.graph.find_nodes(op="call_function", target=lazy_load_decompositions):
        copy.graph.erase_node(node)
    return copy


def numbers_first(graph: Graph) -> None:
    """Take Python's numbers out of their tensors before any level is opened: a trace below it could not."""
    for held in graph.find_nodes(op="placeholder"):
        if held.users and all(n.target == "item" for n in held.users):
            after = next(n for n in graph.nodes if n.op != "placeholder")
            for node in list(held.users):
                after.prepend(node)


def stretches(graph: Graph) -> Iterator[list[Node]]:
    """The nodes of each outermost level, from its opening to its closing."""
    nodes: list[Node] = []
    depth = 0
    for node in graph.nodes:
        depth += callee(node) == OPENS
        if depth:
            nodes.append(node)
        depth -= callee(node) == CLOSES
        if nodes and not depth:
            yield nodes
            nodes = []


def write_out(module: GraphModule, nodes: Sequence[Node], modes: Modes) -> None:
    """Put the plain operations of one stretch in its place."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))
    results = [n for n in nodes if not inside.issuperset(n.users)]
    traced = traced_below(GraphModule(module, stretch(nodes, inputs, results)), list(map(detached, inputs)), modes)
    made = iter(inputs)
    names: dict[Node, Node] = {}
    with module.graph.inserting_before(nodes[0]):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                names[node] = next(made)
            elif node.op == "get_attr":
                names[node] = held(module, f"{nodes[0].name}_{node.name}", getattr(traced, node.target))
            elif node.op == "call_function":
                names[node] = module.graph.node_copy(node, names.__getitem__)
    for old, new in zip(results, traced.graph.output_node().args[0], strict=True):
        old.replace_all_uses_with(names[new], lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def held(module: GraphModule, name: str, constant: torch.Tensor) -> Node:
    """A constant of the stretch as one of the module. Raises CaptureError where it is no constant, but was lost."""
    if isinstance(constant, FakeTensor):
        raise CaptureError("a tensor under torch.vmap could not be followed")
    setattr(module, name, constant)
    node = module.graph.get_attr(name)
    node.meta["val"] = constant
    return node


def stretch(nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> Graph:
    """A graph of these nodes alone."""
    graph = Graph()
    names = {n: graph.placeholder(n.name) for n in inputs}
    for n in nodes:
        names[n] = graph.node_copy(n, names.__getitem__)
    graph.output(tuple(names[n] for n in results))
    return graph


def detached(node: Node) -> Any:
    """The recorded value of a node, as a tensor that nothing learns through: gradients are autograd's, afterwards."""
    found = recorded_value(node)
    if found is None:
        raise CaptureError(f"nothing is recorded about {node.name}, which torch.vmap wraps")
    return found.detach() if isinstance(found, torch.Tensor) else found


def traced_below(module: GraphModule, values: Sequence[Any], modes: Modes) -> GraphModule:
    """`module` traced with its levels really open."""
    if functorch.maybe_current_level() is not None:
        raise CaptureError("the model is compiled inside torch.func; compile the whole of it")
    try:
        with modes.entered():
            return make_fx(Levels(module).run)(*values)
    finally:
        while functorch.maybe_current_level() is not None:
            functorch.pop_dynamic_layer_stack()
