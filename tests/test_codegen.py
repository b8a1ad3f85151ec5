"""Generated kernels mean their regions, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels import Interpreter, agree, poisoned, tiles
from regions import B, H, M, N, age, attention, b, causal, grouped, h, kv_idx, load, q_idx, scaled_score, score, times
from test_reference import _two_products
from variants import VARIANTS, Variant, by_name

from fusecomp.codegen.emit import emit
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply, substitute
from fusecomp.ir.expr import Const, Expr, Load, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product

SIZES = {"B": 2, "H": 3, "M": 37, "N": 53}
ints = torch.int64


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


def qkv(
    d: int, dv: int = 0, m: int = 37, n: int = 53, heads: int = 3, kv: int = 0, dtype: str = "float32"
) -> list[torch.Tensor]:
    shapes = [(2, heads, m, d), (2, kv or heads, n, d), (2, kv or heads, n, dv or d)]
    return [normal(*shape, dtype=getattr(torch, dtype)) for shape in shapes]


def few_queries(variant: Variant, m: int = 5) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The variant's inputs cut to its first queries, and its lengths."""
    args = variant.make_args()
    cut = [
        x[tuple(slice(m) if e == M else slice(None) for e in o.shape)]
        for o, x in zip(variant.region.operands, args, strict=True)
    ]
    return cut, variant.sizes(cut)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_prefill(interpreter: Interpreter, variant: Variant) -> None:
    args = variant.make_args()
    agree(interpreter, variant.region, args, variant.sizes(args))


SPLIT = [
    "one_query", "windows_5d", "window", "causal_bottom_right", "alibi", "bias", "dead_row_nan", "dead_row_zero",
    "dead_row_mean", "key_lengths", "key_lengths_minus_1e9", "sinks", "value_head_size_differs",
]  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_keys_split_over_programs(interpreter: Interpreter, name: str) -> None:
    variant = by_name(name)
    agree(interpreter, variant.region, *few_queries(variant), tiles(variant.region, 16, 16, "decode"))


@pytest.mark.parametrize("skeleton", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["grouped_heads", "softcap_causal_window_gqa", "one_key_head"])
def test_heads_packed_in_the_rows(interpreter: Interpreter, name: str, skeleton: str) -> None:
    variant = by_name(name)
    agree(interpreter, variant.region, *few_queries(variant, 7), tiles(variant.region, 16, 16, skeleton, 3))


def test_slopes_and_sinks_of_packed_heads(interpreter: Interpreter) -> None:
    """Four of a group's eight heads in a tile: what depends on h varies along the rows."""
    s = apply("add", scaled_score, apply("mul", age, load(0, h)))
    loads = [((H,), "float32"), ((H,), "float32")]
    region = attention(s, causal, loads=loads, sink=load(1, h), **grouped(8, 2))
    args = [*qkv(16, m=7, heads=16, kv=2), normal(16), normal(16)]
    for skeleton in ("prefill", "decode"):
        agree(interpreter, region, args, {**SIZES, "H": 16, "M": 7}, tiles(region, 16, 16, skeleton, pack=4))


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (40, 24), (80, 80), (192, 128), (256, 256)])
def test_head_sizes(interpreter: Interpreter, d: int, dv: int) -> None:
    region = attention(times(score, d**-0.5), causal, d=d, dv=dv)
    agree(interpreter, region, qkv(d, dv, m=20, n=20), {**SIZES, "M": 20, "N": 20})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(interpreter: Interpreter, dtype: str) -> None:
    bias = load(0, b, h, q_idx, kv_idx, dtype=dtype)
    region = attention(apply("add", scaled_score, bias), causal, loads=[((B, H, M, N), dtype)], dtype=dtype)
    args = [*qkv(16, dtype=dtype), normal(2, 3, 37, 53, dtype=getattr(torch, dtype))]
    agree(interpreter, region, args, SIZES)


def test_operands_of_other_dtypes(interpreter: Interpreter) -> None:
    """bfloat16 tensors, multiplied in float32."""
    region = attention(scaled_score, causal)
    narrow = tuple(replace(o, dtype="bfloat16") for o in region.operands)
    agree(interpreter, replace(region, operands=narrow), qkv(16, dtype="bfloat16"), SIZES)


