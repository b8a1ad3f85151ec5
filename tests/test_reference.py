"""The dense meaning of a region is eager's value, for every variant and for what the variants do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from regions import attention, b, h, kv_idx, load, q_idx, scaled_score
from torch import Tensor
from variants import VARIANTS, Variant, by_name

from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Apply, Cast, Const, Load, Reduce, Score, Size, Var
from fusecomp.ir.reference import Env, evaluate, evaluate_expr, read
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product

F64 = torch.float64


def dense(variant: Variant, args: tuple[Tensor, ...], **options: object) -> Tensor:
    return evaluate(variant.region, args, variant.sizes(args), **options)


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_region_means_what_eager_computes(variant: Variant) -> None:
    args = variant.make_args(F64)
    same(dense(variant, args), variant.fn(*args), variant.tolerance)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_rows_are_rows_of_the_whole(variant: Variant) -> None:
    args = variant.make_args(F64)
    whole, place = dense(variant, args), variant.region.out_axes.index("q_idx")
    for rows in (slice(0, None, 3), slice(1, 9), torch.tensor([0, whole.shape[place] - 1])):
        picked = torch.arange(whole.shape[place])[rows] if isinstance(rows, slice) else rows
        same(dense(variant, args, rows=rows), whole.index_select(place, picked))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_in_its_own_dtype_it_errs_as_eager_does(variant: Variant) -> None:
    args = variant.make_args()
    actual = dense(variant, args, dtype=torch.float32, rounded=True, out_dtype=args[0].dtype)
    same(actual, variant.fn(*args), 2e-2 if args[0].dtype == torch.bfloat16 else 1e-5)


def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.25).softmax(-2) @ v


def tiled_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)
    return (q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v


def causal_top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.transpose(-2, -1) * 0.25).masked_fill(~keep, -float("inf")).softmax(-1) @ v


def bool_mask_added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.25 + keep).softmax(-1) @ v


def mask_before_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * 0.25 * mask).softmax(-1) @ v


TWINS = [
    ("scaled", softmax_over_queries),
    ("grouped_heads", tiled_heads),
    ("causal_bottom_right", causal_top_left),
    ("bool_mask", bool_mask_added),
    ("mask_after_softmax", mask_before_softmax),
]


@pytest.mark.parametrize(("name", "twin"), TWINS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_near_miss_is_another_function(name: str, twin: object) -> None:
    args = by_name(name).make_args(F64)
    assert (dense(by_name(name), args) - twin(*args)).abs().max() > 1e-2


def test_a_dead_key_is_not_read() -> None:
    variant = by_name("key_lengths")
    clean = variant.make_args(F64)
    q, k, v, lengths = (x.clone() for x in clean)
    k[1, :, 17:], v[1, :, 17:] = float("nan"), float("inf")
    same(dense(variant, (q, k, v, lengths)), dense(variant, clean))


def test_nan_that_eager_reads_stays() -> None:
    variant = by_name("causal_tril")
    q, k, v = variant.make_args(F64)
    k[:, :, 20] = float("nan")
    out = dense(variant, (q, k, v))
    same(out, variant.fn(q, k, v))
    assert out[:, :, 20:].isnan().all()
    assert not out[:, :, :20].isnan().any()


def test_a_sink_leaves_a_dead_row_zero() -> None:
    mask = load(0, q_idx, kv_idx, dtype="bool")
    loads = [((Size("M"), Size("N")), "bool"), ((Size("H"),), "float32")]
    region = attention(scaled_score, mask, loads=loads, sink=load(1, h))
    *qkv, keep = by_name("dead_row_nan").make_args(F64)
    out = evaluate(region, [*qkv, keep, torch.zeros(3, dtype=F64)], [2, 3, 37, 53])
    assert (out[:, :, 3] == 0).all()
    assert out.isfinite().all()


def _two_products() -> AttentionRegion:
    """The latent attention of DeepSeek: a part without positions per head, a rotary part whose key all heads share."""
    region = attention(apply("mul", apply("add", Score(0), Score(1)), Const(0.3)))
    r = Var("r", Const(8))
    rotary = Product(Access("q1", (b, h, q_idx, r)), Access("k1", (b, kv_idx, r)), r, "float32")
    more = (
        Operand("q1", (*region.operands[0].shape[:3], r.size), "float32"),
        Operand("k1", (b.size, kv_idx.size, r.size), "float32"),
    )
    fields = {**region.__dict__, "operands": region.operands + more, "products": (*region.products, rotary)}
    return AttentionRegion(**fields)


def test_two_products() -> None:
    q, k, v = by_name("plain").make_args(F64)
    q1, k1 = torch.randn(2, 3, 37, 8, dtype=F64), torch.randn(2, 53, 8, dtype=F64)
    s = (q @ k.mT + q1 @ k1[:, None].mT) * 0.3
    same(evaluate(_two_products(), [q, k, v, q1, k1], [2, 3, 37, 53]), s.softmax(-1) @ v)


def test_keys_in_pages() -> None:
    """K and V in a pool [pages, 4, Hkv, D], at table[b, n // 4]; wild pages past the length are never looked at."""
    x, y = Var("d", Const(16)), Var("dv", Const(16))
    page = Load("table", (b, apply("floordiv", kv_idx, Const(4))), "int64")
    at = (page, apply("mod", kv_idx, Const(4)), apply("floordiv", h, Const(3)))
    pool = (Size("P"), Const(4), Const(2), x.size)
    region = AttentionRegion(
        (Operand("q", (b.size, h.size, q_idx.size, x.size), "float32"), Operand("k", pool, "float32"),
         Operand("v", pool, "float32"), Operand("table", (b.size, Const(5)), "int64"),
         Operand("lengths", (b.size,), "int64")),
        (b, h), q_idx, kv_idx, (Product(Access("q", (b, h, q_idx, x)), Access("k", (*at, x)), x, "float32"),),
        Access("v", (*at, y)), y, scaled_score, (apply("lt", kv_idx, Load("lengths", (b,), "int64")),),
    )  # fmt: skip
    q = torch.randn(2, 6, 1, 16, dtype=F64)
    k, v = torch.randn(11, 4, 2, 16, dtype=F64), torch.randn(11, 4, 2, 16, dtype=F64)
    k[10] = v[10] = float("nan")
    table = torch.tensor([[7, 2, 9, 10, 999], [0, 1, 3, 4, -5]])
    lengths = torch.tensor([11, 16])
    out = evaluate(region, [q, k, v, table, lengths], [2, 6, 1, 20])
    for i, length in enumerate(lengths):
        gathered = [p[table[i, : length // 4 + 1].clamp(0, 10)].flatten(0, 1)[:length] for p in (k, v)]
        kk, vv = (g.transpose(0, 1).repeat_interleave(3, 0) for g in gathered)
        same(out[i], (q[i] @ kk.mT * 0.25).softmax(-1) @ vv)


def test_operands_are_rounded_where_the_product_says_so() -> None:
    """Under autocast float32 tensors enter the product in bfloat16."""
    region = attention(scaled_score)
    product = Product(region.products[0].q, region.products[0].k, region.products[0].d, "bfloat16")
    fields = {**region.__dict__, "products": (product,), "pv_dtype": "bfloat16"}
    q, k, v = by_name("scaled").make_args()
    rounded = [x.bfloat16().to(F64) for x in (q, k, v)]
    expected = (rounded[0] @ rounded[1].mT * 0.25).softmax(-1) @ rounded[2]
    same(evaluate(AttentionRegion(**fields), [q, k, v], [2, 3, 37, 53]), expected)


ENV = Env(("b", "q_idx"), {"b": range(2), "q_idx": range(3, 7)}, {"M": 9}, {"t": torch.arange(40.0).view(4, 10)})


def test_reading_places() -> None:
    i, t = Var("q_idx", Size("M")), ENV.tensors["t"]
    same(read(t, (b, i), ENV), t[:2, 3:7])
    same(read(t, (Const(3), i), ENV), t[3:, 3:7])
    same(read(t, (i, i), ENV), t[3:, 3:7])  # t[3, 3], then the last row where 4, 5 and 6 lie outside
    same(read(t, (b, apply("add", b, i)), ENV), torch.stack([t[0, 3:7], t[1, 4:8]]))
    assert read(t, (b, i), ENV)._base is t._base


def test_floats_are_worked_in_one_dtype() -> None:
    i = Var("q_idx", Size("M"))
    assert evaluate_expr(apply("div", i, Size("M")), ENV).dtype == F64
    assert evaluate_expr(apply("mul", i, Const(0.1)), ENV).flatten().tolist() == [x * 0.1 for x in range(3, 7)]
    assert evaluate_expr(apply("where", apply("lt", i, Const(5)), i, Const(0)), ENV).dtype == torch.int64


def test_only_roundings_that_every_kernel_shares_are_carried_out() -> None:
    third = torch.full((1, 1), 1 / 3, dtype=F64)
    env = Env(("b", "q_idx"), ENV.spans, scores=(third,))
    exact = replace(env, rounded=True)
    half = torch.tensor(1 / 3, dtype=torch.bfloat16).item()
    assert evaluate_expr(Cast(Score(0), "bfloat16"), env).item() == 1 / 3
    assert evaluate_expr(Cast(Score(0), "bfloat16"), exact).item() == half
    assert evaluate_expr(Cast(Const(1 / 3), "bfloat16"), env).item() == half
    assert evaluate_expr(Cast(Apply("add", (Score(0), Const(2.5))), "int32"), env).item() == 2


def test_a_reduction_is_not_a_scalar_at_one_position() -> None:
    with pytest.raises(TypeError, match="not a scalar"):
        evaluate_expr(Reduce("sum", b, Score(0)), ENV)
