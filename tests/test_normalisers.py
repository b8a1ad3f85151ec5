"""Softmax by hand under a mask that may hide every key: each shift, each guard of the normaliser, each fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusecomp

INF = float("inf")
LEAST = torch.finfo(torch.float32).min


def largest(s: Tensor) -> Tensor:
    return s.amax(-1, keepdim=True)


SHIFTS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda s: 0.0,
    "largest": largest,
    "not below all scores": lambda s: largest(s).clamp(min=-1e30),
    "not below some scores": lambda s: largest(s).clamp(min=-1e4),
    "a little above the fill": lambda s: largest(s).clamp(min=-9950.0),
    "0 for -inf": lambda s: torch.where(largest(s) == -INF, 0.0, largest(s)),
    "0 for infinities": lambda s: largest(s).masked_fill(largest(s).isinf(), 0.0),
    "nan_to_num": lambda s: largest(s).nan_to_num(),
    "nan_to_num of -inf": lambda s: largest(s).nan_to_num(neginf=0.0),
    "nan_to_num of all": lambda s: largest(s).nan_to_num(0.0, 0.0, 0.0),
    "largest of all rows": lambda s: s.amax((-2, -1), keepdim=True),
    "mean": lambda s: s.mean(-1, keepdim=True),
    "at least 0": lambda s: torch.maximum(largest(s), torch.zeros(())),
    "log-sum-exp": lambda s: s.logsumexp(-1, keepdim=True),
    "log-sum-exp not below": lambda s: s.logsumexp(-1, keepdim=True).clamp(min=-1e30),
}
GUARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "added": lambda t: t + 1e-9,
    "clamped": lambda t: t.clamp(min=1e-9),
    "1 for 0": lambda t: torch.where(t == 0, 1.0, t),
}
FUSED = [  # whatever the fill
    ("largest", "none"), ("not below all scores", "none"), ("0 for -inf", "none"), ("nan_to_num of -inf", "none"),
    ("largest", "added"), ("0 for -inf", "1 for 0"), ("nan_to_num of -inf", "1 for 0"), ("nothing", "none"),
]  # fmt: skip


def draw() -> list[Tensor]:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (7, 9, 9))
    return [q, k, v, torch.arange(7)[:, None] >= torch.arange(9) + 2]  # the first two rows see no key


@pytest.mark.parametrize("fill", [-INF, LEAST, -1e9, -1e4])
@pytest.mark.parametrize("shift", SHIFTS)
def test_a_row_without_keys(shift: str, fill: float) -> None:
    for name, guard in GUARDS.items():

        def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, guard: Any = guard) -> Tensor:
            s = (q @ k.mT).masked_fill(~keep, fill)
            e = (s - SHIFTS[shift](s)).exp()
            return e / guard(e.sum(-1, keepdim=True)) @ v

        inputs = draw()
        graph = make_fx(lambda *args, f=attention: f(*args), pre_dispatch=True)(*inputs)
        fused = fusecomp.fuse(graph, inputs, verify=False, strict=True)
        torch.testing.assert_close(fused(*inputs), attention(*inputs), equal_nan=True, msg=name)
        assert fused is not graph or (shift, name) not in FUSED, name


COMPARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "positions": lambda s, at: s.masked_fill(at.bfloat16() < 257, -INF),
    "a fill": lambda s, at: torch.where((f := s.masked_fill(at == 256, -1e4)) <= -1e4, 2.0, f),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_number_beside_half_precision_is_rounded_to_it(name: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return COMPARED[name](q @ k.mT, torch.arange(310)).softmax(-1) @ v

    q, k, v = (torch.randn(1, 1, n, 8).bfloat16() for n in (4, 310, 310))
    graph = make_fx(lambda *args: attention(*args), pre_dispatch=True)(q, k, v)
    fused = fusecomp.fuse(graph, [q, k, v], verify=False, strict=True)
    assert fused is not graph
    v.zero_()[..., 256, :] = 100.0
    torch.testing.assert_close(fused(q, k, v), attention(q, k, v), rtol=0.05, atol=0.05)
