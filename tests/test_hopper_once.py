"""The backward kernel for Hopper's tensor cores that adds to dQ in any order: what is asked for, and that it compiles.

It runs on a GPU only (tests/test_gpu_hopper_backward.py)."""

from __future__ import annotations

import pytest
import torch
from regions import causal, grouped
from test_hopper import CAPPED, SCALED, half, written_in
from test_hopper_backward import HAS, forward, tiles

from fusecomp.codegen.backward import BackwardSource, emit_backward
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.hopper_backward import specialised
from fusecomp.ir.region import AttentionRegion
from fusecomp.running.hopper import in_order
from fusecomp.settings import Options

SIZES = {size: half(SCALED, causal, d=size) for size in (64, 128)}


def made(region: AttentionRegion) -> BackwardSource:
    return emit_backward(region, specialised(region, forward(region, tiles(region)), deterministic=False))


@pytest.mark.parametrize("size", SIZES)
def test_scores_are_computed_once(size: int) -> None:
    """A loop for the tiles that the mask cuts and one for the others, once each: the two-pass form has them twice."""
    region = SIZES[size]
    twice = emit_backward(region, specialised(region, forward(region, tiles(region))))
    assert (made(region).text.count("gl.exp2("), twice.text.count("gl.exp2(")) == (2, 4)
    assert "atomic_add" in made(region).text
    assert "atomic" not in twice.text
    assert made(region).key != twice.key


@written_in
@pytest.mark.parametrize("size", SIZES)
def test_it_compiles(size: int) -> None:
    """dQ is added two numbers at a time, and registers hold nearly all."""
    source = made(SIZES[size])
    info = cross_compile(source, 90, "all_gradients")
    assert "add.v2.f32" in info.ptx
    assert 0 < info.shared <= 232_448
    assert info.spills is None or info.spills <= 128
    assert cross_compile(source, 90, "query_gradient").spills in (None, 0)


@written_in
@pytest.mark.slow
@pytest.mark.parametrize("name", HAS)
def test_all_of_them_compile(name: str) -> None:
    assert cross_compile(made(HAS[name]), 90, "all_gradients").shared <= 232_448


@pytest.mark.parametrize("region", [half(CAPPED, causal), half(SCALED, causal, **grouped(4))], ids=["cap", "group"])
def test_every_variant_has_it(region: AttentionRegion) -> None:
    assert made(region).text.count("gl.warp_specialize(") == 1


@pytest.mark.parametrize(("asked", "everywhere", "found"), [
    (True, False, True), (False, False, False), (False, True, True),
])  # fmt: skip
def test_who_may_add_in_any_order(asked: bool, everywhere: bool, found: bool) -> None:
    """Only who asks for it, and never where PyTorch is told to be deterministic."""
    torch.use_deterministic_algorithms(everywhere)
    try:
        assert in_order(Options(deterministic=asked)) == found
    finally:
        torch.use_deterministic_algorithms(False)