def test_two_products(interpreter: Interpreter) -> None:
    args = [*qkv(16), normal(2, 3, 37, 8), normal(2, 53, 8)]
    source = agree(interpreter, _two_products(), args, SIZES)
    assert "score1" not in source.text.partition("def launch")[0].partition('"""\n\n')[2]


def test_two_products_used_apart(interpreter: Interpreter) -> None:
    region = replace(_two_products(), score=apply("mul", scaled_score, apply("add", score, type(score)(1))))
    agree(interpreter, region, [*(x * 0.3 for x in qkv(16)), normal(2, 3, 37, 8), normal(2, 53, 8)], SIZES)


def packed_projection() -> AttentionRegion:
    """q, k and v in one tensor [B, M, 3, H, D], and an output [B, M, H, Dv]."""
    region = attention(scaled_score, causal)
    d, dv = region.products[0].d, region.dv
    at = [(b, row, Const(i), h, x) for i, (row, x) in enumerate([(q_idx, d), (kv_idx, d), (kv_idx, dv)])]
    product = Product(Access("qkv", at[0]), Access("qkv", at[1]), d, "float32")
    one = (Operand("qkv", (B, M, Const(3), H, d.size), "float32"),)
    axes = ("b", "q_idx", "h", "dv")
    return replace(region, operands=one, products=(product,), v=Access("qkv", at[2]), out_axes=axes)


def test_one_tensor_holds_q_k_and_v(interpreter: Interpreter) -> None:
    agree(interpreter, packed_projection(), [normal(2, 37, 3, 3, 16)], {**SIZES, "N": 37})


def test_output_memory_in_another_order(interpreter: Interpreter) -> None:
    out = torch.full([2, 37, 3, 16], 123.0).transpose(1, 2)
    agree(interpreter, attention(scaled_score), qkv(16), SIZES, out=out)


def test_heads_and_batch_in_one_axis(interpreter: Interpreter) -> None:
    """bmm's batch axis of B H, with lengths per sequence."""
    z = Var("b", Size("B"))
    length = load(0, apply("floordiv", z, Const(3)), dtype="int64")
    region = attention(scaled_score, apply("lt", kv_idx, length), batch=(z,), loads=[((2,), "int64")])
    args = [normal(6, 37, 16), normal(6, 53, 16), normal(6, 53, 16), torch.tensor([20, 0])]
    agree(interpreter, region, args, {"B": 6, "M": 37, "N": 53})


def pages(at: tuple[Expr, ...], pool: tuple[Expr, ...]) -> AttentionRegion:
    x, y = Var("d", Const(16)), Var("dv", Const(16))
    operands = (
        Operand("q", (B, H, M, Const(16)), "float32"), Operand("k", pool, "float32"), Operand("v", pool, "float32"),
        Operand("table", (B, Const(5)), "int32"), Operand("lengths", (B,), "int64"),
    )  # fmt: skip
    product = Product(Access("q", (b, h, q_idx, x)), Access("k", (*at, x)), x, "float32")
    seen = (apply("lt", kv_idx, Load("lengths", (b,), "int64")),)
    return AttentionRegion(operands, (b, h), q_idx, kv_idx, (product,), Access("v", (*at, y)), y, scaled_score, seen)


PAGE = Load("table", (b, apply("floordiv", kv_idx, Const(4))), "int32")
SLOT, KV_HEAD = apply("mod", kv_idx, Const(4)), apply("floordiv", h, Const(3))
PAGED = {
    "paged": pages((PAGE, SLOT, KV_HEAD), (Size("P"), Const(4), Const(2), Const(16))),
    "flat": pages((apply("add", apply("mul", PAGE, Const(4)), SLOT), KV_HEAD), (Size("P"), Const(2), Const(16))),
}


