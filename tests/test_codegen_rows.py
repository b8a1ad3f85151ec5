"""Operands that hold one row for all queries, or for all keys: their tiles have the shape that products need. And loops
over rows of keys, which count alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernels import Interpreter, agree, tiles
from regions import attention, b, filled, h, kv_idx, q_idx, scaled_score
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
