"""The golden kernels: complete generated files, where a reviewer sees what a change of the generator changes.

python tests/golden_kernels.py        writes them again; `git diff tests/golden` then shows the change
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kernels import tiles
from regions import B, H, M, N, age, attention, b, causal, dropout, grouped, h, kv_idx, load, q_idx, score, times
from regions import filled as filled_score

from fusecomp.codegen import hopper_backward
from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.emit import emit
from fusecomp.codegen.hopper import specialised
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Load, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product
from fusecomp.planning.backward import BackwardPlan, backward_plan
from fusecomp.planning.tile import TilePlan

FOLDER = Path(__file__).parent / "golden"


def _attention(s: Expr, *keep: Expr, **more: object) -> AttentionRegion:
    return attention(s, *keep, dtype="bfloat16", **{"d": 64, **more})  # type: ignore[arg-type]


def _softcap(x: Expr, cap: float) -> Expr:
    return times(apply("tanh", apply("div", x, Const(cap))), cap)


def _alibi() -> AttentionRegion:
    slope = apply("exp2", apply("mul", apply("neg", apply("add", h, Const(1))), Const(0.5)))
    return _attention(apply("add", times(score, 0.125), apply("mul", apply("neg", age), slope)), causal)


def _padded() -> AttentionRegion:
    seen = apply("lt", kv_idx, load(0, b, dtype="int64"))
    return attention(times(score, 0.25), seen, loads=[((B,), "int64")], **filled_score(-1e9, seen))


def _bias() -> AttentionRegion:
    bias = load(0, h, q_idx, kv_idx, dtype="bfloat16")
    return _attention(apply("add", times(score, 0.125), bias), loads=[((H, M, N), "bfloat16")])


def _shared_bias() -> AttentionRegion:
    """One head; all requests share the bias."""
    s = apply("add", times(score, 0.125), load(0, q_idx, kv_idx, dtype="bfloat16"))
    return _attention(s, batch=(b,), loads=[((M, N), "bfloat16")])


def paged(dtype: str = "bfloat16", page: int = 16, group: int = 4, d: int = 128) -> AttentionRegion:
    """K and V in a pool [P, page, Hkv, D], found through table[b, n // page]; keys up to lengths[b]."""
    x, y = Var("d", Const(d)), Var("dv", Const(d))
    number = Load("table", (b, apply("floordiv", kv_idx, Const(page))), "int32")
    at = (number, apply("mod", kv_idx, Const(page)), apply("floordiv", h, Const(group)))
    pool = (Size("P"), Const(page), Const(2), Const(d))
    operands = (
        Operand("q", (B, H, M, Const(d)), dtype), Operand("k_pool", pool, dtype), Operand("v_pool", pool, dtype),
        Operand("table", (B, Const(8)), "int32"), Operand("lengths", (B,), "int32"),
    )  # fmt: skip
    product = Product(Access("q", (b, h, q_idx, x)), Access("k_pool", (*at, x)), x, dtype)
    seen = (apply("lt", kv_idx, Load("lengths", (b,), "int32")),)
    return AttentionRegion(
        operands, (b, h), q_idx, kv_idx, (product,), Access("v_pool", (*at, y)), y, times(score, d**-0.5), seen,
        pv_dtype=dtype, out_dtype=dtype,
    )  # fmt: skip


def _documents() -> AttentionRegion:
    """Causal, within documents that share a row, known by their numbers."""
    same = apply("eq", load(0, b, q_idx, dtype="int64"), load(0, b, kv_idx, dtype="int64"))
    return _attention(times(score, 0.125), causal, same, loads=[((B, M), "int64")])


def _data() -> AttentionRegion:
    """A boolean mask of each sequence, which its heads share."""
    return _attention(times(score, 0.125), load(0, b, 0, q_idx, kv_idx, dtype="bool"), loads=[((B, 1, M, N), "bool")])


WINDOW = apply("lt", age, Const(256))
GOLDEN: dict[str, tuple[AttentionRegion, TilePlan]] = {
    "causal": (r := _attention(times(score, 128**-0.5), causal, d=128), tiles(r, 64, 64)),
    "causal_descriptors": (
        r := _attention(times(score, 128**-0.5), causal, d=128),
        replace(tiles(r, 128, 128), warps=8, stages=3, loads="descriptor"),
    ),
    "causal_hopper": (r := _attention(times(score, 128**-0.5), causal, d=128), specialised(r, tiles(r))),
    "softcap_window_gqa": (
        r := _attention(_softcap(times(score, 0.125), 30.0), causal, WINDOW, **grouped(3)),
        tiles(r, 64, 64),
    ),
    "alibi": (r := _alibi(), tiles(r, 128, 64)),
    "padded_finite_fill": (r := _padded(), tiles(r, 64, 32)),
    "padded_finite_fill_decode": (r := _padded(), tiles(r, 16, 64, "decode")),
    "bias": (r := _bias(), tiles(r, 64, 64)),
    "latent_192_128": (
        r := _attention(times(score, 192**-0.5), causal, d=192, dv=128),
        replace(tiles(r, 128, 64), warps=8),
    ),
    "mask_that_is_data": (
        r := _data(),
        replace(tiles(r, 64, 64), loads="descriptor", visits="table"),
    ),
    "documents": (r := _documents(), replace(tiles(r, 64, 64), visits="ranges")),
    "dropout": (r := dropout(_attention(times(score, 0.125), causal), 0.1), tiles(r, 64, 64)),
    "paged_decode": (r := paged(), tiles(r, 16, 64, "decode", pack=4)),
}


NOTHING: frozenset[str] = frozenset()
BACKWARD: dict[str, tuple[AttentionRegion, BackwardPlan, frozenset[str]]] = {
    "causal_gqa_backward": (r := _attention(times(score, 0.125), causal, **grouped(3)), backward_plan(r), NOTHING),
    "causal_hopper_backward": (
        r := _attention(times(score, 128**-0.5), causal, d=128),
        hopper_backward.specialised(r, specialised(r, tiles(r))),
        NOTHING,
    ),
    "dropout_backward": (r := dropout(_attention(times(score, 0.125), causal), 0.1), backward_plan(r), NOTHING),
    "bias_backward": (r := _shared_bias(), backward_plan(r), frozenset({"load0"})),
}
"""What learns beside Q, K and V comes last."""


def text(name: str) -> str:
    """The golden file's text as the generator makes it now."""
    return emit_backward(*BACKWARD[name]).text if name in BACKWARD else emit(*GOLDEN[name]).text


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in (*GOLDEN, *BACKWARD):
        (FOLDER / f"{name}.py").write_text(text(name))
