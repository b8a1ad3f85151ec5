"""What the recogniser finds in a function, without a kernel being made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from fusecomp.graph.capture import capture, placeholder_values
from fusecomp.ir.expr import text
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.attention import Declined, recognise
from fusecomp.patterns.build import Match
from fusecomp.patterns.written import write_out


def candidates(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[Match | Declined]:
    """Every candidate in the graphs of fn(*args), matched or declined."""
    found: list[Match | Declined] = []

    def look(gm: GraphModule, _: Any) -> Callable[..., Any]:
        captured = capture(gm, placeholder_values(gm))
        write_out(captured)
        found.extend(recognise(captured))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=look, dynamic=dynamic)(*args)
    torch._dynamo.reset()
    return found


def region_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> AttentionRegion:
    """The region of the one attention in `fn`."""
    found = candidates(fn, *args, dynamic=dynamic)
    matches = [m for m in found if isinstance(m, Match)]
    assert matches, [m.reason for m in found if isinstance(m, Declined)]
    assert len({m.output for m in matches}) == 1
    return matches[0].region


def mathematics(region: AttentionRegion) -> dict[str, Any]:
    """What a region says, as text: what two spellings of one attention must have in common."""
    return {
        "products": [(str(p.q), str(p.k), p.dtype) for p in region.products],
        "v": str(region.v),
        "score": text(region.score),
        "keep": [text(t) for t in region.keep],
        "filled": text(region.filled_score) if region.filled_score is not None else "",
        "fill": region.fill,
        "weight": text(region.weight),
        "sink": text(region.sink) if region.sink is not None else "",
        "empty_row": region.empty_row,
        "out_axes": region.out_axes,
        "dtypes": [o.dtype for o in region.operands],
    }
