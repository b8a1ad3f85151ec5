"""Operands that hold one row for all queries, or for all keys: their tiles have the shape that products need. And loops
over rows of keys, which count alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels import Interpreter, agree, tiles
from regions import B, attention, b, filled, h, kv_idx, load, q_idx, scaled_score
from test_codegen import SIZES, normal, qkv
from test_reference import _two_products

from fusecomp.codegen.compiled import cross_compile
from fusecomp.codegen.emit import emit
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Cast, Const, Size


@pytest.mark.parametrize("skeleton", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_one_row_for_all_keys(interpreter: Interpreter, name: str, skeleton: str) -> None:
    """Also in tiles that no mask cuts."""
    r = attention(scaled_score)
    k, v = (replace(a, index=(b, h, Const(0), a.index[-1])) if a.operand == name else a
            for a in (r.products[0].k, r.v))  # fmt: skip
    r = replace(r, products=(replace(r.products[0], k=k),), v=v)
    agree(interpreter, r, qkv(16), SIZES, tiles(r, 16, 16, skeleton))


def test_one_row_for_all_queries_beside_another_product(interpreter: Interpreter) -> None:
    r = _two_products()
    first = replace(r.products[0], q=replace(r.products[0].q, index=(b, h, Const(0), r.products[0].d)))
    args = [*qkv(16), normal(2, 3, 37, 8), normal(2, 53, 8)]
    agree(interpreter, replace(r, products=(first, r.products[1])), args, SIZES)


def test_a_mask_by_a_number_of_the_programs_own_compiles_beside_a_fill() -> None:
    """The loop over every key, for rows that see none, counts as the others do."""
    ahead = Cast(Size("L0"), "int64")
    keep = apply("ge", apply("add", q_idx, ahead), kv_idx)
    region = attention(scaled_score, keep, **filled(-1e9, keep))
    assert region.sizes[-1] == "L0"
    cross_compile(emit(region, tiles(region)), 90, "attention")


WORDS = load(0, b, dtype="uint8")
OF_SMALL_INTEGERS = {
    "twice": apply("lt", kv_idx, apply("mul", WORDS, Const(2))),
    "squared": apply("lt", kv_idx, apply("mul", WORDS, WORDS)),
    "less": apply("gt", kv_idx, apply("sub", WORDS, Const(140))),
    "more than such a number holds": apply("lt", apply("add", WORDS, kv_idx), Const(300)),
    "beside its negative": apply("lt", apply("neg", WORDS), apply("sub", kv_idx, Const(20))),
}


@pytest.mark.parametrize("name", OF_SMALL_INTEGERS)
def test_small_integers_are_computed_with_in_int32(interpreter: Interpreter, name: str) -> None:
    region = attention(scaled_score, OF_SMALL_INTEGERS[name], loads=[((B,), "uint8")])
    agree(interpreter, region, [*qkv(16), torch.tensor([5, 130], dtype=torch.uint8)], SIZES)
