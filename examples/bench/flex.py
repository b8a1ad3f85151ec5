"""FlexAttention with its defaults on the workloads of `tiles.py`, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from workloads import Case

from fusecomp.bench.variant import VARIANTS, Mods, Shape
from fusecomp.bench.variants import CAP, WINDOW

Run = Callable[[], Any]


def knows(case: Case) -> bool:
    """Half precision, square or one query, a mask that it is told; its backward pass is one call."""
    square = case.m in (None, case.n)
    return square and case.kind in ("forward", "keys") and case.dtype in ("bf16", "fp16") and not case.bias


def flex_run(case: Case) -> Run:
    """One launch; of the backward pass both kernels, whose times the record gives apart."""
    kv, dv = case.kv_heads or case.heads, case.dv or case.d
    shapes = [(case.heads, case.d), (kv, case.d), (kv, dv)]
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float16
    learns = case.kind == "keys"
    q, k, v = (torch.randn(case.batch, h, case.n, d, device="cuda", dtype=dtype, requires_grad=learns)
               for h, d in shapes)  # fmt: skip
    score, seen = told(case, q.device)
    mask = create_block_mask(seen, None, None, case.n, case.n, q.device) if seen else None
    attend = torch.compile(flex_attention, dynamic=False)
    given = {"score_mod": score, "block_mask": mask, "enable_gqa": kv != case.heads}
    if not learns:
        return lambda: attend(q, k, v, **given)
    out = attend(q, k, v, **given)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def told(case: Case, device: torch.device) -> Mods:
    """score_mod and mask_mod of the variant that `fusecomp bench` times too."""
    assert case.softcap in (None, CAP)
    assert case.window in (None, WINDOW)
    masked = f"window {WINDOW}" if case.window else "causal" if case.causal else "full"
    variant = VARIANTS["soft cap" if case.softcap else "ALiBi" if case.alibi else masked]
    shape = Shape(case.batch, case.heads, case.n, case.d)
    return variant.flex(shape, *variant.extra(shape, device)) if variant.flex else (None, None)
