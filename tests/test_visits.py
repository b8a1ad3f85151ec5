"""Masks that are data: a table of the tiles that some query sees, and kernels that visit by it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_kernels import GOLDEN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels import Interpreter, agree, tiles
from regions import B, H, M, N, age, attention, b, causal, dropout, filled, h, kv_idx, load, q_idx, scaled_score
from test_codegen import normal, qkv
from torch import Tensor

from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.ir import data
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.masks import hiding
from fusecomp.planning.tile import TilePlan

INF = float("inf")
SIZES = {"B": 2, "H": 3, "M": 37, "N": 53}
SMALL = (16, 16)


def by_table(region: AttentionRegion, block_m: int = 16, block_n: int = 16, **more: Any) -> TilePlan:
    return replace(tiles(region, block_m, block_n), visits="table", **more)


def rows(m: int = 37, n: int = 53) -> tuple[Tensor, Tensor]:
    return torch.arange(m)[:, None], torch.arange(n)[None, :]


i, j = rows()
KEEP: dict[str, Tensor] = {
    "causal": i >= j,
    "bottom_right": i + 16 >= j,
    "window": (i >= j) & (i - j < 20),
    "far_window": (j - i >= 15) & (j - i < 40),
    "padding": (j < 20).expand(37, 53),
    "left_padding": (j >= 33).expand(37, 53),
    "documents": (i // 11 == j // 13),
    "holes": (i // 16 + j // 16) % 2 == 0,
    "a few": torch.rand(37, 53, generator=torch.Generator().manual_seed(0)) < 0.01,
    "two_runs": ((j // 16) != 1) & (i >= 0),
    "all": (i >= 0) & (j >= 0),
    "none": (i < 0) & (j < 0),
    "one row": (i == 20) & (j >= 0),
    "one key": (j == 52) & (i >= 0),
}


def keeps(*index: Expr | int, shape: tuple[Any, ...] = (M, N), **more: Any) -> AttentionRegion:
    """A boolean mask that is data."""
    return attention(scaled_score, load(0, *index, dtype="bool"), loads=[(shape, "bool")], **more)


def adds(*index: Expr | int, shape: tuple[Any, ...] = (M, N), dtype: str = "float32", **more: Any) -> AttentionRegion:
    """A tensor that is added to the scores."""
    s = apply("add", scaled_score, load(0, *index, dtype=dtype))
    return attention(s, loads=[(shape, dtype)], **more)


@pytest.mark.parametrize("name", KEEP)
def test_boolean_masks(interpreter: Interpreter, name: str) -> None:
    region = keeps(q_idx, kv_idx)
    agree(interpreter, region, [*qkv(16), KEEP[name]], SIZES, by_table(region))


ADDED: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], tuple[int, ...]]] = {
    "of each query": ((q_idx, kv_idx), (M, N), (37, 53)),
    "of each sequence": ((b, 0, q_idx, kv_idx), (B, 1, M, N), (2, 1, 37, 53)),
    "of the keys": ((b, kv_idx), (B, N), (2, 53)),
    "turned": ((kv_idx, b, q_idx), (N, B, M), (53, 2, 37)),
    "part of a larger one": ((apply("add", q_idx, Const(3)), kv_idx), (64, 64), (64, 64)),
}


@pytest.mark.parametrize("name", ADDED)
def test_added_masks(interpreter: Interpreter, name: str) -> None:
    """0 and -inf in blocks, other numbers elsewhere: only -inf hides a key, only 0 needs no addition."""
    index, shape, lengths = ADDED[name]
    mask = normal(*lengths)
    kinds = torch.rand([-(-n // 16) for n in lengths], generator=torch.Generator().manual_seed(1))
    for axis, n in enumerate(lengths):
        kinds = kinds.repeat_interleave(16, axis).narrow(axis, 0, n)
    mask[kinds < 0.35] = -INF
    mask[kinds > 0.6] = 0.0
    region = adds(*index, shape=shape)
    agree(interpreter, region, [*qkv(16), mask], SIZES, by_table(region))


def own_meaning(interpreter: Interpreter, region: AttentionRegion, args: list[Tensor], tolerance: float) -> None:
    """The kernel of the region whose added tensors hide keys, held against the region as it was, in the kernel's
    float32: scores are lost in a fill there."""
    expected = evaluate(region, args, SIZES, torch.float32)
    hidden = hiding(region)
    source, out = emit(hidden, by_table(hidden)), torch.empty(expected.shape, dtype=getattr(torch, region.out_dtype))
    got = interpreter.run(source, out, args, list(SIZES.values()))
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


FINITE = [torch.finfo(torch.float32).min, -1e9, -7e4, -5e4, -1e4, -INF]


@pytest.mark.parametrize("fill", FINITE)
def test_finite_fills_hide_keys(interpreter: Interpreter, fill: float) -> None:
    """Rows whose keys are all filled average over them, a row filled unevenly takes the largest, as in eager."""
    mask = torch.zeros(37, 53).masked_fill(i < j, fill)
    mask[20], mask[5] = fill, fill - 30.0 * torch.rand(53, generator=torch.Generator().manual_seed(0))
    mask[30] = fill / 1.9 if fill != -INF else 0.0
    own_meaning(interpreter, adds(q_idx, kv_idx), [*qkv(16), mask], 1e-2 if fill > -1e5 else 1e-5)


def test_finite_fills_under_other_masks(interpreter: Interpreter) -> None:
    """A row that sees no key by both averages over those that only the finite fill hides."""
    s = apply("add", scaled_score, load(0, b, 0, q_idx, kv_idx))
    region = attention(s, causal, loads=[((B, 1, M, N), "float32")])
    mask = torch.zeros(2, 1, 37, 53)
    mask[0, :, :, :20], mask[1, :, 16:, 16:32] = -1e9, -1e9
    own_meaning(interpreter, region, [*qkv(16), mask], 1e-5)
    own_meaning(interpreter, replace(region, empty_row="zero"), [*qkv(16), mask.clamp(min=-6.5e4)], 1e-2)
    own_meaning(interpreter, replace(region, **filled(-1e9, causal), score=s), [*qkv(16), mask * 0], 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_masks(interpreter: Interpreter, dtype: str) -> None:
    region = adds(b, 0, q_idx, kv_idx, shape=(B, 1, M, N), dtype=dtype)
    half = replace(region, operands=tuple(replace(o, dtype=dtype) for o in region.operands), pv_dtype=dtype,
                   products=(replace(region.products[0], dtype=dtype),))  # fmt: skip
    mask = torch.zeros(2, 1, 37, 53, dtype=getattr(torch, dtype)).masked_fill(i < j, -INF)
    agree(interpreter, half, [*qkv(16, dtype=dtype), mask], SIZES, by_table(half))


def test_masks_together(interpreter: Interpreter) -> None:
    """A bound, documents known by their labels, and slopes of the heads, under a mask that is added."""
    same = apply("eq", load(1, b, q_idx, dtype="int64"), load(1, b, kv_idx, dtype="int64"))
    s = apply("add", apply("mul", age, load(2, h)), apply("add", scaled_score, load(0, q_idx, kv_idx)))
    loads = [((M, N), "float32"), ((B, N), "int64"), ((H,), "float32")]
    region = attention(s, causal, same, loads=loads)
    labels = torch.stack([torch.arange(53) // 15, torch.arange(53) // 40])
    mask = torch.zeros(37, 53).masked_fill(i - j > 30, -INF)
    agree(interpreter, region, [*qkv(16), mask, labels, normal(3) / 8], SIZES, by_table(region))
    assert data.added(region) == (load(0, q_idx, kv_idx),)
    assert data.axes(region) == (b,)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**31), st.integers(1, 50), st.integers(1, 80), st.sampled_from([1, 7, 16, 40]), st.booleans())
def test_any_mask(interpreter: Interpreter, seed: int, m: int, n: int, block: int, added: bool) -> None:
    """Random masks in blocks of any size: rows without keys, runs, holes and single keys among them."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1 + m // block, 1 + n // block, generator=draw)
    keep = (coarse < torch.rand((), generator=draw)).repeat_interleave(block, 0).repeat_interleave(block, 1)[:m, :n]
    args = [torch.randn(1, 1, x, 16, generator=draw) for x in (m, n, n)]
    region, mask = keeps(q_idx, kv_idx), keep
    if added:
        region, mask = adds(q_idx, kv_idx), torch.zeros(m, n).masked_fill(~keep, -INF)
    agree(interpreter, region, [*args, mask], {"B": 1, "H": 1, "M": m, "N": n}, by_table(region), tolerance=1e-5)


