"""Gradients where rows may see no key: under a finite fill they take part in every key, under -inf in none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradients import SIZES, agree, qkv, small
from kernels import Interpreter, tiles
from regions import (
    MIN,
    B,
    H,
    M,
    N,
    attention,
    b,
    causal,
    grouped,
    h,
    kv_idx,
    load,
    q_idx,
    scaled_score,
    score,
    times,
)
from test_codegen import normal

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.codegen.logsumexp import saved
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Cast, Const, Expr
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.backward import backward_plan

REGION = attention(
    apply("add", scaled_score, load(0, q_idx, kv_idx)), loads=[((M, N), "float32")], empty_row="zero"
)  # fmt: skip


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e38])
def test_rows_filled_with_a_number(interpreter: Interpreter, fill: float) -> None:
    """Their weights are 1 / N: a sum of the fill and the logarithm of N would lose the latter."""
    mask = normal(23, 37).masked_fill(normal(23, 37) > 0.5, fill)
    mask[3], mask[20] = fill, fill
    agree(interpreter, REGION, [*qkv(16), mask], SIZES)


def test_rows_filled_with_minus_infinity_take_no_part(interpreter: Interpreter) -> None:
    mask = torch.zeros(23, 37)
    mask[3], mask[20] = -torch.inf, -torch.inf
    inputs, lengths = [*qkv(16), mask], list(SIZES.values())
    out, lse = torch.empty(2, 3, 23, 16), torch.full((2, 3, 23, 2), 123.0)
    out, *_, lse = interpreter.launch(emit(REGION, tiles(REGION), saves_lse=True), out, inputs, lengths, lse)
    assert not out[:, :, [3, 20]].any()
    grads = [*(torch.full_like(x, torch.nan) for x in inputs[:3]), None]
    source = emit_backward(REGION, small(REGION))
    found, *_ = interpreter.launch(source, grads, out, normal(2, 3, 23, 16), lse, inputs, lengths)
    assert all(x.isfinite().all() for x in found[:3])
    assert not found[0][:, :, [3, 20]].any()


@pytest.mark.parametrize("biased", [False, True])
def test_rows_that_a_mask_hides_have_no_gradient(interpreter: Interpreter, biased: bool) -> None:
    """Eager's O is NaN there, but the fill cuts what flows back to Q and K; V's gradient is that of the other rows."""
    s = apply("add", scaled_score, load(1, h, q_idx, kv_idx)) if biased else scaled_score
    loads = [((M, N), "bool"), ((H, M, N), "float32")][: 1 + biased]
    region = attention(s, load(0, q_idx, kv_idx, dtype="bool"), loads=loads)
    keep = normal(23, 37) > 0
    keep[3], keep[20] = False, False
    more = [keep, *([normal(3, 23, 37)] if biased else [])]
    agree(interpreter, region, [*qkv(16), *more], SIZES, wanted=("q", "k"))
    args, lengths, grad_out = [*qkv(16), *more], list(SIZES.values()), normal(2, 3, 23, 16)
    out, lse = torch.empty(2, 3, 23, 16), torch.empty(2, 3, 23, *saved(region))
    out, *_, lse = interpreter.launch(emit(region, tiles(region), saves_lse=True), out, args, lengths, lse)
    assert out[:, :, 3].isnan().all()
    grads = [*(torch.full_like(x, torch.nan) for x in args[:3]), *(None for _ in more)]
    found, *_ = interpreter.launch(emit_backward(region, small(region)), grads, out, grad_out, lse, args, lengths)
    v = args[2].double().requires_grad_()
    others = evaluate(replace(region, empty_row="zero"), [*args[:2], v, *more], SIZES)
    (expected,) = torch.autograd.grad(others, v, grad_out.double())
    torch.testing.assert_close(found[2].double(), expected, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------
# Finite fills: what rows that see no key hold is differentiated as the program computes it

seen = apply("lt", kv_idx, load(0, b, dtype="int64"))
"""Keys up to a length, which is 0 for the second request."""
LENGTHS = torch.tensor([29, 0])


def behind(fill: float, s: Expr = scaled_score, keep: Expr = seen, **more: Any) -> AttentionRegion:
    """S where `keep` holds, else the fill."""
    filled = {"fill": fill, "filled_score": apply("where", keep, s, Const(fill))}
    return attention(s, keep, **{"loads": [((B,), "int64")], **filled, **more})


@pytest.mark.parametrize("fill", [-1e4, -1e9, MIN])
@pytest.mark.parametrize("group", [1, 3])
def test_a_request_without_keys(interpreter: Interpreter, fill: float, group: int) -> None:
    """The mean of V: its gradient is spread over all keys, those of the scores are 0."""
    region = behind(fill, **(grouped(group, 1) if group > 1 else {}))
    agree(interpreter, region, [*qkv(16, kv=3 // group), LENGTHS], SIZES)


def test_rows_without_keys_among_others(interpreter: Interpreter) -> None:
    """A causal mask behind left padding, under a soft cap."""
    left = apply("ge", kv_idx, load(0, b, dtype="int64"))
    soft = times(apply("tanh", scaled_score), 3.0)
    region = behind(MIN, soft, apply("and", causal, left))
    region = replace(region, keep=(causal, left))
    agree(interpreter, region, [*qkv(16), torch.tensor([7, 0])], SIZES)


def test_scores_near_the_fill(interpreter: Interpreter) -> None:
    """Live keys whose scores lie below half the fill share the row with the dead ones."""
    s = apply("add", scaled_score, load(1, h))
    region = behind(-1e3, s, loads=[((B,), "int64"), ((H,), "float32")])
    bias = torch.tensor([0.0, -998.0, -1003.0])
    agree(interpreter, region, [*qkv(16), torch.tensor([29, 11]), bias], SIZES, learn=["load1"])


def test_a_fill_that_is_added_passes_gradients_on(interpreter: Interpreter) -> None:
    """The scores are lost in it, but autograd knows nothing of that."""
    filled = apply("add", scaled_score, apply("where", seen, Const(0.0), Const(MIN)))
    region = replace(behind(MIN), filled_score=filled)
    agree(interpreter, region, [*qkv(16), LENGTHS], SIZES)


def test_a_fill_that_swallows_scores_in_half_precision(interpreter: Interpreter) -> None:
    """The kernel rounds as the sum is rounded: weights are equal, and their gradients reach the scores."""
    lost = Cast(apply("add", scaled_score, Const(-65504.0)), "float16")
    region = replace(behind(-65504.0, dtype="float16"), filled_score=apply("where", seen, scaled_score, lost))
    agree(interpreter, region, [*qkv(16, dtype="float16"), LENGTHS], SIZES)


def test_a_bias_behind_a_fill(interpreter: Interpreter) -> None:
    s = apply("add", apply("mul", scaled_score, load(2, h)), load(1, h, q_idx, kv_idx))
    loads = [((B,), "int64"), ((H, M, N), "float32"), ((H,), "float32")]
    args = [*qkv(16), LENGTHS, normal(3, 23, 37), normal(3)]
    agree(interpreter, behind(-1e9, s, loads=loads), args, SIZES, learn=["load1", "load2"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(interpreter: Interpreter, dtype: str) -> None:
    region = behind(torch.finfo(getattr(torch, dtype)).min, dtype=dtype)
    agree(interpreter, region, [*qkv(16, dtype=dtype), LENGTHS], SIZES)


def test_what_is_saved_of_a_row_that_sees_no_key(interpreter: Interpreter) -> None:
    region, lengths = behind(-1e9), list(SIZES.values())
    out, lse = torch.empty(2, 3, 23, 16), torch.full((2, 3, 23, 2), 123.0)
    source = emit(region, tiles(region), saves_lse=True)
    *_, lse = interpreter.launch(source, out, [*qkv(16), LENGTHS], lengths, lse)
    assert (lse[1, ..., 0] == -1e9).all()
    torch.testing.assert_close(lse[1, ..., 1], torch.full((3, 23), math.log(37)))
    assert (lse[0, ..., 0].abs() < 10).all()


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kernel", ["query_gradient", "key_gradients", "load1_gradient"])
def test_compiles_without_a_gpu(arch: int, kernel: str) -> None:
    bias = load(1, h, q_idx, kv_idx, dtype="bfloat16")
    loads = [((B,), "int64"), ((H, M, N), "bfloat16")]
    region = behind(MIN, apply("add", times(score, 0.125), bias), loads=loads, d=64, dtype="bfloat16")
    cross_compile(emit_backward(region, backward_plan(region), frozenset({"load1"})), arch, kernel)
