"""Beside a sink: rows whose own maximum is subtracted, and is -inf where they see no key."""

from __future__ import annotations

from collections.abc import Callable

import gradients
import pytest
import torch
from kernels import Interpreter, agree, tiles
from recognising import candidates, region_of
from regions import M, N, attention, causal, kv_idx, load, q_idx, scaled_score
from torch import Tensor

from fusecomp.codegen.hopper import expresses
from fusecomp.ir.algebra import ZERO
from fusecomp.ir.reference import evaluate
from fusecomp.patterns.attention import Declined

INF, SIZES = float("inf"), {"B": 2, "H": 3, "M": 13, "N": 40}
EAGER = {"inner": "eager", "strict": True}


def weights(s: Tensor, sink: Tensor | float) -> Tensor:
    """exp(s) / (exp(sink) + sum exp(s))"""
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    return p / (p.sum(-1, keepdim=True) + torch.exp(sink - m))


def one_more(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return weights((q @ k.mT).masked_fill(~keep, -INF), 0.0) @ v


def of_each_head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, sink: Tensor) -> Tensor:
    return weights((q @ k.mT).masked_fill(~keep, -INF), sink[:, None, None]) @ v


def added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return weights(q @ k.mT + torch.zeros(keep.shape).masked_fill(~keep, -INF), 0.0) @ v


def filled_behind(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return weights((q @ k.mT).masked_fill(~keep, -INF), 0.0).masked_fill(~keep, 0.0) @ v


def safe(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = (q @ k.mT).masked_fill(~keep, -INF)
    m = s.amax(-1, keepdim=True).clamp(min=0.0)
    p = torch.exp(s - m)
    return p / (p.sum(-1, keepdim=True) + torch.exp(-m)) @ v


def under_causal(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return weights((q @ k.mT).masked_fill(torch.ones_like(keep).triu(1), -INF), 0.0) @ v


def operands(fn: Callable[..., Tensor]) -> list[Tensor]:
    keep = torch.rand(13, 40) < 0.5
    keep[3] = False
    sink = [torch.randn(3)] if fn is of_each_head else []
    return [*(torch.randn(2, 3, n, 16) for n in (13, 40, 40)), keep, *sink]


READ = {one_more: "unsafe", filled_behind: "zero"}


@pytest.mark.parametrize("fn", READ)
def test_a_row_that_sees_no_key(interpreter: Interpreter, fn: Callable[..., Tensor]) -> None:
    args = operands(fn)
    region, expected = region_of(fn, *args), fn(*args)
    assert region.empty_row == READ[fn]
    assert bool(expected[:, :, 3].isnan().all()) == (READ[fn] == "unsafe")
    torch.testing.assert_close(evaluate(region, args, SIZES).float(), expected, equal_nan=True)
    for skeleton in ("prefill", "decode"):
        agree(interpreter, region, args, SIZES, tiles(region, 16, 16, skeleton))


def test_where_it_is_known_to_see_one() -> None:
    """Or where its maximum is kept from -inf; a sink that is data is in no reach of what combines the shares."""
    assert [region_of(fn, *operands(fn)).empty_row for fn in (under_causal, safe, added)] == ["nan", "nan", "unsafe"]
    found = candidates(of_each_head, *operands(of_each_head))
    assert all(isinstance(x, Declined) and "subtracts -inf" in x.reason for x in found)


@pytest.mark.parametrize("fn", [*READ, added, safe, under_causal])
def test_compiled(fn: Callable[..., Tensor]) -> None:
    args = operands(fn)
    fast = torch.compile(fn, backend="fusecomp", options=EAGER)
    torch.testing.assert_close(fast(*args), fn(*args), equal_nan=True)


def test_gradients() -> None:
    args = operands(one_more)
    args[3][3] = True
    grads = []
    for fn in (one_more, torch.compile(one_more, backend="fusecomp", options=EAGER)):
        own = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
        fn(*own).square().sum().backward()
        grads.append([x.grad for x in own if x.grad is not None])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_generated_gradients(interpreter: Interpreter) -> None:
    keep = load(0, q_idx, kv_idx, dtype="bool")
    region = attention(scaled_score, keep, loads=[((M, N), "bool")], sink=ZERO, empty_row="unsafe")
    mask = torch.rand(23, 37) < 0.5
    mask[:, 2] = True
    gradients.agree(interpreter, region, [*gradients.qkv(16), mask], gradients.SIZES)


def test_hopper_leaves_it() -> None:
    """Its kernels begin with the sink."""
    for empty_row, fits in (("nan", True), ("unsafe", False)):
        region = attention(scaled_score, causal, d=64, dtype="bfloat16", sink=ZERO, empty_row=empty_row)
        assert expresses(region) == fits
