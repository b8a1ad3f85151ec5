"""The CPU lowering is the region's meaning, and never holds S."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_kernels import paged
from regions import attention, b, kv_idx, load, q_idx, scaled_score
from test_reference import _two_products
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from variants import VARIANTS, Variant, by_name

from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Size
from fusecomp.ir.reference import bind, evaluate
from fusecomp.ir.region import AttentionRegion
from fusecomp.running import blocks, cpu


def run(region: AttentionRegion, args: tuple[Tensor, ...], sizes: dict[str, int], barred: bool = False) -> Tensor:
    """The lowered region's output, in memory that nothing else has touched; `barred`: without SDPA."""
    expected = evaluate(region, args, sizes)
    out = torch.full_like(expected, 123.0, dtype=args[0].dtype)
    if barred:
        axis = cpu._by_axis(region, out)
        blocks.Blocks.of(region).run(axis, bind(region, args, sizes, cpu._working(args)))
    else:
        cpu.lower(region)(out, args, sizes)
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-3}[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return out


@pytest.mark.parametrize("barred", [False, True], ids=["chosen", "blocks"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_lowering_means_the_region(variant: Variant, barred: bool) -> None:
    args = variant.make_args()
    run(variant.region, args, variant.sizes(args), barred)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_the_division_into_blocks_changes_nothing(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BUDGET", 600)
    monkeypatch.setattr(blocks, "ROWS", 5)
    args = variant.make_args()
    run(variant.region, args, variant.sizes(args), barred=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("keys", [9, 53])
def test_a_row_without_a_finite_score_is_as_in_eager(keys: int, place: int, value: float) -> None:
    """NaN. SDPA makes 0 of a row of few keys whose scores are NaN."""
    for name in ("scaled", "causal_tril", "bias"):
        variant = by_name(name)
        q, k, v, *bias = variant.make_args()
        args = (q, k[:, :, :keys], v[:, :, :keys], *(x[..., :keys] for x in bias))
        if place < len(args):
            args[place][..., 7, :] = value
            wanted = variant.fn(*args)
            out = torch.empty_like(wanted)
            cpu.lower(variant.region)(out, args, variant.sizes(args))
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal_tril", "softcap_causal_window_gqa", "bias", "dead_row_mean", "sinks"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    variant = by_name(name)
    args = variant.make_args(dtype)
    run(variant.region, args, variant.sizes(args))


def uses_flash(name: str) -> bool:
    return cpu.flash_form(by_name(name).region) is not None


def test_sdpa_where_it_is_the_region() -> None:
    same = {"plain", "scaled", "one_query", "bmm", "einsum_bqhd", "grouped_heads", "one_key_head"}
    same |= {"causal_tril", "causal_compare", "bias", "softmax_in_fp32"}
    assert {v.name for v in VARIANTS if uses_flash(v.name)} == same


def test_a_row_without_keys_under_an_additive_mask_is_nan_as_in_eager() -> None:
    q, k, v, bias = by_name("bias").make_args()
    bias[0, 1, 4] = -float("inf")
    assert run(by_name("bias").region, (q, k, v, bias), {"B": 2, "H": 3, "M": 37, "N": 53})[:, 1, 4].isnan().all()


def test_past_its_length_nothing_is_read() -> None:
    variant = by_name("key_lengths")
    clean = variant.make_args()
    q, k, v, lengths = (x.clone() for x in clean)
    k[1, :, 17:], v[1, :, 17:] = float("inf"), float("nan")
    sizes = variant.sizes(clean)
    assert torch.equal(run(variant.region, (q, k, v, lengths), sizes), run(variant.region, clean, sizes))


def test_a_score_near_a_small_fill_shares_with_dead_keys() -> None:
    """fill = -3: dead keys keep weight, and every row needs the whole of filled_score."""
    live = apply("lt", kv_idx, load(0, b, dtype="int64"))
    near = attention(
        scaled_score, live, loads=[((Size("B"),), "int64")], fill=-3.0,
        filled_score=apply("where", live, scaled_score, Const(-3.0)),
    )  # fmt: skip
    args = by_name("key_lengths").make_args()
    run(near, args, {"B": 2, "H": 3, "M": 37, "N": 53})


def test_two_products() -> None:
    region = _two_products()
    args = (*by_name("plain").make_args(), torch.randn(2, 3, 37, 8), torch.randn(2, 53, 8))
    run(region, args, {"B": 2, "H": 3, "M": 37, "N": 53})


def test_rows_beyond_every_key_and_no_keys_at_all() -> None:
    """q_idx + 40 <= kv_idx: most rows reach nothing."""
    late = attention(scaled_score, apply("ge", kv_idx, apply("add", q_idx, Const(40))))
    args = by_name("scaled").make_args()
    sizes = {"B": 2, "H": 3, "M": 37, "N": 53}
    assert run(late, args, sizes)[:, :, 20:].isnan().all()
    run(replace(late, empty_row="zero"), args, sizes)
    none = tuple(x[:, :, :0] if i else x for i, x in enumerate(args))
    run(attention(scaled_score), none, {**sizes, "N": 0})


def test_the_output_keeps_its_layout() -> None:
    """Written through strides: O [B, H, M, Dv] in [B, M, H, Dv] memory."""
    for name in ("causal_tril", "window"):
        variant = by_name(name)
        args = variant.make_args()
        expected = variant.fn(*args)
        out = torch.empty_like(expected.transpose(1, 2).contiguous()).transpose(1, 2)
        cpu.lower(variant.region)(out, args, variant.sizes(args))
        torch.testing.assert_close(out, expected)
        assert out.stride(1) < out.stride(2)


class Largest(TorchDispatchMode):
    """The most elements that any operator's result owns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("name", ["causal_tril", "softcap_causal_window_gqa", "sinks", "key_lengths_minus_1e9"])
def test_the_scores_of_a_head_are_never_held(name: str) -> None:
    n, region = 3000, by_name(name).region
    shapes = {"B": 1, "H": 6 if "gqa" in name else 1, "M": n, "N": n}
    args = [torch.randn([int(shapes.get(str(e), 0)) or int(str(e)) for e in o.shape]) for o in region.operands]
    args = [x.float() if o.dtype == "float32" else x.long() + n for x, o in zip(args, region.operands, strict=True)]
    out = torch.empty(1, shapes["H"], n, 16)
    with Largest() as seen:
        cpu.lower(region)(out, args, shapes)
    assert out.isfinite().all()
    assert seen.size < n * n / 2


def test_of_a_pool_the_pages_of_the_table_are_fetched() -> None:
    region = paged("float32", page=4, group=3, d=16)
    shapes = {"B": 2, "H": 6, "M": 1, "N": 400, "P": 90_000, "T": 100}
    pool = torch.randn(1, 4, 2, 16)
    table, lengths = torch.randint(0, 90_000, (2, 100)), torch.tensor([13, 40])
    made = {"q": torch.randn(2, 6, 1, 16), "table": table, "lengths": lengths}
    args = [made[o.name] if o.name in made else pool.expand(90_000, -1, -1, -1) for o in region.operands]
    out = torch.empty(2, 6, 1, 16)
    with Largest() as seen:
        cpu.lower(region)(out, args, shapes)
    torch.testing.assert_close(out.double(), evaluate(region, args, shapes), rtol=1e-5, atol=1e-5)
    assert seen.size < 400 * 16
