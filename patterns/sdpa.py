"""F.scaled_dot_product_attention, written out, so that the recogniser has one thing to read.

    SDPA(Q, K, V, mask, p) = dropout(softmax(scale * Q K^T + mask), p) V,   a query whose mask is all False gives 0

Only calls that PyTorch's own flash kernels do not run are written out: those with a mask, with dropout on a CPU, and of
few queries on keys and values that are fetched by a table, which those kernels would have to be copied for.
What a mask and is_causal mean together depends on the kernel that PyTorch chooses, so such a call is its own too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fusecomp.graph.capture import Known, inline
from fusecomp.graph.facts import op_name, shape, value
from fusecomp.graph.rewriting import Written, write
from fusecomp.ir.expr import Const
from fusecomp.patterns.lift import VIEWS, argument
from fusecomp.patterns.operands import FETCHES

CALL = "scaled_dot_product_attention"
PLAIN = "PyTorch's own flash kernels run a scaled_dot_product_attention call that has no mask tensor"
FEW_QUERIES = 16
"""At most so many are decoding, for which the generated kernels split the keys."""
BOTH = "a scaled_dot_product_attention call with a mask tensor and is_causal, whose meaning depends on PyTorch's kernel"


@dataclass(frozen=True)
class How:
    """What a call says beside its tensors."""

    p: float
    causal: bool
    scale: float | None

    @staticmethod
    def of(call: Node) -> How:
        p, scale = value(argument(call, 4, "dropout_p", 0.0)), value(argument(call, 6, "scale"))
        return How(p, bool(argument(call, 5, "is_causal", False)), scale)


def definition(how: How, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The meaning of one call. q [.., H, M, D], k and v [.., Hkv, N, D], mask bool (True counts) or additive."""
    if k.dim() > 2 and k.shape[-3] != q.shape[-3]:
        groups = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scale = 1 / math.sqrt(q.shape[-1]) if how.scale is None else how.scale
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if how.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
    else:
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
    if how.p:
        weights = torch.dropout(weights, how.p, True)
    return torch.matmul(weights.to(v.dtype), v)


def plain(call: Node) -> str:
    """Why PyTorch's own kernels run an SDPA call. "" for another."""
    how = How.of(call)
    if argument(call, 3, "attn_mask") is not None:
        return BOTH if how.causal else ""
    dropped = how.p != 0 and value(call).device.type == "cpu"
    return "" if dropped or (few(call) and all(map(fetched, call.args[1:3]))) else PLAIN


def few(call: Node) -> bool:
    """Whether so few queries are asked that reading the keys is what takes the time."""
    m = shape(call)[-2]
    return isinstance(m, Const) and m.value <= FEW_QUERIES


def fetched(x: Any) -> bool:
    """Whether a tensor is rearranged from what a table names."""
    while op_name(x) in VIEWS:
        x = x.args[0]
    return op_name(x) in FETCHES


def calls(module: GraphModule) -> list[Node]:
    """Every SDPA call."""
    return [n for n in module.graph.nodes if op_name(n) == CALL]


def plain_calls(module: GraphModule) -> Iterator[tuple[Node, str]]:
    """The SDPA calls that stay as they are, and why."""
    return ((n, plain(n)) for n in calls(module) if plain(n))


def define(module: GraphModule) -> Iterator[Written]:
    """Put the definition of each other call in its place."""
    known: Known = {}
    for call in calls(module):
        if not plain(call):
            with contextlib.suppress(TypeError):  # a scale that is not a number
                yield write(call, _defined(call, known))


def _defined(call: Node, known: Known) -> Node:
    mask, how = argument(call, 3, "attn_mask"), How.of(call)
    inputs = [*call.args[:3], *([] if mask is None else [mask])]
    return inline(call, lambda *tensors: definition(how, *tensors), inputs, how, known)  # type: ignore[arg-type]