def test_dropped_weights(interpreter: Interpreter) -> None:
    """A weight's place decides whether it is dropped, however its tile was found."""
    region = dropout(keeps(q_idx, kv_idx), 0.3)
    args = [*qkv(16), KEEP["holes"], torch.tensor(12345)]
    agree(interpreter, region, args, SIZES, by_table(region))


@pytest.mark.parametrize("empty", ["nan", "zero"])
def test_rows_without_keys(interpreter: Interpreter, empty: str) -> None:
    keep = KEEP["causal"] & (i != 20) & (i // 16 != 0)
    region = keeps(q_idx, kv_idx, empty_row=empty)
    agree(interpreter, region, [*qkv(16), keep], SIZES, by_table(region))


def test_a_finite_fill_averages_over_every_key(interpreter: Interpreter) -> None:
    seen = load(0, b, q_idx, kv_idx, dtype="bool")
    region = attention(scaled_score, seen, loads=[((B, M, N), "bool")], **filled(-1e9, seen))
    keep = torch.stack([KEEP["causal"] & (i != 20), KEEP["padding"] & (i // 16 != 1)])
    agree(interpreter, region, [*qkv(16), keep], SIZES, by_table(region))


@pytest.mark.parametrize("added", [False, True])
def test_what_no_query_sees_is_not_read(interpreter: Interpreter, added: bool) -> None:
    """NaN in K and V where whole tiles are hidden. In eager it would reach every row: the README says so."""
    q, k, v = qkv(16)
    k[:, :, 16:32], v[:, :, 16:32] = float("nan"), float("nan")
    region, keep = keeps(q_idx, kv_idx), KEEP["two_runs"]
    expected = evaluate(region, [q, k, v, keep], SIZES)
    if added:
        region, keep = adds(q_idx, kv_idx), torch.where(keep, 0.0, -INF)
    source, out = emit(region, by_table(region)), torch.empty(expected.shape)
    got = interpreter.run(source, out, [q, k, v, keep], list(SIZES.values()))
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_full_tiles_read_no_mask(interpreter: Interpreter) -> None:
    """The mask that the kernel is given hides everything; its table says that two tiles are full."""
    region, args = keeps(q_idx, kv_idx), qkv(16, m=16)
    sizes = {**SIZES, "M": 16}
    expected = evaluate(region, [*args, ((j >= 16) & (j < 48)).expand(16, 53)], sizes)
    hidden, table = torch.zeros(16, 53, dtype=torch.bool), torch.tensor([[1, 3, 0, 9, 9, 9, 9]], dtype=torch.int32)
    source, out = emit(region, by_table(region)), torch.empty(expected.shape)
    got = interpreter.run(source, out, [*args, hidden, table], list(sizes.values()))
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_lengths(interpreter: Interpreter, loads: str) -> None:
    """Fewer keys than a tile, whole tiles, none, no query."""
    region = keeps(b, 0, q_idx, kv_idx, shape=(B, 1, M, N))
    for m, n in ((5, 9), (16, 48), (33, 64), (4, 0), (0, 20)):
        keep = torch.rand(2, 1, m, n, generator=torch.Generator().manual_seed(m)) > 0.5
        agree(interpreter, region, [*qkv(16, m=m, n=n), keep], {**SIZES, "M": m, "N": n}, by_table(region, loads=loads))


@pytest.mark.parametrize("kernel", ["attention", "tile_states", "list_tiles"])
def test_every_kernel_compiles(kernel: str) -> None:
    info = cross_compile(emit(*GOLDEN["mask_that_is_data"]), 90, kernel)
    assert info.spills in (0, None)
    if kernel == "tile_states":  # whole vectors of the mask, not a byte at a time
        assert "ld.global.v4" in info.ptx


def test_the_file_checks_itself(tmp_path: Path) -> None:
    region = adds(b, 0, q_idx, kv_idx, shape=(B, 1, M, N))
    path = tmp_path / "kernel.py"
    path.write_text(emit(region, by_table(region, 32, 32)).text)
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, check=False)
    assert "agrees with PyTorch" in done.stdout, done.stderr