@pytest.mark.parametrize("skeleton", ["prefill", "decode"])
@pytest.mark.parametrize("layout", PAGED)
def test_keys_in_pages(interpreter: Interpreter, layout: str, skeleton: str) -> None:
    """Wild page numbers and NaN past the last key are never followed."""
    region = PAGED[layout]
    k, v = normal(11, 4, 2, 16), normal(11, 4, 2, 16) + 1
    table = torch.tensor([[7, 2, 9, 10, 999_999], [0, 1, 3, 4, -5_000_000]], dtype=torch.int32)
    k[10], v[10] = float("nan"), float("nan")
    k[9, 3], v[9, 3] = float("nan"), float("nan")
    pool = [x.reshape(44, 2, 16) if layout == "flat" else x for x in (k, v)]
    args = [normal(2, 6, 1, 16), *pool, table, torch.tensor([11, 16])]
    agree(interpreter, region, args, {"B": 2, "H": 6, "M": 1, "N": 20}, tiles(region, 16, 16, skeleton, pack=3))


@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
def test_as_many_keys_as_queries(interpreter: Interpreter, loads: str) -> None:
    """Of a length known at run time, and of a constant one, with a bias that is loaded where the keys end."""
    bias = load(0, q_idx, kv_idx)
    for size in (N, Const(37)):
        row, key = Var("q_idx", size), Var("kv_idx", size)
        region = attention(apply("add", scaled_score, bias), causal, loads=[((size, size), "float32")])
        region = substituted(replace(region, q_idx=row, kv_idx=key), {q_idx: row, kv_idx: key})
        args = [*qkv(16, n=37), normal(37, 37)]
        plan = replace(tiles(region, 16, 32), loads=loads)
        agree(interpreter, region, args, {"B": 2, "H": 3, "N": 37}, plan)


def substituted(region: AttentionRegion, places: dict[Expr, Expr]) -> AttentionRegion:
    """Every expression of the region with its indices replaced."""

    def moved(a: Access) -> Access:
        return replace(a, index=tuple(substitute(e, places) for e in a.index))

    products = tuple(replace(p, q=moved(p.q), k=moved(p.k)) for p in region.products)
    keep = tuple(substitute(e, places) for e in region.keep)
    return replace(region, products=products, v=moved(region.v), score=substitute(region.score, places), keep=keep)


@pytest.mark.parametrize("skeleton", ["prefill", "decode"])
def test_tensors_without_dimensions(interpreter: Interpreter, skeleton: str) -> None:
    """A learned scale, a shift inside tanh, a length, a weight and a sink, one number each."""
    s = apply("mul", apply("tanh", apply("add", score, load(1))), load(0))
    seen = apply("lt", kv_idx, load(2, dtype="int64"))
    loads = [((), "float32"), ((), "bfloat16"), ((), "int64"), ((), "float32"), ((), "float32")]
    region = attention(s, seen, loads=loads, weight=load(3), sink=load(4))
    shift = torch.tensor(0.1, dtype=torch.bfloat16)
    args = [*qkv(16, m=7), torch.tensor(3.0), shift, torch.tensor(41), torch.tensor(0.5), torch.tensor(0.2)]
    agree(interpreter, region, args, {**SIZES, "M": 7}, tiles(region, 16, 16, skeleton))


def test_a_dead_row_under_a_scale_without_dimensions(interpreter: Interpreter) -> None:
    scaled, seen = apply("mul", score, load(0)), apply("lt", kv_idx, load(1, b, dtype="int64"))
    fill = {"fill": -1e4, "filled_score": apply("where", seen, scaled, Const(-1e4))}
    region = attention(scaled, seen, loads=[((), "float32"), ((B,), "int64")], **fill)
    agree(interpreter, region, [*qkv(16), torch.tensor(0.25), torch.tensor([20, 0])], SIZES)


