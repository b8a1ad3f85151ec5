"""What one call of PyTorch is in ATen calls, recorded so that it holds for every call of its kind."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fusecomp.graph.facts import storage, value, word, written_arguments

CONSTANTS = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout,
             torch.memory_format)  # fmt: skip


class Unusual(Exception):
    """This graph is traced whole."""


def dynamo_value(node: Node) -> Any:
    """The fake tensors that Dynamo found a node to be."""
    return node.meta.get("example_value")


def static(x: Any) -> bool:
    """Whether a value is no symbolic number, and no tensor that has some in its shape."""
    if isinstance(x, Tensor):
        return isinstance(x, FakeTensor) and not x._has_symbolic_sizes_strides
    return not isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool)


def span(t: Tensor) -> Any:
    """Where in its memory a tensor lies."""
    return t.shape, t.stride(), t.storage_offset()


# ----------------------------------------------------------------------------------------------------------------
# Which calls are equal


def described(x: Any, tensors: list[Tensor]) -> Hashable:
    """All that a recording may depend on in an argument. Collects the tensors met. Raises Unusual."""
    match x:
        case Tensor():
            place = next((i for i, t in enumerate(tensors) if t is x), len(tensors))
            if place == len(tensors):
                tensors.append(x)
            return place, arrangement(x)
        case list() | tuple():
            return type(x), *(described(v, tensors) for v in x)
        case dict():
            return dict, *((k, described(v, tensors)) for k, v in x.items())
        case slice():
            return slice, described((x.start, x.stop, x.step), tensors)
        case _ if isinstance(x, CONSTANTS):
            return type(x), repr(x)
    raise Unusual(f"an argument is a {type(x).__name__}")


def arrangement(t: Tensor) -> Hashable:
    """All that a recording may depend on in a tensor. Where its value is known, a recording may depend on that too."""
    if not static(t) or t.layout is not torch.strided:
        raise Unusual(f"an argument is a {type(t).__name__}")
    constant = id(t.constant) if t.constant is not None else None  # type: ignore[attr-defined]
    return type(t), t.dtype, t.device, *span(t), t.requires_grad, t.is_conj(), t.is_neg(), constant


# ----------------------------------------------------------------------------------------------------------------
# What is recorded


def record(node: Node, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> GraphModule:
    """The ATen calls that one call is. Raises Unusual where they are more than that."""

    def call(*_: Tensor) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    recorded = make_fx(call, pre_dispatch=True)(*tensors)
    for n in recorded.graph.nodes:
        if n.op == "call_function" and not recordable(n):
            raise Unusual(f"{word(node)} calls {n.target}")
    return recorded


def recordable(node: Node) -> bool:
    """Whether an ATen call may be written again elsewhere: it is no more than its name and its arguments."""
    if isinstance(node.target, OpOverload):
        return not (reshaping(node.target) or "eager_input_vals" in node.meta)
    return node.target is operator.getitem


def reshaping(op: OpOverload) -> bool:
    """Whether an operator changes more of an existing tensor than its elements."""
    return torch.Tag.inplace_view in op.tags and op is not torch.ops.aten.detach_.default


def reshapes(node: Node) -> bool:
    """Whether a Dynamo call may change more of an existing tensor than its elements: `t_`, `resize_`, `out=`."""
    name = word(node)
    packet = getattr(torch.ops.aten, name, None) if name.endswith("_") and not name.endswith("__") else None
    inplace = packet is not None and any(reshaping(getattr(packet, o)) for o in packet.overloads())
    return inplace or name in ("detach_", "requires_grad_") or "out" in node.kwargs


def results(recorded: GraphModule, node: Node) -> dict[Node, Any]:
    """The values of the nodes that a recording returns, as Dynamo says, and of those in the same memory.

    A result in the memory of an input is left out if it writes there: it is that input.
    """
    said = dynamo_value(node)
    returned = pytree.tree_leaves(recorded.graph.output_node().args[0])
    told = pytree.tree_leaves(said) if said is not None else [None] * len(returned)
    if len(told) != len(returned):
        raise Unusual(f"{word(node)} gives another structure than Dynamo says")
    known = {n: v for n, v in zip(returned, told, strict=True) if isinstance(n, Node) and isinstance(v, Tensor)}
    given = {storage(n) for n in recorded.graph.find_nodes(op="placeholder")}
    fresh = {storage(n): v for n, v in known.items() if storage(n) not in given}
    for n in recorded.graph.nodes:
        if n not in known and storage(n) in fresh:
            known[n] = fresh[storage(n)].as_strided(*span(value(n)))
    return {n: v for n, v in known.items() if storage(n) in fresh or not written_arguments(n)}
