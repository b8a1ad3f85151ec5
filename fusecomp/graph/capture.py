"""From Dynamo's graph to one small vocabulary: ATen before autograd, with the user's source lines kept.

Dynamo speaks in hundreds of spellings (`x.softmax(-1)`, `F.softmax(x, dim=-1)`, `torch.softmax`); re-tracing its graph
with `make_fx(pre_dispatch=True)` leaves about eighty, still whole (`einsum`, `matmul`, `softmax`) and still before
autograd, so that one rewrite serves training and inference alike. Where layers repeat, `repeats` takes a quicker way.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, track_tensor_tree
from torch.fx.node import base_types
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusecomp.errors import CaptureError
from fusecomp.graph.facts import KEPT, LABEL, erase_dead, op_name, recorded_value, word, written_arguments
from fusecomp.graph.holding import named_as_before
from fusecomp.graph.levels import written_out
from fusecomp.graph.recordings import Unusual, described
from fusecomp.graph.repeats import expanded, repetitive

SOFTMAX_WORDS = ("softmax", "softmin", "exp", "scaled_dot_product", "multi_head_attention")
QUOTIENT_WORDS = ("matmul", "mm", "einsum"), ("sum", "mean"), ("div", "reciprocal")
HIGHER_ORDER = torch._ops.HigherOrderOperator
INFERENCE = (grad_mode._enter_inference_mode, grad_mode._exit_inference_mode)
KNOWN = (Proxy, type(None), *base_types)
"""What make_fx can write as an argument of a call; anything else is made again by the call that made it."""


def may_hold_attention(gm: GraphModule) -> bool:
    """Whether a graph holds an exponential of some kind, or products, a sum and a quotient: without, there is no
    attention and nothing to re-trace."""
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    if any(any(w in word(n) for w in SOFTMAX_WORDS) or is_power_of_number(n) for n in calls):
        return True
    return all(any(any(w in word(n) for w in words) for n in calls) for words in QUOTIENT_WORDS)


def is_power_of_number(node: Node) -> bool:
    """2 ** x, in Dynamo's words."""
    return "pow" in word(node) and isinstance(node.args[-1 if "rpow" in word(node) else 0], int | float)


def placeholder_values(gm: GraphModule) -> list[Any]:
    """The fake tensors and symbolic numbers of a graph's inputs, as Dynamo or make_fx recorded them."""
    return [recorded_value(n) for n in gm.graph.nodes if n.op == "placeholder"]


def fake_mode(values: Sequence[Any]) -> FakeTensorMode | None:
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


@contextlib.contextmanager
def beside_constants(mode: FakeTensorMode) -> Iterator[None]:
    """`mode`, in which the tensors that a graph holds itself are as good as fake ones."""
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