@pytest.mark.parametrize("skeleton", ["prefill", "decode"])
def test_float8_pages_with_a_scale_without_dimensions(interpreter: Interpreter, skeleton: str) -> None:
    """(k_scale K) and (v_scale V) of a quantised cache: the scales are factors of the score and the weight."""
    region = PAGED["paged"]
    fp8 = {"k": "float8_e4m3fn", "v": "float8_e4m3fn"}
    held = tuple(replace(o, dtype=fp8.get(o.name, o.dtype)) for o in region.operands)
    scales = (Operand("k_scale", (), "float32"), Operand("v_scale", (), "float32"))
    s = apply("mul", region.score, Load("k_scale", (), "float32"))
    region = replace(region, operands=(*held, *scales), score=s, weight=Load("v_scale", (), "float32"))
    table = torch.tensor([[7, 2, 9, 10, 999_999], [0, 1, 3, 4, -5_000_000]], dtype=torch.int32)
    pool = [normal(11, 4, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    scalars = [torch.tensor(0.7), torch.tensor(1.5)]
    args = [normal(2, 6, 1, 16), *pool, table, torch.tensor([11, 16]), *scalars]
    agree(interpreter, region, args, {"B": 2, "H": 6, "M": 1, "N": 20}, tiles(region, 16, 16, skeleton, pack=3))


NEAR_THE_FILL = {"kept": -5.1e3, "at the level": -4.9e3}


@pytest.mark.parametrize("live", NEAR_THE_FILL.values(), ids=NEAR_THE_FILL)
@pytest.mark.parametrize("natural", [False, True])
def test_rows_at_most_half_the_fill_take_every_key(interpreter: Interpreter, live: float, natural: bool) -> None:
    """In base 2 and in natural units; dead keys differ in their scores, as under an additive mask."""
    seen = apply("lt", kv_idx, load(0, b, dtype="int64"))
    s = apply("add", scaled_score, load(1, h) if natural else Const(live))
    lost = apply("add", scaled_score, Const(live - 2.0))
    region = attention(
        s, seen, loads=[((B,), "int64"), ((H,), "float32")] if natural else [((B,), "int64")],
        fill=-1e4, filled_score=apply("where", seen, s, lost), precision="ieee" if natural else "tf32",
    )  # fmt: skip
    args = [*qkv(16), torch.tensor([20, 0]), *([torch.full((3,), live)] if natural else [])]
    expected = "unseen = row_max <= " + ("-5000.0" if natural else "-7213.4")
    assert expected in agree(interpreter, region, args, SIZES, tolerance=1e-3).text


def test_a_relative_bias(interpreter: Interpreter) -> None:
    """A table looked up at a function of the distance."""
    distance = apply("add", apply("sub", kv_idx, q_idx), apply("sub", M, Const(1)))
    bias = load(0, apply("floordiv", distance, Const(2)), h)
    region = attention(apply("add", scaled_score, bias), loads=[((45, H), "float32")])
    agree(interpreter, region, [*qkv(16), normal(45, 3)], SIZES)


def test_infinite_and_nan_inputs_reach_the_output(interpreter: Interpreter) -> None:
    q, k, v = qkv(16)
    q[0, 0, 5, 3], k[0, 1, 7, 2], v[1, 2, 9, 4] = float("nan"), float("inf"), float("inf")
    agree(interpreter, attention(scaled_score), [q, k, v], SIZES)


def test_no_query_no_key(interpreter: Interpreter) -> None:
    agree(interpreter, attention(scaled_score), qkv(16, n=0), {**SIZES, "N": 0})
    agree(interpreter, attention(scaled_score), qkv(16, m=0), {**SIZES, "M": 0})


def test_lengths_smaller_than_a_tile(interpreter: Interpreter) -> None:
    region = attention(scaled_score, causal, apply("lt", age, Const(3)))
    agree(interpreter, region, qkv(16, m=5, n=5), {**SIZES, "M": 5, "N": 5}, tiles(region, 64, 64))


def test_an_operand_no_kernel_reads() -> None:
    region = attention(scaled_score)
    d = region.products[0].d
    mixed = Access("k", (b, h, kv_idx, apply("mod", apply("add", kv_idx, d), Const(16))))
    wrong = replace(region, products=(replace(region.products[0], k=mixed),))
    with pytest.raises(KernelError, match="mixes kv_idx and d"):
        emit(wrong, tiles(wrong))


def test_an_axis_named_like_a_variable_of_the_kernel() -> None:
    with pytest.raises(KernelError, match="cannot be called n"):
        emit(attention(batch=(Var("n", Size("B")), h)), tiles(attention()))


def test_poison_is_around() -> None:
    x = poisoned(torch.zeros(2, 3))
    assert torch.isnan(x.as_strided((1,), (1,), 0)).all()
    assert not torch.isnan(x).any()
