"""Tensors that the module of a graph holds. Parameters and buffers are read at every call, under the names that they
have; a number that the program writes down never changes.

    scale = self.scale                                              read again
    fill = lift_fresh_copy(self.lifted_tensor_0)                    torch.tensor(-inf)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fusecomp.graph.facts import op_name

STATE = "fusecomp_state"
"""In a node's meta: it reads a parameter or a buffer of the graph's."""


def held(module: nn.Module, target: object) -> object:
    """What a get_attr node reads."""
    found: object = module
    for name in str(target).split("."):
        found = getattr(found, name, None)
    return found


def reads(module: GraphModule) -> Iterator[tuple[Node, Tensor]]:
    """The nodes that read tensors, and those."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(tensor := held(module, node.target), Tensor):
            yield node, tensor


def named_as_before(traced: GraphModule, gm: GraphModule) -> None:
    """Let `traced`, made of `gm` by a trace that numbers what it meets, hold parameters and buffers as `gm` does."""
    traced._tracer_cls = gm._tracer_cls  # what unpickles it: that of make_fx finds no parameters in submodules
    known = {id(x): name for name, x in (*gm.named_parameters(), *gm.named_buffers())}
    found = list(reads(traced))
    for _, name in {(id(x), str(node.target)) for node, x in found}:
        delattr(traced, name)
    for node, x in found:
        if id(x) in known:
            node.target = known[id(x)]
            node.meta[STATE] = True
            hold(traced, gm, node.target)
    for node, x in found:
        if id(x) not in known:
            while (other := held(traced, node.target)) is not None and other is not x:
                node.target = f"{node.target}_"
            traced.register_buffer(str(node.target), x, persistent=False)


def hold(traced: GraphModule, gm: GraphModule, name: str) -> None:
    """One parameter or buffer of `gm`, or the submodule that it is in."""
    first, *inside = name.split(".")
    x = getattr(gm, first)
    if inside or isinstance(x, nn.Parameter):
        setattr(traced, first, x)
    else:
        traced.register_buffer(first, x, persistent=first not in gm._non_persistent_buffers_set)


def numbers(module: GraphModule) -> dict[str, Tensor]:
    """Node -> what it reads, where that never changes."""
    return {n.name: x for n, x in reads(module) if not n.meta.get(STATE) or (n.users and all(map(lifted, n.users)))}


def single(tensor: Tensor) -> bool | int | float | None:
    """The number in a tensor of one element."""
    return None if isinstance(tensor, FakeTensor) or tensor.numel() != 1 else tensor.item()


def lifted(reader: Node) -> bool:
    return op_name(reader) in ("lift_fresh", "lift_fresh_copy")
