"""What a generated file says of itself, and the lengths at which it checks itself."""

from __future__ import annotations

from dataclasses import replace

from golden_kernels import GOLDEN, paged
from kernels import tiles
from regions import attention, b, causal, h, kv_idx, q_idx, scaled_score

from fusecomp.codegen.emit import emit
from fusecomp.codegen.sample import sample
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Load, text
from fusecomp.ir.region import Access


def test_the_users_line_comes_first_and_no_line_is_too_long() -> None:
    region = replace(attention(scaled_score, causal), origin="model.py:9", source="  return softmax(s) @ v  ")
    head = emit(region, tiles(region)).text.splitlines()
    assert head[0].startswith('"""attention at model.py:9   b < B, h < H')
    assert head[2] == "    # return softmax(s) @ v"
    for kernel in GOLDEN.values():
        assert max(map(len, emit(*kernel).text.partition("import torch")[0].splitlines())) <= 120


def test_a_condition_on_where_a_key_lies_is_read_by_a_name() -> None:
    region = paged()
    number = Load("table", (b, apply("floordiv", kv_idx, Const(16))), "int32")
    place = apply("where", apply("lt", number, Const(0)), apply("add", number, Const(9)), number)
    product, v = region.products[0], region.v
    named = replace(
        region,
        products=(replace(product, k=replace(product.k, index=(place, *product.k.index[1:]))),),
        v=replace(v, index=(place, *v.index[1:])),
    )
    assert f"    place = {text(place)}\n" in str(named)
    assert str(named).count("k_pool[place, ") == str(named).count("v_pool[place, ") == 1


def test_a_file_checks_itself_at_lengths_that_its_tensors_have() -> None:
    """One query, and five heads a group side by side with the queries, of a program whose shapes were constants."""
    one = attention(scaled_score, causal)
    q, *others = one.operands
    one = replace(one, operands=(replace(q, shape=(Const(3), Const(8), Const(1), Const(16))), *others))
    assert sample(one).sizes == {"B": 2, "H": 2, "M": 1, "N": 53}
    assert sample(one).tensors[0] == "torch.randn((2, 2, 1, 16), dtype=torch.float32)"

    place = apply("add", apply("mul", h, Const(5)), q_idx)
    product = replace(one.products[0], q=Access("q", (b, place, one.products[0].d)))
    q = replace(q, shape=(Const(3), Const(10), Const(16)))
    grouped = replace(one, operands=(q, *others), products=(product,))
    assert sample(grouped).sizes == {"B": 2, "H": 2, "M": 5, "N": 53}
    assert sample(grouped).tensors[0] == "torch.randn((2, 10, 16), dtype=torch.float32)"