class Retrace(Interpreter):
    """Runs Dynamo's graph while make_fx records it, and sees that the record loses nothing.

    What is no tensor operation stays a call as it was: operators with a graph of their own (traced through, an
    autograd function would lose its backward), checks of the inputs, statements that switch some state of PyTorch's.
    `torch.autocast`, which a pre-dispatch trace only records, is entered as well: products of mixed dtypes would fail.
    """

    def run_node(self, n: Node) -> Any:
        check = n.op == "call_module" and not n.users
        if check or n.target in INFERENCE or isinstance(n.target, HIGHER_ORDER):
            return self.keep(n)
        recorded = len(tracer().graph.nodes)
        result = super().run_node(n)
        if n.op in ("call_function", "call_method") and opens(self.fetch_args_kwargs_from_env(n), result):
            return self.tracked(n, result)
        if n.op == "call_function" and result is None and len(tracer().graph.nodes) == recorded and not n.users:
            self.keep(n)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch._C._autograd._get_data_attr:  # x.data, which make_fx would bake in as a constant
            return args[0].detach()
        if target is autocast_mode._enter_autocast:
            scope = autocast_mode.autocast(*args)
            scope.__enter__()
            return scope
        if target is autocast_mode._exit_autocast:
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)

    def keep(self, n: Node) -> Any:
        """Record a call as it stands. Its value is the one that Dynamo or export found."""
        if n.op == "call_module":
            tracer().root.add_module(str(n.target), self.submodules[str(n.target)])
            tracer().graph.owning_module = tracer().root
        proxy = self.recorded_call(n)
        if isinstance(n.target, HIGHER_ORDER):
            found = recorded_value(n)
            if found is None and n.users:
                raise CaptureError(f"nothing is recorded about the result of {n.target}")
            return track_tensor_tree(found, proxy, constant=None, tracer=tracer())
        return proxy

    def tracked(self, n: Node, result: Any) -> Any:
        """Record a call as it stands, whose value is known."""
        return track_tensor_tree(result, self.recorded_call(n), constant=None, tracer=tracer())

    def recorded_call(self, n: Node) -> Any:
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), self.recorded)
        proxy = tracer().create_proxy(n.op, n.target, args, kwargs)
        proxy.node.meta = {**n.meta, **proxy.node.meta, KEPT: True}
        return proxy

    def recorded(self, n: Node) -> Any:
        """What stands for the value of `n` in the record."""
        held = self.env[n]
        if isinstance(held, torch.nn.Module):
            tracer().root.add_module(str(n.target), held)
        elif n.op != "call_function" or all(isinstance(x, KNOWN) for x in pytree.tree_leaves(held)):
            return pytree.tree_map(tracer().unwrap_proxy, held)
        return tracer().create_proxy(n.op, n.target, n.args, n.kwargs)


def opens(given: Any, result: Any) -> bool:
    """Whether a call takes tensors out of those of a class that holds some, puts them into such, or does to the latter
    what make_fx does not see: it would record what is inside as constants."""
    made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    holding = [x for x in made if is_traceable_wrapper_subclass(x)]
    given_some = any(is_traceable_wrapper_subclass(x) for x in pytree.tree_leaves(given) if isinstance(x, Tensor))
    if given_some and len(holding) == len(made):
        return any(get_proxy_slot(x, tracer(), None) is None for x in holding)
    return bool(made) and (given_some or bool(holding))


def tracer() -> Any:
    """The make_fx trace in progress."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def capture(gm: GraphModule, values: Sequence[Any]) -> GraphModule:
    """Re-trace `gm` on fake inputs into pre-dispatch ATen, dead code removed. `torch.vmap` is written out.

    Inputs and outputs keep their order, parameters and buffers their names. In-place operations stay as written;
    autocast shows as enter and exit nodes.
    """
    mode = fake_mode(values)
    with beside_constants(mode) if mode is not None else contextlib.nullcontext():
        traced = expanded(gm, values) if mode is not None and repetitive(gm) else None
        traced = traced if traced is not None else traced_beside_others(gm, values)
    refuse_baked(traced)
    named_as_before(traced, gm)
    for node, source in zip(*(g.graph.find_nodes(op="placeholder") for g in (traced, gm)), strict=False):
        node.meta[LABEL] = label_of(str(source.target))
    return traced


def refuse_baked(traced: GraphModule) -> None:
    """CaptureError where a tensor that is known at run time alone was recorded as a constant."""
    for node in traced.graph.find_nodes(op="get_attr"):
        held = getattr(traced, str(node.target), None)
        if isinstance(held, FakeTensor) or is_traceable_wrapper_subclass(held):
            raise CaptureError(f"it reads what is inside a tensor of another class, as a {type(held).__name__}")


def label_of(placeholder: str) -> str:
    """The user's name in Dynamo's: q of L_q_, sinks of L_self_modules_attention_parameters_sinks_; "" of arg0_1."""
    name = re.sub(r"^(.*_(parameters|buffers)_|L_)", "", placeholder).strip("_")
    return "" if re.fullmatch(r"(arg|args|primals|s)_?\d+(_\d+)?", name) else name


def traced_beside_others(gm: GraphModule, values: Sequence[Any]) -> GraphModule:
    """`traced_whole`, which tensors of other classes may not bear."""
    others = {type(x).__name__ for x in values if isinstance(x, Tensor) and is_traceable_wrapper_subclass(x)}
    try:
        return traced_whole(gm, values)
    except Exception as error:
        if not others:
            raise
        kinds = ", ".join(sorted(others))
        raise CaptureError(f"it is given tensors of the class {kinds}, with which it cannot be traced") from error


def traced_whole(gm: GraphModule, values: Sequence[Any]) -> GraphModule:
    """`gm` in ATen, whatever it holds."""
    with fx_traceback.preserve_node_meta():
        run = functools.partial(Retrace(written_out(gm)).run, enable_io_processing=False)
        traced = make_fx(run, pre_dispatch=True)(*values)
    traced.graph.set_codegen(copy.copy(gm.graph._codegen))
    views_apart(traced.graph)
    writes_apart(traced.graph)
    without_dead_code(traced)
    return traced


VIEWS_IN_PLACE = ("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_")


def views_apart(graph: Graph) -> None:
    """x.squeeze_() as x.squeeze(): the same memory and values. Only where nothing reads x under its old name again."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        name = op_name(node)
        if name in VIEWS_IN_PLACE and all(order[u] <= order[node] for u in node.args[0].users):
            overload = "int" if name == "transpose_" else node.target._overloadname
            node.target = getattr(getattr(torch.ops.aten, name[:-1]), overload)


