"""The equations: figures worked by hand, shared memory against what compilers reported, facts that must rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from fusecomp.errors import PlanError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Load
from fusecomp.planning import device, textbook
from fusecomp.planning.candidate import Launch
from fusecomp.planning.chunks import chunks, power
from fusecomp.planning.cost import FORWARD
from fusecomp.planning.cost_decode import DECODE
from fusecomp.planning.equations import Model
from fusecomp.planning.facts import Visits, facts, lengths, visits
from fusecomp.planning.queueing import bound
from fusecomp.planning.straight import function_of
from fusecomp.planning.tile import Tile
from fusecomp.planning.workload import KV_IDX, B, H, Workload


def of(workload: Workload, tile: Tile, name: str = "h200", decode: bool = False) -> dict[str, float]:
    return Launch(workload.region, workload.sizes, device.find(name), decode).quantities(tile)


# The chapter's figures


def test_elements_moved_with_and_without_tiles() -> None:
    assert textbook.standard_hbm_elements(1024, 64) == 1_114_112
    assert round(textbook.flash_bound(1024, 64, 25_000)) == 171_799
    assert textbook.standard_hbm_elements(1024, 64) / textbook.flash_bound(1024, 64, 25_000) == pytest.approx(
        6.5, abs=0.02
    )


def test_halving_the_memory_doubles_the_bound() -> None:
    assert sympy.simplify(textbook.FLASH.subs(textbook.M, textbook.M / 2) / textbook.FLASH) == 2
    assert textbook.block_elements(64, 64, 64) == 12_288 <= 25_000 // 2 < textbook.block_elements(128, 64, 64)


def test_scores_of_a_long_document() -> None:
    assert textbook.score_elements(18_000) == 324_000_000
    assert textbook.score_bytes(18_000) == 1_296_000_000


def test_key_value_cache() -> None:
    cache = textbook.KVCache(layers=40, hidden=5120, width=2)
    assert cache.token_bytes == 819_200
    assert cache.reserved_bytes(2048) == 1600 * 2**20
    assert textbook.utilisation(90, 2048) == pytest.approx(0.044, abs=5e-4)
    used = cache.paged(90, 16)
    assert (used.blocks, used.slots, used.bytes) == (6, 96, 75 * 2**20)
    assert used.utilisation == pytest.approx(0.9375)
    assert cache.reserved_bytes(2048) / used.bytes == pytest.approx(21.3, abs=0.1)
    assert cache.requests(40 * 2**30, 90, 16) == 546


# Equations as functions


def test_a_page_is_computed_as_sympy_computes_it() -> None:
    x, y = sympy.symbols("x y", nonnegative=True)
    made = [
        3 * x / (4 * y) - x, sympy.sqrt(x) / sympy.sqrt(y + 1), x**2 + x**y, sympy.Rational(1, 3) + x,
        sympy.Piecewise((x, x < 2), (y, y >= 7), (x * y, True)), sympy.ceiling(x / 48), sympy.log(x * y) / y**3,
        sympy.Max(x, y, 5) - sympy.Min(x, y),
    ]  # fmt: skip
    run = function_of(["x", "y"], made)
    for at in ((96, 7), (1, 3), (2.5, 11), (144, 1)):
        assert run(*at) == pytest.approx([float(e.subs({x: at[0], y: at[1]})) for e in made], rel=1e-14)


@pytest.mark.parametrize("n", [48, 49, 96])
def test_whole_quotients_stay_whole(n: int) -> None:
    (x,) = sympy.symbols("x,")
    assert function_of(["x"], [sympy.ceiling(x / n)])(3 * n) == (3,)


def test_what_two_equations_share_is_computed_once() -> None:
    (x,) = sympy.symbols("x,")
    calls: list[float] = []
    ceiling = {"ceiling": lambda at: calls.append(at) or 7}
    assert function_of(["x"], [sympy.ceiling(x) + 1, 2 * sympy.ceiling(x)], ceiling)(6.5) == (8, 14)
    assert calls == [6.5]


# Head sizes


@pytest.mark.parametrize(
    ("d", "parts"),
    [
        (8, (16,)),
        (16, (16,)),
        (40, (32, 16)),
        (64, (64,)),
        (80, (64, 16)),
        (96, (64, 32)),
        (112, (128,)),
        (192, (128, 64)),
        (256, (256,)),
    ],
)
def test_chunks(d: int, parts: tuple[int, ...]) -> None:
    assert chunks(d) == parts


def test_chunks_cover_with_powers_of_two() -> None:
    for d in range(1, 600):
        assert d <= sum(chunks(d)) < 2 * max(d, 16)
        assert all(c >= 16 and power(c) == c for c in chunks(d))
        assert len(chunks(d)) <= 2


# Shared memory and registers


def test_shared_memory_of_public_overflow_reports() -> None:
    """D 192 rounded to 256, Dv 128, 128x128, two stages: 262144 B; D 128, 128x64, three stages: 131072 B."""
    rounded = Workload(4096, 256, dv=128)
    assert of(rounded, Tile(128, 128, 8, 2))["smem"] == 262_144
    assert of(Workload(4096, 128), Tile(128, 64, 8, 3))["smem"] == 131_072


def test_two_chunks_save_what_rounding_would_take() -> None:
    assert of(Workload(4096, 192, dv=128), Tile(128, 128, 8, 2))["smem"] == 262_144 - 2 * 128 * 64 - 4 * 128 * 64


COMPILED = [
    # arch, D, Dv, dtype, BLOCK_M, BLOCK_N, warps, stages, bias, bytes that Triton 3.7 allocated
    ("h200", 128, 128, "bf16", 64, 64, 4, 3, False, 114688),
    ("h200", 64, 64, "bf16", 128, 128, 8, 3, False, 114688),
    ("h200", 80, 80, "bf16", 64, 128, 4, 4, False, 174080),
    ("h200", 128, 128, "bf16", 64, 64, 4, 1, False, 32768),
    ("h200", 80, 80, "bf16", 128, 64, 4, 1, False, 30720),
    ("h200", 128, 128, "bf16", 16, 128, 4, 3, False, 139264),
    ("h200", 96, 96, "tf32", 64, 32, 4, 4, False, 122880),
    ("h200", 128, 128, "bf16", 64, 64, 8, 2, True, 90112),
    ("h200", 256, 256, "bf16", 64, 32, 4, 2, True, 102400),
    ("a100", 64, 64, "bf16", 128, 64, 4, 3, False, 49152),
    ("a100", 128, 128, "bf16", 64, 64, 4, 3, False, 90112),
    ("a100", 96, 96, "bf16", 128, 64, 4, 4, False, 98304),
    ("a100", 192, 128, "bf16", 64, 64, 8, 3, False, 114688),
    ("a100", 256, 256, "bf16", 16, 32, 4, 4, False, 107520),
]


@pytest.mark.parametrize(
    ("name", "d", "dv", "dtype", "block_m", "block_n", "warps", "stages", "bias", "allocated"), COMPILED
)
def test_shared_memory_is_what_triton_allocates(
    name: str,
    d: int,
    dv: int,
    dtype: str,
    block_m: int,
    block_n: int,
    warps: int,
    stages: int,
    bias: bool,
    allocated: int,
) -> None:
    workload = Workload(4096, d, dv=dv, dtype=dtype, bias=bias, causal=True)
    assert of(workload, Tile(block_m, block_n, warps, stages), name)["smem"] == allocated


@pytest.mark.parametrize(
    ("d", "block_m", "block_n", "warps", "spills"),
    [
        (64, 128, 64, 4, False),
        (80, 64, 128, 4, False),
        (128, 64, 64, 4, False),
        (128, 128, 64, 4, True),
        (96, 128, 64, 4, True),
        (128, 128, 128, 4, True),
        (128, 64, 128, 8, False),
    ],
)
def test_registers_tell_which_tiles_spill(d: int, block_m: int, block_n: int, warps: int, spills: bool) -> None:
    """As ptxas reported for sm_90."""
    assert (of(Workload(4096, d), Tile(block_m, block_n, warps, 2))["registers"] > 255) == spills


# Tiles visited


@pytest.mark.parametrize(
    ("workload", "share"),
    [
        (Workload(8192), 1.0),
        (Workload(8192, causal=True), 0.5),
        (Workload(8192, causal=True, window=1024), 1024 / 8192),
        (Workload(8192, m=1, causal=True), 1.0),
    ],
)
def test_share_of_tiles_visited(workload: Workload, share: float) -> None:
    m = workload.m or workload.n
    seen = visits(workload.region, workload.sizes, 64, 64)
    every = -(-m // 64) * (workload.n // 64)
    assert seen.visited / every == pytest.approx(share, rel=0.07)
    assert seen.tested <= seen.visited
    assert seen.longest * -(-m // 64) >= seen.visited


def test_causal_tiles_by_counting() -> None:
    """Four query tiles see 1, 2, 3, 4 tiles; only the last of each needs its mask."""
    w = Workload(256, causal=True)
    assert visits(w.region, w.sizes, 64, 64) == Visits(10, 4, 4)
    assert visits(Workload(256).region, w.sizes, 64, 64) == Visits(16, 0, 4)
    assert visits(Workload(250).region, {**w.sizes, "N": 250}, 64, 64) == Visits(16, 4, 4)


def test_data_dependent_bounds_count_as_nothing_known() -> None:
    w = Workload(256)
    padded = apply("lt", KV_IDX, Load("lengths", (B,), "int64"))
    assert visits(replace(w.region, keep=(padded,)), w.sizes, 64, 64) == Visits(16, 16, 4)


# What a region costs


def test_facts_of_a_region() -> None:
    w = Workload(1024, 64, causal=True, heads=32, kv_heads=8, batch=2, softcap=30.0, bias=True)
    known, at = facts(w.region), lengths(w.region, w.sizes)
    assert (known.group, known.packs, known.sfu, known.load_width) == (4, True, 2, 2)
    assert (at.heads, at.kv_heads, at.m, at.n) == (64, 16, 1024, 1024)


def test_packing_needs_keys_that_depend_on_the_group_alone() -> None:
    region = Workload(1024, heads=32, kv_heads=8).region
    other = replace(region.v, index=(B, H, *region.v.index[2:]))
    assert facts(region).packs
    assert not facts(replace(region, v=other)).packs


def test_a_missing_size_is_named() -> None:
    with pytest.raises(PlanError, match="give sizes a value for N"):
        lengths(Workload(64).region, {"B": 1, "H": 1, "M": 64})
    with pytest.raises(PlanError, match="size of q_idx is 0"):
        lengths(Workload(64).region, {"B": 1, "H": 1, "M": 0, "N": 64})


def test_flops_of_aligned_lengths_are_four_m_n_d() -> None:
    w = Workload(4096, 128, heads=16, batch=4)
    assert of(w, Tile(64, 64, 4, 3))["flops"] == 4 * 64 * 4096**2 * 128


def test_fused_bytes_do_not_grow_with_the_square() -> None:
    tile = Tile(64, 64, 4, 3)
    short, long = of(Workload(4096), tile), of(Workload(8192), tile)
    assert long["hbm"] / short["hbm"] == pytest.approx(2, rel=0.05)
    assert long["hbm_unfused"] / short["hbm_unfused"] == pytest.approx(4, rel=0.05)
    assert short["hbm_unfused"] > 20 * short["hbm"]


def test_a_bias_is_read_once_and_special_functions_cost() -> None:
    tile = Tile(64, 64, 4, 3)
    plain, biased = of(Workload(4096, batch=4), tile), of(Workload(4096, batch=4, bias=True), tile)
    assert biased["hbm"] - plain["hbm"] == 2 * 16 * 4096**2
    assert of(Workload(4096, softcap=30.0), tile)["element_s"] > 1.5 * of(Workload(4096), tile)["element_s"]


def test_splits_fill_the_device_in_decode() -> None:
    w = Workload(65536, m=1, heads=32, kv_heads=8)
    split, whole = (of(w, Tile(16, 64, 4, 3, 4, resident=1), decode=d) for d in (True, False))
    assert split["programs"] >= device.find("h200").sms
    assert split["seconds"] < whole["seconds"] / 5
    assert bound(split) == "memory"


@pytest.mark.parametrize("model", [FORWARD, DECODE])
def test_every_quantity_has_a_unit_and_every_symbol_a_value(model: Model) -> None:
    w = Workload(4096, m=1, heads=32, kv_heads=8)
    launch = Launch(w.region, w.sizes, device.find("h200"), decode=model is DECODE)
    given = set(launch.inputs(Tile(16, 64, 4, 2, 4)))
    assert all(model.units.values())
    for page in model.pages:
        assert set(page.symbols) <= given
        given |= set(page.equations)
