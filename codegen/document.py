"""What a generated file says about itself: its name and its first page."""

from __future__ import annotations

from fusecomp.codegen.frame import Frame
from fusecomp.ir.expr import text
from fusecomp.ir.region import AttentionRegion, extent
from fusecomp.planning.tile import TilePlan


def kernel_name(frame: Frame, key: str) -> str:
    """attention_causal_window_gqa3_d64_bfloat16_1a2b3c4d: what it does, then its key."""
    region = frame.region
    words = [
        *(["causal"] if frame.heavy_last else []),
        *(["window"] if any(x.slope for x in frame.reach.lower) else []),
        *(["masked"] if frame.reach.loose else []),
        *([f"gqa{region.q_per_kv()}"] if region.q_per_kv() > 1 else []),
        *(["paged"] if frame.addressed.tiles else []),
        *(["sink"] if frame.sink is not None else []),
        *(["decode"] if frame.plan.skeleton == "decode" else []),
    ]
    dv = extent(region.dv)
    sizes = f"d{region.head_size}" + (f"v{dv}" if dv != region.head_size else "")
    return "_".join(["attention", *words, sizes, region.products[0].dtype, key[:8]])


def document(region: AttentionRegion, plan: TilePlan, name: str) -> list[str]:
    """The mathematics, what is read, the plan and its predicted cost, and how to make this file again."""
    shapes = [f"    {o.name:<10} [{', '.join(map(text, o.shape))}]  {o.dtype}" for o in region.operands]
    return [
        *str(region).splitlines(),
        "",
        "Reads, through run-time strides:",
        *shapes,
    ]
