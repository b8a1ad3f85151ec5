"""K and V through tensor descriptors: which accesses they take, what they read, what the compiler makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_kernels import paged
from kernels import Interpreter, agree, tiles
from regions import B, H, N, attention, b, causal, filled, grouped, h, kv_idx, load, scaled_score, times
from test_codegen import PAGED, SIZES, few_queries, normal, packed_projection, qkv
from test_reference import _two_products
from variants import by_name

from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.descriptors import choose, describable
from fusecomp.codegen.emit import emit
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Size
from fusecomp.ir.region import Access, AttentionRegion
from fusecomp.planning.tile import TilePlan

HALF = attention(scaled_score, causal, d=64, dtype="bfloat16")


def described(region: AttentionRegion, *tile: object) -> TilePlan:
    return replace(tiles(region, *tile), loads="descriptor")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------
# Which


def reading_keys_at(index: tuple[Expr, ...], shape: tuple[Expr, ...]) -> AttentionRegion:
    """K at another place of another tensor."""
    k = replace(HALF.operands[1], shape=shape)
    product = replace(HALF.products[0], k=Access("k", index))
    return replace(HALF, operands=(HALF.operands[0], k, HALF.operands[2]), products=(product,))


D = HALF.products[0].d
COLUMN = apply("add", apply("mul", h, Const(64)), D)
ROW = apply("add", apply("mul", b, N), kv_idx)
TAKEN = {
    "as it is": HALF,
    "grouped heads": attention(scaled_score, **grouped(3)),
    "one tensor for q, k and v": packed_projection(),
    "two products": _two_products(),
    "heads side by side in a row": reading_keys_at((b, kv_idx, COLUMN), (B, N, Const(192))),
    "batch and keys in one dimension": reading_keys_at((ROW, h, D), (Size("R"), H, Const(64))),
    "keys from the third on": reading_keys_at((b, h, apply("add", kv_idx, Const(3)), D), (B, H, Size("R"), Const(64))),
    "columns from the eighth on": reading_keys_at((b, h, kv_idx, apply("add", D, Const(8))), (B, H, N, Const(72))),
}
LEFT = {
    "pages": PAGED["paged"],
    "flat pages": PAGED["flat"],
    "columns from the fourth on": reading_keys_at((b, h, kv_idx, apply("add", D, Const(4))), (B, H, N, Const(72))),
    "rows of 132 bytes": reading_keys_at((b, h, kv_idx, D), (B, H, N, Const(66))),
    "columns of run-time length": reading_keys_at((b, h, kv_idx, D), (B, H, N, Size("C"))),
    "keys along the columns": reading_keys_at((b, h, D, kv_idx), (B, H, Const(64), Const(64))),
    "every second key": reading_keys_at((b, h, apply("mul", kv_idx, Const(2)), D), (B, H, Size("R"), Const(64))),
    "split keys": reading_keys_at(
        (b, h, apply("floordiv", kv_idx, Const(8)), apply("mod", kv_idx, Const(8)), D),
        (B, H, Size("R"), Const(8), Const(64)),
    ),
    "the diagonal": reading_keys_at((b, kv_idx, kv_idx, D), (B, N, N, Const(64))),
    "columns in two dimensions": reading_keys_at(
        (b, h, kv_idx, apply("floordiv", D, Const(8)), apply("mod", D, Const(8))), (B, H, N, Const(8), Const(8))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_keys_in_rows_are_taken(name: str) -> None:
    assert describable(TAKEN[name], tiles(TAKEN[name]))


@pytest.mark.parametrize("name", LEFT)
def test_other_keys_are_left_to_pointers(name: str) -> None:
    assert not describable(LEFT[name], tiles(LEFT[name]))
    with pytest.raises(KernelError, match=r"through pointers|mixes|no kernel"):
        emit(LEFT[name], described(LEFT[name]))


def test_the_choice() -> None:
    plan, dense = tiles(HALF), [(64 * 37 * 3, 64 * 37, 64, 1)] * 3
    assert choose(HALF, plan, "sm_90").loads == "descriptor"
    assert choose(HALF, plan, "sm_100", dense) == replace(plan, loads="descriptor")
    assert choose(HALF, plan, "sm_80", dense) is plan
    assert choose(HALF, tiles(HALF, skeleton="decode"), "sm_90", dense).loads == "pointer"
    assert choose(HALF, plan, "sm_90", [*dense[:2], (*dense[2][:3], 2)]) is plan
    assert choose(HALF, plan, "sm_90", [dense[0], (64 * 37 * 3, 64 * 37, 68, 1), dense[0]]) is plan
    assert choose(HALF, plan, "sm_90", [(7, 7, 7, 7), *dense[1:]]).loads == "descriptor"  # Q goes through pointers
    single = attention(scaled_score)
    assert choose(single, tiles(single), "sm_90").loads == "pointer"
    assert choose(paged(), tiles(paged(), 16, 64, pack=4), "sm_90").loads == "pointer"


# ----------------------------------------------------------------------------------------------------------------
# What they read

NAMES = [
    "causal_compare", "softcap_causal_window_gqa", "windows_5d", "window", "bias", "dead_row_mean",
    "key_lengths_minus_1e9", "sinks",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_variants(interpreter: Interpreter, name: str) -> None:
    """Around K and V lies NaN, past the columns too."""
    variant = by_name(name)
    agree(interpreter, variant.region, *few_queries(variant, 9), described(variant.region, 16, 16))


def test_keys_past_the_end_of_a_sequence_may_hold_anything(interpreter: Interpreter) -> None:
    region = attention(scaled_score, apply("lt", kv_idx, load(0, b, dtype="int64")), loads=[((B,), "int64")])
    q, k, v = qkv(16, m=9)
    k[0, :, 20:], v[0, :, 20:] = float("nan"), float("inf")
    for skeleton in ("prefill", "decode"):
        plan = described(region, 16, 16, skeleton)
        agree(interpreter, region, [q, k, v, torch.tensor([20, 53])], {**SIZES, "M": 9}, plan)


def test_a_row_without_keys_reads_all_of_them(interpreter: Interpreter) -> None:
    seen = apply("lt", kv_idx, load(0, b, dtype="int64"))
    region = attention(scaled_score, seen, loads=[((B,), "int64")], **filled(-1e9, seen))
    args = [*qkv(16, m=9), torch.tensor([20, 0])]
    agree(interpreter, region, args, {**SIZES, "M": 9}, described(region, 16, 16))


@pytest.mark.parametrize(("d", "dv"), [(8, 24), (80, 40), (192, 128)])
def test_head_sizes(interpreter: Interpreter, d: int, dv: int) -> None:
    region = attention(times(scaled_score, 4 * d**-0.5), causal, d=d, dv=dv)
    agree(interpreter, region, qkv(d, dv, m=20, n=20), {**SIZES, "M": 20, "N": 20}, described(region))


def test_two_products(interpreter: Interpreter) -> None:
    args = [*qkv(16), normal(2, 3, 37, 8), normal(2, 53, 8)]
    agree(interpreter, _two_products(), args, SIZES, described(_two_products()))


def test_one_tensor_holds_q_k_and_v(interpreter: Interpreter) -> None:
    region = packed_projection()
    agree(interpreter, region, [normal(2, 37, 3, 3, 16)], {**SIZES, "N": 37}, described(region))


@pytest.mark.parametrize("name", ["heads side by side in a row", "columns from the eighth on"])
def test_parts_of_a_row(interpreter: Interpreter, name: str) -> None:
    region = TAKEN[name]
    q, _, v = qkv(64, m=9, n=20, dtype="bfloat16")
    k = normal(*((2, 20, 192) if name.startswith("heads") else (2, 3, 20, 72)), dtype=torch.bfloat16)
    agree(interpreter, region, [q, k, v], {**SIZES, "M": 9, "N": 20}, described(region, 16, 16))


def test_operands_of_other_dtypes(interpreter: Interpreter) -> None:
    region = attention(scaled_score, causal)
    narrow = replace(region, operands=tuple(replace(o, dtype="bfloat16") for o in region.operands))
    agree(interpreter, narrow, qkv(16, dtype="bfloat16"), SIZES, described(narrow))


ODD = {
    "shifted by an element": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "strides of an odd length": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "columns not dense": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("name", ODD)
def test_an_operand_that_fits_no_descriptor_is_copied(interpreter: Interpreter, name: str) -> None:
    region = attention(scaled_score, causal)
    q, k, v = qkv(16, m=9)
    source = emit(region, described(region, 16, 16))
    out = [torch.empty_like(q), torch.empty_like(q)]
    sizes = [2, 3, 9, 53]
    got = interpreter.run(source, out[0], [q, ODD[name](k), ODD[name](v)], sizes)
    torch.testing.assert_close(got, interpreter.run(source, out[1], [q, k, v], sizes), rtol=0, atol=0)


# ----------------------------------------------------------------------------------------------------------------
# The compiler and the file

COMPILED = {
    "d128": (128, 128, 128, 8, 3, 90, "wgmma.mma_async"),
    "d64": (64, 128, 128, 8, 3, 90, "wgmma.mma_async"),
    "d256": (256, 128, 64, 8, 2, 90, "wgmma.mma_async"),
    "blackwell": (128, 128, 128, 8, 3, 100, "tcgen05"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_the_unit_that_copies_tiles_is_used(name: str) -> None:
    d, block_m, block_n, warps, stages, arch, instruction = COMPILED[name]
    region = attention(times(scaled_score, 4 * d**-0.5), causal, d=d, dtype="bfloat16")
    plan = choose(region, replace(tiles(region, block_m, block_n), warps=warps, stages=stages), f"sm_{arch}")
    info = cross_compile(emit(region, plan), arch)
    assert "cp.async.bulk.tensor" in info.ptx
    assert instruction in info.ptx
    assert info.shared <= 232_448
    assert info.spills in (0, None)


def test_the_second_pass_compiles() -> None:
    seen = apply("lt", kv_idx, load(0, b, dtype="int64"))
    region = attention(scaled_score, seen, loads=[((B,), "int64")], dtype="bfloat16", **filled(-1e9, seen))
    assert cross_compile(emit(region, described(region, 64, 64)), 90).spills in (0, None)


def test_the_plan_is_in_the_file() -> None:
    one, other = emit(HALF, tiles(HALF)), emit(HALF, described(HALF))
    assert one.key != other.key
    assert "stages; K and V through tensor descriptors." in other.text
    assert "make_tensor_descriptor" not in one.text
    full, edge = other.text.partition("def in_rows")[0].split("# The tiles that the mask")
    assert "live" not in full
    assert edge.count("live") == 2  # the score's mask; loads need none
