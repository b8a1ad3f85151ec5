"""Attention without a mask or any change of its scores is PyTorch's own scaled_dot_product_attention, and goes there.

    O = softmax(c Q K^T) V

On a GPU its cuDNN and flash kernels run that faster than a generated one (examples/bench/records/kernels_h200.json),
and Inductor calls them where it recognises the spelling. The shortest attention runs a generated kernel, which takes
3.7 us where what Inductor calls takes 5.6 (N 128), and 7.2 where that takes 9.2 (N 512, 8 heads; small_h200.json). So
does all else, causal masks included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fusecomp.graph.capture import inline
from fusecomp.ir.expr import Const, Score, Var, variables
from fusecomp.ir.region import Access, AttentionRegion, extent
from fusecomp.patterns.build import Match
from fusecomp.patterns.sdpa import FEW_QUERIES
from fusecomp.planning.plan import plan
from fusecomp.running.blocks import folded
from fusecomp.running.operator import Launch
from fusecomp.running.substitute import behind_stops, take_place

DEVICES = ("cuda",)
HALF = ("bfloat16", "float16")
LEAST_SECONDS = 1e-5
"""Predicted for a generated kernel. At 1.5e-5 (N 512, 64 heads) both take 15 us, and PyTorch's is called sooner
(probes_h200.json)."""
WIDEST = 256
"""Head size up to which PyTorch's fused kernels go; it must be a multiple of 8."""


def expresses(region: AttentionRegion) -> bool:
    """Whether the region is softmax(c Q K^T) V on half-precision tensors [batch axes, rows, D] in any order of axes."""
    plain = not region.keep and region.sink is None and region.filled_score is None and region.weight == Const(1.0)
    if region.lse or not plain or len(region.products) != 1 or len(region.batch) > 2 or region.empty_row != "nan":
        return False
    accesses = (region.products[0].q, region.products[0].k, region.v)
    dtypes = {region.operand(a.operand).dtype for a in accesses} | {region.pv_dtype, region.products[0].dtype}
    d = extent(region.dv)
    fits = region.head_size == d and d % 8 == 0 and d <= WIDEST and len(dtypes) == 1 and dtypes <= set(HALF)
    return fits and folded(region)[0] == Score(0) and all(axes_of(region, a) is not None for a in accesses)


def takes(match: Match, sizes: Mapping[str, int]) -> bool:
    """Whether a match on this device is handed over."""
    asked = match.device.type in DEVICES and sizes["M"] > FEW_QUERIES
    return asked and expresses(match.region) and not short(match.region, sizes)


def short(region: AttentionRegion, sizes: Mapping[str, int]) -> bool:
    """Whether a generated kernel is predicted to take less time than PyTorch's begins with."""
    cost = plan(region, sizes).cost
    return cost is not None and cost.seconds < LEAST_SECONDS


def axes_of(region: AttentionRegion, access: Access) -> list[int] | None:
    """Where (batch axes, rows, D) stand in the tensor of one access; None where it is more than a permutation.

    A batch axis that no access names has length 1, as has every axis of a tensor that is read at 0 and has no more."""
    accesses = (region.products[0].q, region.products[0].k, region.v)
    named = frozenset().union(*(variables(e) for a in accesses for e in a.index))
    single = iter([v.name for v in region.batch if v.name not in named])
    lengths = region.operand(access.operand).shape
    ones = [e == Const(0) and n == Const(1) for e, n in zip(access.index, lengths, strict=True)]
    pairs = zip(access.index, ones, strict=True)
    names = [e.name if isinstance(e, Var) else next(single, "") if one else "" for e, one in pairs]
    row = region.q_idx.name if access == region.products[0].q else region.kv_idx.name
    column = region.dv.name if access == region.v else region.products[0].d.name
    wanted = [*(v.name for v in region.batch), row, column]
    return [names.index(n) for n in wanted] if sorted(names) == sorted(wanted) else None


def attend(region: AttentionRegion, tensors: Sequence[Tensor]) -> Tensor:
    """O in the order of region.out_axes, by scaled_dot_product_attention on [b, h, rows, D]."""
    named = dict(zip([o.name for o in region.operands], tensors, strict=True))
    rows = []
    for access in (region.products[0].q, region.products[0].k, region.v):
        x = named[access.operand].permute(axes_of(region, access) or [])
        for _ in range(4 - x.dim()):
            x = x.unsqueeze(0)
        rows.append(x)
    scale = folded(region)[1][0]
    out = torch.nn.functional.scaled_dot_product_attention(*rows, scale=scale)
    for _ in range(2 - len(region.batch)):
        out = out.squeeze(0)
    axes = [*(v.name for v in region.batch), region.q_idx.name, region.dv.name]
    return out.permute([axes.index(name) for name in region.out_axes])


def launch(region: AttentionRegion) -> Launch:
    """launch(out, tensors, sizes), for verification."""

    def run(out: Tensor, tensors: Sequence[Tensor], _: Sequence[int]) -> None:
        out.copy_(attend(region, tensors))

    return run


def substitute(match: Match) -> None:
    """Put the call in the place of match.output, and remove the nodes between."""
    rank = match.output.meta["val"].dim()

    def call(*tensors: Tensor) -> Tensor:
        found = attend(match.region, tensors)
        return found.squeeze(-1) if found.dim() > rank else found

    with match.output.graph.inserting_before(match.output):
        inputs = behind_stops(match, match.inputs)
    take_place(match, inline(match.output, call, inputs))
