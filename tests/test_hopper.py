"""The kernel for Hopper's tensor cores: what it expresses, that it compiles, and what happens where it does not run.

It runs on a GPU only (tests/test_gpu_hopper.py): Triton's interpreter has no Gluon."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from golden import causal_hopper
from golden_kernels import paged
from kernels import tiles
from regions import H, M, N, age, attention, b, causal, dropout, filled, grouped, h, kv_idx, load, q_idx, score, times

from fusecomp.codegen import hopper_choice
from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.copied import pair_loads
from fusecomp.codegen.emit import emit
from fusecomp.codegen.hopper import expresses, registers, specialised
from fusecomp.errors import KernelError
from fusecomp.ir import data
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Size
from fusecomp.ir.region import AttentionRegion
from fusecomp.planning.device import find
from fusecomp.planning.tile import TilePlan
from fusecomp.running import hopper
from fusecomp.running.hopper import available
from fusecomp.running.hopper import planned as hopper_plan
from fusecomp.show import _made

SCALED = times(score, 0.125)
CAPPED = times(apply("tanh", times(score, 0.125 / 30)), 30.0)
ALIBI = apply("sub", SCALED, apply("mul", load(0, h), age))
BIASED = apply("add", SCALED, load(0, h, q_idx, kv_idx, dtype="bfloat16"))
WINDOW = apply("lt", age, Const(256))
DOCUMENTS = apply("eq", load(0, b, q_idx, dtype="int64"), load(0, b, kv_idx, dtype="int64"))
LAST = apply("ge", apply("sub", apply("add", q_idx, Size("N")), Size("M")), kv_idx)


def half(s: Expr = SCALED, *keep: Expr, d: int = 64, **more: object) -> AttentionRegion:
    return attention(s, *keep, **{"dtype": "bfloat16", "d": d, **more})  # type: ignore[arg-type]


KEPT = load(0, b, q_idx, kv_idx, dtype="bool")
EXPRESSED = {
    "full": half(d=128),
    "causal": half(SCALED, causal, d=128, **grouped(4)),
    "three groups": half(d=64),
    "large heads": half(SCALED, causal, d=256),
    "last queries": half(SCALED, LAST, d=128),
    "window, soft cap": half(CAPPED, causal, WINDOW, dtype="float16"),
    "alibi": half(ALIBI, causal, loads=[((H,), "float32")]),
    "documents": half(SCALED, DOCUMENTS, loads=[((Size("B"), N), "int64")]),
    "sink": half(SCALED, causal, sink=load(0, h), loads=[((H,), "float32")]),
    "lengths": half(SCALED, apply("gt", load(0, b, dtype="int64"), kv_idx), loads=[((Size("B"),), "int64")]),
    "bias": half(BIASED, causal, loads=[((H, M, N), "bfloat16")]),
    "bias, D128": half(BIASED, d=128, loads=[((H, M, N), "bfloat16")]),
    "bias, float32": half(apply("add", SCALED, load(0, h, q_idx, kv_idx)), d=128, loads=[((H, M, N), "float32")]),
    "boolean mask": half(SCALED, KEPT, loads=[((Size("B"), M, N), "bool")]),
    "boolean mask, D128": half(SCALED, KEPT, d=128, loads=[((Size("B"), M, N), "bool")]),
    "bias of all heads": half(apply("add", SCALED, load(0, q_idx, kv_idx, dtype="bfloat16")),
                              loads=[((M, N), "bfloat16")]),
    "bias, element by element": half(apply("add", SCALED, load(0, h, kv_idx, q_idx)), loads=[((H, N, M), "float32")]),
}
NOT = {
    "single precision": half(dtype="float32"),
    "a head size that is no power of two": half(d=80),
    "two head sizes": half(d=128, dv=64),
    "dropout": dropout(half()),
    "rows that see no key under a finite fill": half(SCALED, causal, **filled(-1e9, causal)),
    "keys behind a table": paged(),
    "the larger of two": half(apply("max", SCALED, Const(0.0))),
    "a sink of each row": half(SCALED, sink=load(0, q_idx), loads=[((M,), "float32")]),
    "another result": half(out_dtype="float32"),
    "keys that end at one number": half(SCALED, apply("gt", load(0, dtype="int64"), kv_idx), loads=[((), "int64")]),
}


@pytest.mark.parametrize("region", EXPRESSED.values(), ids=EXPRESSED)
def test_what_it_expresses(region: AttentionRegion) -> None:
    assert expresses(region)
    text = emit(region, specialised(region, tiles(region))).text
    assert "warp_specialize" in text
    assert "tl." not in text.replace("gl.", "")


@pytest.mark.parametrize("region", NOT.values(), ids=NOT)
def test_what_it_does_not(region: AttentionRegion) -> None:
    assert not expresses(region)
    with pytest.raises(KernelError, match="plan a portable one"):
        emit(region, replace(tiles(region), consumers=2))


def planned(region: AttentionRegion) -> TilePlan:
    """By a table where the mask is data: of rows and of keys, or of pairs."""
    visits = "table" if pair_loads(region) else "ranges"
    return replace(tiles(region), visits=visits if data.unknown(region) else "bounds")


written_in = pytest.mark.skipif(not available(), reason="the installed Triton has another Gluon, which is not used")


@written_in
@pytest.mark.parametrize(
    ("name", "saves_lse"),
    [
        ("causal", False), ("causal", True), ("window, soft cap", True), ("large heads", True), ("three groups", False),
        ("bias", True), ("bias, D128", False), ("bias, float32", True), ("alibi", False), ("documents", True),
        ("boolean mask", False), ("boolean mask, D128", True), ("bias of all heads", True),
    ],
)
def test_it_compiles(name: str, saves_lse: bool) -> None:
    region = EXPRESSED[name]
    tile = specialised(region, planned(region))
    info = cross_compile(emit(region, tile, saves_lse), 90)
    assert "wgmma.mma_async" in info.ptx
    assert "setmaxnreg" in info.ptx
    assert 0 < info.shared + 1024 <= 233_472 // tile.resident
    assert info.spills is None or info.spills <= (64 if tile.resident == 1 else 96)  # outside the usual loops


def test_two_programs_share_a_multiprocessor() -> None:
    """Where the mask's data leaves rows of few tiles: as many registers as both have together, nobody waits for a turn,
    and each P is multiplied before the next S is begun."""
    region = half(SCALED, causal, DOCUMENTS, loads=[((Size("B"), N), "int64")])
    tile = specialised(region, planned(region))
    launched, multiplies, copies = registers(tile)
    assert tile.resident * 3 * 128 * launched <= 65536
    assert (tile.consumers * multiplies + copies) * 128 <= 3 * 128 * launched
    text = emit(region, tile).text
    assert "min(all_tiles, 2 * torch.cuda" in text
    assert "MULTIPLY" not in text
    assert text.count("copied(k_ready, count, STAGES)") == 3
    left_out = text.count("if (k_start <= group_last) & (k_start + BLOCK_N > group_first):")
    assert text.count("copied(v_ready, count, STAGES)") == 3 + left_out == 5
    alone = half(SCALED, causal)
    assert "2 * torch.cuda" not in emit(alone, specialised(alone, planned(alone))).text


@written_in
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPRESSED)
@pytest.mark.parametrize("saves_lse", [False, True])
def test_all_of_it_compiles(name: str, saves_lse: bool) -> None:
    region = EXPRESSED[name]
    for made in (planned(region), tiles(region)):
        assert cross_compile(emit(region, specialised(region, made), saves_lse), 90).shared <= 232_448


def test_masks_that_are_data_are_visited_by_table(monkeypatch: pytest.MonkeyPatch) -> None:
    region = EXPRESSED["documents"]
    monkeypatch.setattr(hopper_choice, "AT_MOST", float("inf"))
    assert (hopper_plan(region, LONG, find("h200")) is not None) == available()
    made = hopper_choice.planned(region, LONG, find("h200"))
    assert made is not None
    assert made.cost is not None
    assert made.resident == 2
    assert made.cost.registers == registers(made)[1], "a program that shares its multiprocessor has fewer"
    added = half(apply("add", SCALED, load(0, b, kv_idx, dtype="bfloat16")), loads=[((Size("B"), N), "bfloat16")])
    # It may hold a finite fill: rows that see no key are visited again
    assert hopper_plan(added, LONG, find("h200")) is None


def test_only_the_first_tile_of_a_causal_row_needs_its_mask() -> None:
    """kv_idx <= q_idx cuts one tile where both sides are 128; another diagonal cuts two."""
    region = EXPRESSED["causal"]
    assert "above" not in emit(region, specialised(region, tiles(region))).text
    for cut in (EXPRESSED["last queries"], half(SCALED, prefix(200))):
        assert "for block in range(1, above):" in emit(cut, specialised(cut, tiles(cut))).text
    whole = half(SCALED, prefix(256))
    assert "above" not in emit(whole, specialised(whole, tiles(whole))).text


def prefix(keys: int) -> Expr:
    return apply("or", apply("lt", kv_idx, Const(keys)), causal)


def test_three_groups_wait_for_both_products_at_once() -> None:
    for name, one in (("three groups", "score, acc, p = warpgroup_mma_wait(0, (score, acc, p))"),
                      ("full", "score = warpgroup_mma_wait(1, (score,))")):  # fmt: skip
        region = EXPRESSED[name]
        loop = emit(region, specialised(region, tiles(region))).text.split("for block in range(1, blocks):")[1]
        assert one in loop
        assert ("known(new_max)" in loop) == (name == "full")


def test_large_heads_carry_two_weights_in_a_register() -> None:
    for dtype, kind in (("bfloat16", "bf16x2"), ("float16", "f16x2")):
        region = half(SCALED, causal, d=256, dtype=dtype)
        text = emit(region, specialised(region, tiles(region))).text
        assert "p = unpacked(words)" in text
        assert f"cvt.rn.{kind}.f32" in text
    for region in (half(SCALED, d=256), half(SCALED, causal, d=128)):
        assert "packed(" not in emit(region, specialised(region, tiles(region))).text


def test_what_rises_along_the_keys_is_a_row_and_a_shift() -> None:
    region = EXPRESSED["alibi"]
    text = emit(region, specialised(region, tiles(region))).text
    assert "score = score * 0.18033688011112042 + slope_n" in text
    assert "kv_pos" not in text


def test_keys_end_where_the_program_ended_them() -> None:
    """K and V may be the first N rows of something longer, whose other rows may hold anything: 0 times NaN is NaN."""
    room = torch.empty(2, 3, 512, 128, dtype=torch.bfloat16)
    assert causal_hopper.described(room, [1, 1, 128, 128], 300).shape == [2, 3, 300, 128]
    region = EXPRESSED["full"]
    assert "v_desc = described(v, [1, 1, 128, 128], N)" in emit(region, specialised(region, tiles(region))).text


def test_maxima_begin_at_a_finite_number() -> None:
    """A sink of -inf is a head without one: rows whose last keys are all hidden would subtract -inf from -inf."""
    region = EXPRESSED["sink"]
    text = " ".join(emit(region, specialised(region, tiles(region))).text.split())
    assert "SCALE, gl.maximum(load0_value * 1.4426950408889634, -3.4028234663852886e+38)" in text
    one = emit(half(sink=Const(0.0)), specialised(half(sink=Const(0.0)), tiles(half()))).text
    assert "row_max = gl.maximum(gl.max(score, axis=1) * SCALE, 0.0)" in one


LONG = {"B": 4, "H": 16, "M": 4096, "N": 4096}


@pytest.mark.parametrize(
    ("name", "sizes", "device", "wanted"),
    [
        ("causal", LONG, "h200", True),
        ("full", LONG, "h100-sxm", True),
        ("causal", LONG, "a100", False),
        ("causal", LONG, "b200", False),
        ("causal", {**LONG, "M": 1}, "h200", False),  # decoding
        ("causal", {"B": 64, "H": 16, "M": 128, "N": 128}, "h200", False),  # from one tile of queries to the next
        ("causal", {"B": 1, "H": 8, "M": 4096, "N": 4096}, "h200", True),
        ("window, soft cap", LONG, "h200", False),  # few tiles of keys for each of queries
        ("bias", LONG, "h200", True),  # two tiles of it
        ("bias, D128", LONG, "h200", True),  # in tiles of 64 keys
        ("bias, float32", LONG, "h200", True),
        ("bias, element by element", LONG, "h200", False),  # keys are not its last dimension
        ("large heads", LONG, "h200", True),
        ("three groups", LONG, "h200", True),
    ],
)
def test_where_it_pays(
    name: str, sizes: dict[str, int], device: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "available", lambda: True)
    made = hopper_plan(EXPRESSED[name], sizes, find(device))
    assert (made is not None) == wanted
    assert made is None or (made.consumers and made.cost is not None)


def test_another_gluon_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "available", lambda: False)
    assert hopper_plan(EXPRESSED["causal"], LONG, find("h200")) is None


def test_show_has_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "available", lambda: True)
    text = _made(EXPRESSED["causal"], LONG, "kernel", find("h200"), frozenset())
    assert "warp_specialize" in text
    assert "2 groups of 4 warps" in _made(EXPRESSED["causal"], LONG, "plan", find("h200"), frozenset())
    assert "warp_specialize" not in _made(EXPRESSED["causal"], LONG, "kernel", find("a100"), frozenset())


FAILS = """
import torch, fusecomp
from fusecomp.backend import explain
from fusecomp.codegen.hopper import specialised
from fusecomp.planning.plan import plan
from fusecomp.running import hopper
hopper.takes = lambda match, sizes, _: specialised(match.region, plan(match.region, sizes))
def attend(q, k, v):
    return ((q @ k.mT) * 0.125).softmax(-1) @ v
args = [torch.randn(1, 2, 40, 64, dtype=torch.float16) for _ in range(3)]
with torch.no_grad():
    [entry] = explain(attend, *args).entries
    fast = torch.compile(attend, backend="fusecomp", options={"inner": "eager", "strict": True})
    torch.testing.assert_close(fast(*args), attend(*args), atol=5e-3, rtol=5e-3)
print(entry.status, entry.plan.consumers)
"""


def test_the_portable_kernel_takes_over() -> None:
    """Where it cannot be launched, as in the interpreter: one warning says so, even under strict."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", FAILS], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["fused", "0"], done.stderr[-2000:]
    assert "runs the portable kernel, which is slower: " in done.stderr
