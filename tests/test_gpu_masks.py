"""On a real GPU: gradients where a mask is data.

    pytest -n 0 -m gpu tests/test_gpu_masks.py
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_gpu import DTYPES, FLOOR, STRICT, off
from torch import Tensor

import fusecomp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["causal", "window", "blocks"])
def test_gradients_visit_what_a_mask_shows(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles are hidden and shown, others cut by the mask or by the ends."""
    torch._dynamo.reset()
    fusecomp.reset()
    monkeypatch.setattr("fusecomp.planning.visits.SHARE", math.inf)
    i, j = torch.arange(515, device="cuda")[:, None], torch.arange(700, device="cuda")
    shown = {"causal": j <= i, "window": (i - j).abs() < 90, "blocks": ((i // 130 + j // 140) % 2 == 0) | (j == 7)}
    inputs = [torch.randn(2, 4, n, 64, device="cuda") for n in (515, 700, 700, 515)]

    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return ((q @ k.mT) * 0.125).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    def run(fn: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        *leaves, seed = (x.detach().to(dtype) for x in inputs)
        out = fn(*(x.requires_grad_() for x in leaves), shown[kind])
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

    exact, eager = run(attend, torch.float64), run(attend, dtype)
    got = run(torch.compile(attend, backend="fusecomp", options={**STRICT, "lowering": "triton"}), dtype)
    assert fusecomp.counters()["fused"] == 1
    for x, own, best in zip(got, eager, exact, strict=True):
        assert off(x, best) <= max(4 * off(own, best), FLOOR[dtype])
