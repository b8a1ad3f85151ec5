"""The CPU lowering is the region's meaning, holds no S, and outruns eager on long inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from regions import attention, b, kv_idx, load, q_idx, scaled_score
from torch import Tensor
from variants import VARIANTS, Variant, by_name

from fusecomp.ir.expr import Size
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion
from fusecomp.running import cpu


def run(region: AttentionRegion, args: tuple[Tensor, ...], sizes: dict[str, int], blocks: bool = False) -> Tensor:
    """The lowered region's output, in memory that nothing else has touched; `blocks` bars SDPA."""
    expected = evaluate(region, args, sizes)
    out = torch.full_like(expected, 123.0, dtype=args[0].dtype)
    if blocks:
        axis = cpu._by_axis(region, out)
        cpu.Blocks.of(region).run(axis, cpu.bind(region, args, sizes, torch.promote_types(out.dtype, torch.float32)))
    else:
        cpu.lower(region)(out, args, sizes)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return out


@pytest.mark.parametrize("blocks", [False, True], ids=["chosen", "blocks"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_lowering_means_the_region(variant: Variant, blocks: bool) -> None:
    args = variant.make_args()
    run(variant.region, args, variant.sizes(args), blocks)
