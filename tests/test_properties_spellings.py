"""Whatever the words, a program that is fused gives its own value; and a plain one is fused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import OTHER_SUMS, SUMS, Program, programs
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusecomp

SIZES = st.tuples(st.integers(1, 2), st.sampled_from([2, 4]), *[st.integers(1, 7)] * 2, st.sampled_from([4, 8]))
SQUARE = st.tuples(st.just(4), st.just(4), st.just(4), st.just(4), st.just(4))
"""Every axis of one length: a wrong one passes unseen."""
QUICK = settings(max_examples=70, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
FEW = settings(QUICK, max_examples=25)
DEEP = settings(max_examples=7000, deadline=None, suppress_health_check=list(HealthCheck))
ERROR = {torch.float32: 32 * 2.0**-23, torch.bfloat16: 2 * 2.0**-7, torch.float16: 4 * 2.0**-10}


def inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a bias [B, H, M, N]."""
    b, h, m, n, d = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = [(b, h, m, d), (b, h, n, d), (b, h, n, d), (b, h, m, n)]
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def run(program: Program, args: list[Tensor]) -> Tensor:
    return program(*(x.clone() for x in args))


def check(program: Program, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """The number of attentions fused; kernels are not verified, so that nothing hides a wrong reading."""
    args = inputs(sizes, dtype)
    with torch.no_grad():
        traced = make_fx(program, pre_dispatch=True)(*args)
        fusecomp.reset()
        fused = fusecomp.fuse(traced, args, verify=False, strict=True)
        got, eager = fused(*(x.clone() for x in args)), run(program, args)
        exact = run(program, [x.double() for x in args])
    placed = (got.isnan() == eager.isnan()) | (got.isnan() == exact.isnan())
    assert placed.all(), "NaN elsewhere"
    live = got.isfinite() & exact.isfinite() & eager.isfinite()
    size = exact[live].abs().max().item() if live.any() else 1.0
    error, own = ((x.double() - exact)[live].abs().max().item() if live.any() else 0.0 for x in (got, eager))
    assert error <= max(4 * own, ERROR[dtype] * max(size, 1e-3)), f"off by {error:.1e}, eager by {own:.1e}"
    return fusecomp.counters()["fused"]


def holds(program: Program, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check(replace(program, fill=max(program.fill, -6e4) if dtype == torch.float16 else program.fill), sizes, dtype)


DTYPES = st.sampled_from(list(ERROR))


@QUICK
@given(programs(), SIZES, DTYPES)
def test_spellings(program: Program, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    holds(program, sizes, dtype)


@QUICK
@given(programs(twins=True), SQUARE)
def test_twins(program: Program, sizes: tuple[int, ...]) -> None:
    check(program, sizes)


@QUICK
@given(programs(), st.just((2, 4, 5, 7, 8)))
def test_spellings_are_fused(program: Program, sizes: tuple[int, ...]) -> None:
    """Where a mask may leave a row no key, or is empty, a program may be declined; without one it is not."""
    assert check(replace(program, mask=None), sizes) == 1


BESIDE = st.sampled_from([*SUMS, *OTHER_SUMS])


@FEW
@given(programs(), BESIDE, st.one_of(SQUARE, SIZES))
def test_sums_beside(program: Program, beside: str, sizes: tuple[int, ...]) -> None:
    check(replace(program, beside=beside), sizes)


@FEW
@given(programs(), st.sampled_from(list(SUMS)), st.just((2, 4, 5, 7, 8)))
def test_log_sums_are_results(program: Program, beside: str, sizes: tuple[int, ...]) -> None:
    """Of softmaxes without a sink, of the same scores to the last bit, over the axes that the product has."""
    softmax = "softmax" if program.softmax in ("sink", "two sinks", "one more", "base 2") else program.softmax
    value = "matmul" if program.value == "bmm" else program.value
    assert check(replace(program, mask=None, softmax=softmax, value=value, beside=beside), sizes) == 1


@FEW
@given(programs(), st.sampled_from(list(OTHER_SUMS)), st.just((2, 4, 5, 7, 8)))
def test_other_sums_are_not(program: Program, beside: str, sizes: tuple[int, ...]) -> None:
    assert check(replace(program, mask=None, beside=beside, deferred=False), sizes) == 0


@pytest.mark.slow
@DEEP
@given(programs(), BESIDE, st.one_of(SQUARE, SIZES))
def test_many_sums_beside(program: Program, beside: str, sizes: tuple[int, ...]) -> None:
    check(replace(program, beside=beside), sizes)


@pytest.mark.slow
@DEEP
@given(programs(), SIZES, DTYPES)
def test_many_spellings(program: Program, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    holds(program, sizes, dtype)


@pytest.mark.slow
@DEEP
@given(programs(twins=True), SQUARE)
def test_many_twins(program: Program, sizes: tuple[int, ...]) -> None:
    check(program, sizes)
