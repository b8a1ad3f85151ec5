"""F.scaled_dot_product_attention, written out, so that the recogniser has one thing to read.

    SDPA(Q, K, V, mask) = softmax(scale * Q K^T + mask) V,   a query whose mask is all False gives 0

Only calls with a mask are written out: without one, PyTorch's own flash kernels already run the call.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import inline
from fusecomp.graph.facts import op_name, value
from fusecomp.patterns.lift import argument

CALL = "scaled_dot_product_attention"
PLAIN = "PyTorch's own flash kernels run a scaled_dot_product_attention call that has no mask tensor"


def definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """The meaning of one call. q [.., H, M, D], k and v [.., Hkv, N, D], mask bool (True counts) or additive."""
    if k.dim() > 2 and k.shape[-3] != q.shape[-3]:
        groups = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
    else:
        weights = torch.softmax(scores + mask, -1)
    return torch.matmul(weights.to(v.dtype), v)


def masked_calls(module: GraphModule) -> list[Node]:
    """SDPA calls that PyTorch's flash kernels do not take: those with a mask tensor and without dropout."""
    calls = [n for n in module.graph.nodes if op_name(n) == CALL]
    return [n for n in calls if argument(n, 3, "attn_mask") is not None and not argument(n, 4, "dropout_p", 0.0)]


def plain_calls(module: GraphModule) -> list[Node]:
    """The other SDPA calls, which stay as they are."""
    masked = set(masked_calls(module))
    return [n for n in module.graph.nodes if op_name(n) == CALL and n not in masked]


def write_out(module: GraphModule) -> dict[Node, Node]:
    """Put each masked call's definition in its place. Returns {definition's output: the call}, for `put_back`."""
    written = {}
    for call in masked_calls(module):
        with contextlib.suppress(TypeError):  # a scale that is not a number
            written[_write_out(call)] = call
    return written


def _write_out(call: Node) -> Node:
    nodes: list[Any] = [*call.args[:3], argument(call, 3, "attn_mask")]
    scale = value(argument(call, 6, "scale"))
    output = inline(call, lambda q, k, v, m: definition(q, k, v, m, scale), nodes)
    call.replace_all_uses_with(output)
    return output


def put_back(written: dict[Node, Node], taken: set[Node]) -> None:
    """Give the calls that were not taken their place again."""
    for output, call in written.items():
        if output not in taken:
            output.replace_all_uses_with(call)
