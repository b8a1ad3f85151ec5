"""F.scaled_dot_product_attention, written out as what it means, so that the recogniser has one thing to read.

Only calls that PyTorch's own flash kernels do not run are written out: those with a mask, with dropout on a CPU, and of
few queries on keys and values that are fetched by a table, which those kernels would have to be copied for.
What a mask and is_causal mean together depends on the kernel that PyTorch chooses, so such a call is its own too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from fusecomp.graph.capture import Known, inline
from fusecomp.graph.facts import op_name, shape, value
from fusecomp.graph.rewriting import Written, write
from fusecomp.graph.sdpa import CALL, How, definition, mask_of
from fusecomp.ir.expr import Const
from fusecomp.patterns.lift import VIEWS
from fusecomp.patterns.operands import FETCHES

PLAIN = "PyTorch's own flash kernels run a scaled_dot_product_attention call that has no mask tensor"
FEW_QUERIES = 16
"""At most so many are decoding, for which the generated kernels split the keys."""
BOTH = "a scaled_dot_product_attention call with a mask tensor and is_causal, whose meaning depends on PyTorch's kernel"


def how_of(call: Node) -> How:
    return How.of(tuple(map(value, call.args)), {k: value(v) for k, v in call.kwargs.items()})


def plain(call: Node) -> str:
    """Why PyTorch's own kernels run an SDPA call. "" for another."""
    how = how_of(call)
    if mask_of(call.args, call.kwargs) is not None:
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
    mask, how = mask_of(call.args, call.kwargs), how_of(call)
    inputs = [*call.args[:3], *([] if mask is None else [mask])]
    return inline(call, lambda *tensors: definition(how, *tensors), inputs, how, known)  # type: ignore[arg-type]