def writes_apart(graph: Graph) -> None:
    """A write into x[:, :] as one into x, which is read under the name of what was written from then on: with symbolic
    lengths PyTorch takes every slice of x[:, :, mask] = c, though it takes all of x."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.nodes:
        target: Any = node.args[0] if node.args else None
        source = target
        while isinstance(source, Node) and takes_all(source):
            source = source.args[0]
        if source is not target and source.op == "call_function" and written_arguments(node) == [target]:
            node.args = (source, *node.args[1:])
            for user in [u for u in source.users if order[u] > order[node]]:
                user.replace_input_with(source, node)


def takes_all(node: Node) -> bool:
    """Whether `node` is x[:] of some axis."""
    return op_name(node) == "slice" and node.args[2:] in ((0, sys.maxsize), (None, sys.maxsize), (0, sys.maxsize, 1))


def without_dead_code(module: GraphModule) -> None:
    """Remove what nothing reads and nobody notices."""
    erase_dead(module.graph)
    module.recompile()


def inline(
    before: Node, fn: Callable[..., Any], inputs: Sequence[Node], kind: Hashable = None, known: Known | None = None
) -> Node:
    """Put the ATen nodes of fn(*inputs) in front of `before`, as made at its source line. Returns fn's result.

    `known` keeps what was traced, for all functions of one `kind` on inputs that lie alike.
    """
    values = [n.meta["val"] for n in inputs]
    with values[0].fake_mode, before.graph.inserting_before(before):
        traced = remembered(fn, values, kind, known if known is not None else {})
        placeholders = traced.graph.find_nodes(op="placeholder")
        names: dict[Node, Node] = dict(zip(placeholders, inputs, strict=True))
        made: dict[Node, Any] = dict(zip(placeholders, values, strict=True))
        for node in traced.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
                made[node] = node.target(*args, **kwargs)
                names[node] = before.graph.node_copy(node, names.__getitem__)
                line = {k: v for k, v in before.meta.items() if k == "stack_trace"}  # None is not the same as none
                names[node].meta = {"val": made[node], **line}
    return names[traced.graph.output_node().args[0]]  # type: ignore[index]


Known = dict[Hashable, GraphModule]


def remembered(fn: Callable[..., Any], values: Sequence[Any], kind: Hashable, known: Known) -> GraphModule:
    """The ATen calls of fn(*values), traced unless they are known."""
    try:
        key = kind, described(values, [])
    except Unusual:  # lengths are symbolic
        return make_fx(fn, pre_dispatch=True)(*values)
    if key not in known:
        known[key] = make_fx(fn, pre_dispatch=True)(*values)
    return known[key]
