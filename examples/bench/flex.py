"""FlexAttention with its defaults on the workloads of `tiles.py`, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from workloads import Case

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
    mask = create_block_mask(_mask(case), None, None, case.n, case.n, device="cuda") if _masked(case) else None
    attend = torch.compile(flex_attention, dynamic=False)
    given = {"score_mod": _score(case), "block_mask": mask, "enable_gqa": kv != case.heads}
    if not learns:
        return lambda: attend(q, k, v, **given)
    out = attend(q, k, v, **given)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def _masked(case: Case) -> bool:
    return case.causal or case.window is not None


def _mask(case: Case) -> Callable[..., Any]:
    window = case.window or case.n

    def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < window)

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q >= kv

    return seen if case.window else causal


def _score(case: Case) -> Callable[..., Any] | None:
    cap, heads = case.softcap, case.heads

    def capped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return cap * torch.tanh(s / cap)

    def sloped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + torch.exp2(-8 * (h + 1) / heads) * (kv - q)

    return capped if cap else sloped if case.alibi else None
