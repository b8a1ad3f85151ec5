"""Casts, layouts and lengths that change, in one program: values and gradients are those of eager."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_operands import CASTS
from random_programs import SUMS, Program, combined
from torch import Tensor

import fusecomp

QUICK = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
DEEP = settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
ERROR = {torch.float32: 64 * 2.0**-23, torch.bfloat16: 4 * 2.0**-7, torch.float16: 8 * 2.0**-10}
"""Of a gradient: the rounding of the result, of the weights and of their own gradients."""
LENGTHS = st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=3)
GIVEN = (combined(), LENGTHS, st.sampled_from(list(ERROR)), st.sets(st.integers(0, 3)))
OPTIONS = {"inner": "eager", "verify": False, "strict": True}


def inputs(m: int, n: int, dtype: torch.dtype, learn: set[int]) -> list[Tensor]:
    """q, k, v and a bias [B, H, M, N]."""
    generator = torch.Generator().manual_seed(m * 10 + n)
    shapes = [(2, 4, m, 8), (2, 4, n, 8), (2, 4, n, 8), (2, 4, m, n)]
    drawn = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_(i in learn) for i, x in enumerate(drawn)]


def outcome(fn: Program, args: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The result and the gradients of what learns."""
    own = [x.detach().clone().to(dtype or x.dtype).requires_grad_(x.requires_grad) for x in args]
    out = fn(*(x * 1 for x in own))
    learn = [x for x in own if x.requires_grad]
    if not learn or not out.requires_grad:
        return [out.detach()]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), learn, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, learn, strict=True))]


def agree(got: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert (got.dtype, got.shape) == (eager.dtype, eager.shape)
    live = got.isfinite() & exact.isfinite() & eager.isfinite()
    assert ((got.isnan() == eager.isnan()) | (got.isnan() == exact.isnan())).all(), "NaN elsewhere"
    if live.any():
        error, own = ((x.double() - exact)[live].abs().max().item() for x in (got, eager))
        size = exact[live].abs().max().item()
        assert error <= max(4 * own, ERROR[dtype] * max(size, 0.1)), f"off by {error:.1e}, eager by {own:.1e}"


def check(program: Program, lengths: list[tuple[int, int]], dtype: torch.dtype, learn: set[int]) -> int:
    """The number of attentions fused, once the program agreed with eager at all lengths."""
    coarse = max([dtype, *CASTS[program.cast].values()], key=ERROR.__getitem__)
    if torch.float16 in (dtype, coarse) or program.cast == "halves of two kinds":
        program = replace(program, fill=max(program.fill, -6e4))
    torch._dynamo.reset()
    fusecomp.reset()
    fast = torch.compile(program, backend="fusecomp", dynamic=len(lengths) > 1, options=OPTIONS)
    for m, n in lengths:
        args = inputs(m, n, dtype, learn)
        eager, exact = outcome(program, args), outcome(program, args, torch.float64)
        for found in zip(outcome(fast, args), eager, exact, strict=True):
            agree(*found, coarse)
    return fusecomp.counters()["fused"]


@QUICK
@given(*GIVEN)
def test_combined(program: Program, lengths: list[tuple[int, int]], dtype: torch.dtype, learn: set[int]) -> None:
    check(program, lengths, dtype, learn)


@pytest.mark.slow
@DEEP
@given(*GIVEN, st.sampled_from(["", *SUMS]))
def test_many_combined(
    program: Program, lengths: list[tuple[int, int]], dtype: torch.dtype, learn: set[int], beside: str
) -> None:
    check(replace(program, beside=beside), lengths, dtype, learn)
