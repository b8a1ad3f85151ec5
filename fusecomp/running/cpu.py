"""A region on CPU tensors, without ever holding S: M x N elements for a head.

Where the region is what SDPA's flash kernel computes, that kernel runs; everything else goes by blocks of rows. Floats
are worked in float32 (float64 if an operand is), so that half inputs are rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusecomp.codegen.logsumexp import saved
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Const, Load, Score, Var, variables
from fusecomp.ir.ranges import reach
from fusecomp.ir.reference import Env, Span, bind, read
from fusecomp.ir.region import Access, AttentionRegion, extent
from fusecomp.running.blocks import Blocks, folded

Kernel = Callable[..., None]
"""kernel(out, tensors, sizes): fills `out`, of any strides; tensors and sizes in the region's orders. With `lse` too,
[batch axes, M], it fills that with log sum exp(S)."""


def lower(region: AttentionRegion) -> Kernel:
    """The CPU kernel of a region."""
    blocks, flash = Blocks.of(region), flash_form(region)

    @torch.no_grad()
    def kernel(
        out: Tensor, tensors: Sequence[Tensor], sizes: Mapping[str, int] | Sequence[int], lse: Tensor | None = None
    ) -> None:
        env = bind(region, tensors, sizes, _working(tensors))
        target = _by_axis(region, out)
        if lse is not None and saved(region):
            lse[..., 1] = 0.0  # what lies above the maximum: here the first is the whole
            lse = lse[..., 0]
        if out.numel() and (lse is not None or not (flash and flash.run(target, env))):
            blocks.run(target, env, lse)

    return kernel


def _working(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _by_axis(region: AttentionRegion, out: Tensor) -> Tensor:
    """`out` seen as (batch axes, q_idx, dv)."""
    axes = [*(v.name for v in region.batch), region.q_idx.name, region.dv.name]
    return out.permute([region.out_axes.index(name) for name in axes])


# ----------------------------------------------------------------------------------------------------------------
# SDPA's flash kernel

HUGE = 1e30
"""Scores up to which no sum of one and a finite mask is infinite in float32."""


@dataclass(frozen=True)
class Flash:
    """softmax(scale * score [+ mask], causal or not) V: what SDPA's CPU flash kernel computes."""

    region: AttentionRegion
    scale: float
    causal: bool
    mask: Load | None

    def run(self, out: Tensor, env: Env) -> bool:
        """Fill `out` (batch axes, q_idx, dv); False where the layout rules the kernel out, or some row might have no
        finite score: it is NaN in eager, 0 in SDPA."""
        r = self.region
        mask = None if self.mask is None else self._mask(env)
        rows = (r.q_idx, r.kv_idx, r.kv_idx)
        q, k, v = (self._heads(a, row, d, env) for (a, d), row in zip(_factors(r), rows, strict=True))
        grouped = q.shape[-3] != k.shape[-3]
        if any(x.stride(-1) != 1 for x in (q, k, v)) or 0 in k.shape or (mask is None) != (self.mask is None):
            return False
        seen = mask is None or bool((mask.amax(-1) > -math.inf).all())
        if not seen or not abs(self.scale) * _largest(q, k) < HUGE:
            return False
        how = {"is_causal": self.causal, "scale": self.scale, "enable_gqa": grouped}
        _four(out).copy_(scaled_dot_product_attention(q, k, v, mask, **how))
        return True

    def _mask(self, env: Env) -> Tensor | None:
        """The mask with four dimensions, in the operands' dtype: SDPA takes no other."""
        assert self.mask is not None
        mask = read(env.tensors[self.mask.tensor], self.mask.index, env)
        same = mask.dtype == env.tensors[self.region.products[0].q.operand].dtype
        return _four(mask) if same else None

    def _heads(self, access: Access, row: Var, d: Var, env: Env) -> Tensor:
        """An operand with four dimensions; one whose heads are read at h // group keeps its own heads."""
        batch, index = self.region.batch, access.index
        spans: dict[str, Span] = {}
        if row != self.region.q_idx and (group := _group(self.region, access)) > 1:
            head = batch[-1]
            ratio = apply("floordiv", head, Const(group))
            index = tuple(head if e == ratio else e for e in index)
            spans[head.name] = range(len(env.spans[head.name]) // group)
        env = env.at(**spans).over(*(v.name for v in batch), row.name, d.name)
        return _four(read(env.tensors[access.operand], index, env).expand(env.shape))


def _largest(q: Tensor, k: Tensor) -> float:
    """What no |score| exceeds; NaN or infinite where q or k hold such."""
    return math.prod(max(-float(x.min()), float(x.max())) for x in (q, k)) * q.shape[-1]


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.ndim)]


def _factors(region: AttentionRegion) -> list[tuple[Access, Var]]:
    (p,) = region.products
    return [(p.q, p.d), (p.k, p.d), (region.v, region.dv)]


def _group(region: AttentionRegion, access: Access) -> int:
    """Query heads per head of this operand: G where it is read at h // G, and at h nowhere else."""
    if not region.batch:
        return 1
    head = region.batch[-1].name
    reads = [e for e in access.index if head in variables(e)]
    match reads:
        case [Apply("floordiv", (Var(name, _), Const(int(group))))] if name == head:
            return group
    return 1


def keeps_the_past(region: AttentionRegion) -> bool:
    """Whether the mask is kv_idx <= q_idx and nothing else."""
    bounds = reach(region.keep)
    if bounds.lower or bounds.loose or len(bounds.upper) != 1:
        return False
    return bounds.upper[0].edge == apply("add", region.q_idx, Const(1))


def flash_form(region: AttentionRegion) -> Flash | None:
    """The region as SDPA computes it, or None where it is anything else: SDPA would hold S, or mean something else."""
    plain = region.sink is None and region.weight == Const(1.0) and region.filled_score is None
    if not plain or len(region.products) != 1 or len(region.batch) > 2:
        return None
    dtypes = {region.operand(a.operand).dtype for a, _ in _factors(region)}
    if (
        dtypes != {region.pv_dtype}
        or dtypes != {region.products[0].dtype}
        or len({extent(d) for _, d in _factors(region)}) > 1
    ):
        return None
    groups = {_group(region, a) for a, _ in _factors(region)[1:]}
    causal = keeps_the_past(region)
    if len(groups) > 1 or (region.keep and not causal):
        return None
    score, (scale,) = folded(region)
    match score:
        case Score(0):
            return Flash(region, scale, causal, None)
        case Apply("add", (Score(0), Load() as mask)) | Apply("add", (Load() as mask, Score(0))) if not causal:
            return Flash(region, scale, False, mask)
    return None
