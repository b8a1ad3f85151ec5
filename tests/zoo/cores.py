"""Attention cores in Dynamo's graphs, counted without fusecomp's help.

A core is a softmax whose scores come from a matrix product, and whose weights reach one, through pointwise operations
and rearrangements alone; or a call of F.multi_head_attention_forward that forms its weights.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.fx import GraphModule, Node

SOFTMAX = {torch.softmax, torch.nn.functional.softmax, torch.special.softmax, "softmax"}
PRODUCT = {torch.matmul, torch.bmm, torch.mm, operator.matmul, torch.einsum, torch.functional.einsum, torch.baddbmm,
           "matmul", "bmm", "mm", "__matmul__", "baddbmm"}  # fmt: skip
THROUGH = set(
    """dropout feature_dropout to type type_as float half bfloat16 double view reshape transpose permute
    contiguous expand expand_as mul imul where masked_fill masked_fill_ getitem clone unsqueeze squeeze flatten narrow
    nan_to_num nan_to_num_ sub isub sub_ rsub add iadd add_ mul_ div truediv itruediv div_ pad repeat roll chunk split
    cat concat stack swapaxes swapdims movedim detach as_strided slice tanh clamp amax max min minimum maximum neg tril
    triu unflatten view_as repeat_interleave index_select broadcast_to T mT alias copy_ sigmoid softplus relu gather
    scatter setitem masked_scatter diagonal index_put_ new_zeros zeros_like unfold conv2d einsum""".split()
)
"""Operations that a core may hold besides its products and its softmax."""
FARTHEST = 400
"""Nodes looked at before the search for a product is given up."""


def cores(graph: GraphModule) -> Iterator[Node]:
    """The softmax, or the call, of each core of a graph and of its bodies."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            yield from (n for n in module.graph.nodes if is_core(n))


def is_core(node: Node) -> bool:
    if word(node) == "multi_head_attention_forward":
        return bool(node.kwargs.get("need_weights", True))
    return called(node) in SOFTMAX and leads(node, lambda n: n.all_input_nodes) and leads(node, lambda n: n.users)


def leads(node: Node, step: Callable[[Node], Iterable[Node]]) -> bool:
    """Whether steps through pointwise operations and rearrangements lead to a product."""
    seen, queue = {node}, deque([node])
    while queue and len(seen) < FARTHEST:
        for n in step(queue.popleft()):
            if is_product(n):
                return True
            if n not in seen and word(n) in THROUGH:
                seen.add(n)
                queue.append(n)
    return False


def is_product(node: Node) -> bool:
    """A product of two tensors; an einsum of one is a rearrangement."""
    return called(node) in PRODUCT and (word(node) != "einsum" or len(node.all_input_nodes) > 1)


def called(node: Node) -> object:
    """What a node calls: a function, or the name of a method."""
    return node.target if node.op in ("call_function", "call_method") else None


def word(node: Node) -> str:
    target = called(node)
    return target if isinstance(target, str) else getattr(target, "__name__", "")
