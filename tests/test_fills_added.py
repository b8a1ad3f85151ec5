"""Fills that are added in half precision: a score is lost in one, and autograd knows nothing of that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels import Interpreter, agree, tiles
from recognising import mathematics, region_of
from test_codegen import normal
from torch import Tensor

import fusecomp
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Cast, Const, Load, Score, Size, Var
from fusecomp.patterns.masks import split

Program = Callable[..., Tensor]
PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "added": lambda s, keep, bias, fill: s + (1.0 - keep.to(s.dtype)) * fill,
    "a_bias_before": lambda s, keep, bias, fill: (s + bias) + torch.where(keep, 0.0, fill).to(s.dtype),
    "a_bias_behind": lambda s, keep, bias, fill: (s + (1.0 - keep.to(s.dtype)) * fill) + bias,
    "a_bias_in_the_mask": lambda s, keep, bias, fill: s + (bias + torch.where(keep, 0.0, fill).to(s.dtype)),
    "a_tensor": lambda s, keep, bias, fill: s + torch.where(bias > 0.5, fill, bias),
}
"""Scores and their mask; of a row that sees no key, eager's weights are equal, and all its keys have gradients."""


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    qkv = [normal(2, 3, n, 16, dtype=dtype).requires_grad_() for n in (13, 21, 21)]
    keep, bias = normal(2, 1, 13, 21) > -0.5, normal(3, 13, 21, dtype=dtype)
    keep[:, :, 3], keep[0, :, 7], bias[:, 5] = False, False, 1.0
    return qkv, keep, bias


HALVES = [(torch.float16, -65504.0), (torch.float16, -6.2e4), (torch.bfloat16, -1e9)]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("dtype", "fill"), HALVES)
def test_rows_that_see_no_key(name: str, dtype: torch.dtype, fill: float) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
        return PROGRAMS[name](q @ k.mT * 0.25, keep, bias, fill).softmax(-1) @ v

    qkv, keep, bias = inputs(dtype)
    grad = normal(2, 3, 13, 16, dtype=dtype)
    out = attention(*qkv, keep, bias)
    wanted = torch.autograd.grad(out, qkv, grad)
    fusecomp.reset()
    torch._dynamo.reset()
    got = torch.compile(attention, backend="fusecomp", options={"inner": "eager"})(*qkv, keep, bias)
    assert fusecomp.counters()["fused"] == 1
    tolerance = 8 * torch.finfo(dtype).eps
    for x, y in zip((got, *torch.autograd.grad(got, qkv, grad)), (out, *wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


q_idx, kv_idx = Var("q_idx", Size("M")), Var("kv_idx", Size("N"))
seen = apply("ge", q_idx, kv_idx)
bias = Load("load0", (kv_idx,), "float16")


def test_a_mask_is_read_out_of_the_rounded_sum() -> None:
    lost = Cast(apply("add", Score(0), Const(-65504.0)), "float16")
    found = split(apply("where", seen, Score(0), lost))
    assert (found.score, found.keep, found.fill) == (Score(0), (seen,), -65504.0)
    behind = Cast(apply("add", lost, bias), "float16")
    found = split(apply("where", seen, apply("add", Score(0), bias), behind))
    assert (found.keep, found.fill) == ((seen,), -65504.0)


@pytest.mark.parametrize("other", [
    Cast(apply("add", Score(1), Const(-65504.0)), "float16"),
    Cast(apply("add", Score(0), Const(-100.0)), "float16"),
    Cast(apply("mul", Score(0), Const(-65504.0)), "float16"),
])  # fmt: skip
def test_another_sum_is_no_fill(other: Cast) -> None:
    assert not split(apply("where", seen, Score(0), other)).keep


MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "chosen": lambda s, live, bias: s + torch.where(live, 0.0, -torch.inf).to(s.dtype),
    "filled": lambda s, live, bias: s + torch.zeros_like(bias).masked_fill(~live, -torch.inf),
    "triangular": lambda s, live, bias: s + torch.full_like(bias, -torch.inf).triu(1),
    "a_bias_filled": lambda s, live, bias: s + bias.masked_fill(~live, -torch.inf),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MASKS)
def test_minus_infinity_is_a_mask_in_any_precision(name: str, dtype: str) -> None:
    """Whose tiles are skipped."""

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        live = torch.arange(13)[:, None] >= torch.arange(13)
        return MASKS[name](q @ k.mT, live, bias).softmax(-1) @ v

    kind = getattr(torch, dtype)
    region = region_of(attention, *(normal(2, 13, 16, dtype=kind) for _ in range(3)), normal(13, 13, dtype=kind))
    assert mathematics(region)["keep"] == ["q_idx >= kv_idx"]
    assert "inf" not in mathematics(region)["score"]


def scaled_beyond_float32(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, factor: float) -> Tensor:
    return ((q @ k.mT).masked_fill(~keep, torch.finfo(torch.float32).min) * factor).softmax(-1) @ v


@pytest.mark.parametrize(("factor", "fill"), [(1.5, -torch.inf), (0.5, 0.5 * torch.finfo(torch.float32).min)])
def test_the_least_number_times_more_than_one_is_minus_infinity(
    interpreter: Interpreter, factor: float, fill: float
) -> None:
    q, k, v = (normal(2, 3, n, 16) for n in (13, 21, 21))
    keep = normal(13, 21) > 0
    keep[4] = False
    region = region_of(scaled_beyond_float32, q, k, v, keep, factor)
    assert region.fill == fill
    agree(interpreter, region, [q, k, v, keep], {"B": 2, "H": 3, "M": 13, "N": 21}, tiles(region, 16, 16))


@pytest.mark.parametrize(("fill", "factor", "lost"), [(-65504.0, 1.5, True), (-1e4, 10.0, True), (-1e4, 2.0, False)])
def test_a_fill_that_float16_cannot_hold_once_it_is_scaled_is_minus_infinity(
    fill: float, factor: float, lost: bool
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return ((q @ k.mT).masked_fill(~keep, fill) * factor).softmax(-1) @ v

    qkv, keep, _ = inputs(torch.float16)
    fast = torch.compile(attention, backend="fusecomp", options={"inner": "eager", "verify": False})
    got, wanted = fast(*qkv, keep), attention(*qkv, keep)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert bool(wanted.isnan().any()) == lost
