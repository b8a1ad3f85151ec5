"""Br x Bc, warps and stages of one region on one device."""

from __future__ import annotations

from collections.abc import Mapping

from fusecomp.errors import PlanError
from fusecomp.ir.region import AttentionRegion, extent
from fusecomp.planning.chunks import chunks
from fusecomp.planning.device import Device, current
from fusecomp.planning.tile import Rejected, TilePlan

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def plan(region: AttentionRegion, sizes: Mapping[str, int], device: Device | None = None, budget: int | None = None) -> TilePlan:
    device = device or current()
    budget = min(budget or device.smem_bytes, device.smem_bytes)
    d = tuple(chunks(extent(p.d)) for p in region.products)
    dv = chunks(extent(region.dv))
    width = max(WIDTH.get(p.dtype, 4) for p in region.products)
    wide, m = sum(map(sum, d)), sizes.get("M", 1)
    group = region.q_per_kv()
    decode = m * group <= 16 and sizes.get("N", 0) >= 512
    rejected = []
    for bm, bn, warps, stages in _candidates(m, wide, width, decode):
        smem = width * (bm * wide + stages * bn * (wide + sum(dv)))
        if smem <= budget:
            return TilePlan("decode" if decode else "prefill", bm, bn, d, dv, warps, stages, group if decode else 1, None,
                            tuple(rejected), device.name)
        rejected.append(Rejected(bm, bn, warps, stages, f"needs {smem} B of shared memory, {budget} usable"))
    raise PlanError(f"nothing fits in {budget} B: the smallest tile needs {smem} B")


def _candidates(m, wide, width, decode):
    if decode or m <= 16:
        yield from ((16, 64, 4, 3), (16, 32, 4, 2), (16, 16, 4, 1))
        return
    if width == 4:
        yield from ((64, 32, 4, 2), (32, 32, 4, 2))
    elif wide <= 64:
        yield from ((128, 128, 8, 3), (128, 64, 4, 3))
    elif wide <= 128:
        yield from ((64, 64, 4, 3), (64, 64, 4, 2))
    yield from ((64, 32, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1))
