"""What Hopper's forward kernel reads for each pair: in blocks, which the product is added to; and how it masks."""

from __future__ import annotations

from dataclasses import replace

from kernels import tiles
from regions import H, M, N, b, causal, h, kv_idx, load, q_idx, score, times
from test_hopper import BIASED, CAPPED, EXPRESSED, LAST, LONG, SCALED, WINDOW, half

from fusecomp.codegen.copied import copied
from fusecomp.codegen.emit import emit
from fusecomp.codegen.hopper import specialised
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Size
from fusecomp.planning.device import find
from fusecomp.planning.plan import plan
from fusecomp.running.hopper import available
from fusecomp.running.hopper import planned as hopper_plan


def test_biases_come_in_blocks() -> None:
    """One beside each tile of K, by the same barriers, or none: then each thread reads its own elements."""
    for name in ("bias", "bias, D128", "bias, float32", "bias, element by element"):
        region, copies = EXPRESSED[name], name != "bias, element by element"
        text = " ".join(emit(region, specialised(region, tiles(region))).text.split())
        assert ("BLOCK_M * BLOCK_N * " in text) == ("load0_smem.index(slot * GROUPS + group)" in text) == copies
        assert ("gl.load( load0_tile_base" in text or "gl.load(load0_tile_base" in text) == (not copies)
    large = half(BIASED, d=256, loads=[((H, M, N), "bfloat16")])
    assert hopper_plan(large, LONG, find("h200")) is None
    part = half(apply("add", SCALED, load(0, h, q_idx, apply("add", kv_idx, Const(3)), dtype="bfloat16")),
                loads=[((H, M, apply("add", N, Const(3))), "bfloat16")])  # fmt: skip
    assert not copied(part)
    larger = half(BIASED, loads=[((H, Const(5000), Const(6000)), "bfloat16")])
    assert copied(larger)


def test_biases_make_tiles_smaller() -> None:
    """Fewer copies of K and V come before fewer keys."""
    for d, dtype, made in ((64, "bfloat16", (128, 3)), (64, "float32", (128, 2)),
                           (128, "bfloat16", (64, 3)), (128, "float32", (64, 2))):  # fmt: skip
        bias = load(0, h, q_idx, kv_idx, dtype=dtype)
        region = half(apply("add", SCALED, bias), d=d, loads=[((H, M, N), dtype)])
        tile = specialised(region, tiles(region))
        assert (tile.block_n, tile.stages) == made


def test_a_list_of_tiles() -> None:
    """Of its full tiles no mask is copied or read; K, V and the mask follow one list."""
    for name in ("boolean mask", "boolean mask, D128", "bias of all heads"):
        region = EXPRESSED[name]
        plan = specialised(region, replace(tiles(region), visits="table"))
        text = emit(region, plan).text
        consume = text[text.index("def consume") :]
        masked, full = consume.split("for block in range(1, above):")[1].split("for block in range(above, blocks):")
        assert "load0_smem" in masked
        assert "fence_async_shared" in masked
        assert "load0_tile" not in full.split("done += blocks")[0]
        assert "if block < above:" in text
        assert text.count("key_of(") == 6  # of K and V in the warp that copies, of the first tile and of both loops
        assert "def list_tiles" in text


def test_who_reads_a_mask_of_pairs() -> None:
    """Not with heads of 256, for which shared memory has no room; nor what is added for each request, which may hide
    rows whole by a finite number."""
    device = find("h200")
    kept = load(0, b, q_idx, kv_idx, dtype="bool")
    more = {"loads": [((Size("B"), M, N), "bool")]}
    added = apply("add", SCALED, load(0, b, q_idx, kv_idx, dtype="bfloat16"))
    each = half(added, loads=[((Size("B"), M, N), "bfloat16")])
    assert plan(each, LONG, device).visits == "table"
    for region, visits in (
        (half(SCALED, kept, **more), "table"), (half(SCALED, kept, d=128, **more), "table"),
        (EXPRESSED["bias of all heads"], "table"), (EXPRESSED["bias"], "bounds"),
        (half(SCALED, kept, d=256, **more), None), (each, None),
    ):  # fmt: skip
        found = hopper_plan(region, LONG, device)
        assert (found and found.visits) == (visits if available() else None)


def test_one_multiply_add_makes_an_exponential_of_a_bias() -> None:
    """Also of the least float, which hides a key, and a row where it hides all of them."""
    region = EXPRESSED["bias"]
    text = emit(region, specialised(region, tiles(region))).text
    assert "weights = gl.exp2(score * unit[:, None] - top[:, None])" in text
    assert "base_2" not in emit(EXPRESSED["alibi"], specialised(EXPRESSED["alibi"], tiles(EXPRESSED["alibi"]))).text


def test_a_product_is_added_to_its_bias() -> None:
    """Where Q takes the scale up without a rounding: by a power of two, in bfloat16, in registers."""
    bias, loads = load(0, h, q_idx, kv_idx, dtype="bfloat16"), [((H, M, N), "bfloat16")]
    added = lambda s, **more: half(apply("add", s, bias), loads=loads, **more)  # noqa: E731
    for region, scaled, begun in (
        (added(SCALED), True, True),
        (half(apply("add", bias, score), loads=loads), False, True),
        (added(times(score, 0.1)), False, False),
        (added(SCALED, dtype="float16"), False, False),
        (added(CAPPED), False, False),
        (half(BIASED, apply("gt", bias, Const(0.0)), loads=loads), False, False),
    ):
        text = emit(region, specialised(region, tiles(region))).text
        assert ("q_tile = (q_tile * 0.125).to(gl.bfloat16)" in text) == scaled
        assert (", load0_tile, is_async=True" in " ".join(text.split())) == begun
        assert ("score = load0_tile + score" in text or "+ load0_tile" in text) == (not begun)


def test_bounds_are_compared_by_themselves() -> None:
    """All that end keys as one, and all that begin them; what a tensor holds, or an odd term, is selected by."""
    odd = apply("eq", apply("mod", kv_idx, Const(3)), Const(0))
    lengths = apply("gt", load(0, b, dtype="int64"), kv_idx)
    ends = "until(score, kv_idx, gl.minimum(q_idx + 1, k_end))"
    for keep, more, said in (
        ((causal, WINDOW), {}, ("since(score, kv_idx, q_idx - 255)", ends)),
        ((LAST,), {}, ("until(score, kv_idx, N + q_idx + 1 - M)",)),
        ((causal, odd), {}, (ends, "score = gl.where(kv_idx % 3 == 0, score")),
        ((lengths,), {"loads": [((Size("B"),), "int64")]}, ("until(score, kv_idx, k_end)",)),
    ):
        region = half(SCALED, *keep, **more)
        text = " ".join(emit(region, specialised(region, tiles(region))).text.split()).replace("( ", "(")
        assert all(" ".join(line.split()) in text.replace(", )", ")") for line in said), said
        assert "live[None, :] &" not in text
