"""Keys put together from several tensors: each has gradients at its own keys alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gradients import agree, qkv
from kernels import Interpreter, tiles
from regions import B, H, M, N, attention, b, h, kv_idx, load, q_idx, score
from test_codegen import normal

from fusecomp.codegen.backward_exact import Fixed, require_gradients
from fusecomp.codegen.backward_frame import GradientFrame
from fusecomp.codegen.backward_pieces import own_keys
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Score, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand, Product

FIRST, REST = 6, 31
SIZES = {"B": 2, "H": 3, "M": 23, "N": FIRST + REST}
"""A prefix of six keys, then 31 more."""
before = apply("lt", kv_idx, Const(FIRST))


def at(least: int, most: int, first: int = 0) -> Expr:
    """A key's place among those from `first` on, held within a tensor's ends."""
    place = apply("sub", kv_idx, Const(first))
    return apply("min", apply("max", place, Const(least)), Const(most))


def joined(s: Expr, prefix: Expr, rest: Expr) -> AttentionRegion:
    """Scores of two tensors of keys, with the one query."""
    r = attention(s)
    d = Var("d1", Const(16))
    more = Operand("k1", (B, H, Const(REST), d.size), "float32")
    keys = Operand("k", (B, H, Const(FIRST), d.size), "float32")
    first = replace(r.products[0], k=Access("k", (b, h, prefix, r.products[0].d)))
    second = Product(Access("q1", (b, h, q_idx, d)), Access("k1", (b, h, rest, d)), d, "float32")
    q, _, v = r.operands
    operands = (q, keys, v, replace(q, name="q1"), more)
    return replace(r, operands=operands, products=(first, second))


def own(s: Expr) -> AttentionRegion:
    return joined(s, at(0, FIRST - 1), at(0, REST - 1, FIRST))


def choice(c: Expr, x: Expr, y: Expr) -> Expr:
    return apply("where", c, x, y)


HALF = apply("mul", Score(1), Const(0.5))
FIXED: Fixed = (("N", FIRST + REST),)


@pytest.mark.parametrize(
    "second", [HALF, choice(apply("gt", at(0, REST - 1, FIRST), q_idx), Const(-float("inf")), HALF)],
    ids=["all", "causal"],
)  # fmt: skip
def test_two_tensors_of_keys(interpreter: Interpreter, second: Expr) -> None:
    q, k, v = qkv(16, n=FIRST)
    v = normal(2, 3, FIRST + REST, 16)
    args = [q, k, v, normal(2, 3, 23, 16), normal(2, 3, REST, 16)]
    agree(interpreter, own(choice(before, score, second)), args, SIZES, fixed=FIXED)


def refused(region: AttentionRegion, fixed: Fixed = FIXED) -> str:
    with pytest.raises(KernelError) as caught:
        require_gradients(GradientFrame(region, tiles(region)), fixed)
    return str(caught.value)


def test_a_key_that_is_read_again_is_a_sum() -> None:
    assert "keys past its ends read k[b, h, min(kv_idx, 5), d] again" in refused(own(apply("add", score, HALF)))


def test_a_choice_at_another_key_is_a_sum() -> None:
    """The seventh key reads the sixth of the prefix again."""
    later = apply("lt", kv_idx, Const(FIRST + 1))
    assert "again" in refused(own(choice(later, score, HALF)))
    assert "again" in refused(own(choice(apply("lt", kv_idx, Const(FIRST - 1)), score, HALF)))


def test_how_many_keys_there_are_must_be_known() -> None:
    assert "read k1" in refused(own(choice(before, score, HALF)), ())


def test_own_keys() -> None:
    index, tests = own_keys((h, at(0, 30, 6)), kv_idx)
    assert str(index[1]) == "kv_idx - 6"
    assert sorted(map(str, tests)) == ["kv_idx - 6 <= 30", "kv_idx - 6 >= 0"]


@pytest.mark.parametrize("e", [apply("min", q_idx, Const(3)), apply("min", apply("mul", kv_idx, Const(2)), Const(3)),
                               apply("min", kv_idx, apply("mul", kv_idx, q_idx))])  # fmt: skip
def test_other_bounds_stay(e: Expr) -> None:
    assert own_keys((e,), kv_idx) == ((e,), ())


def in_rows_of_four() -> AttentionRegion:
    """Keys and values in rows of four, which lie apart."""
    r = attention(score)
    place = (apply("floordiv", kv_idx, Const(4)), apply("mod", kv_idx, Const(4)))
    k, v = (replace(o, shape=(B, H, Const(10), Const(4), Const(16))) for o in r.operands[1:])
    keys, values = Access("k", (b, h, *place, r.products[0].d)), Access("v", (b, h, *place, r.dv))
    return replace(r, operands=(r.operands[0], k, v), products=(replace(r.products[0], k=keys),), v=values)


def test_keys_in_unequal_steps(interpreter: Interpreter) -> None:
    apart = [normal(2, 3, 10, 9, 16)[:, :, :, :4] for _ in range(2)]
    agree(interpreter, in_rows_of_four(), [qkv(16)[0], *apart], {**SIZES, "N": 40})


def test_gradients_are_zero_where_no_key_reads_them(interpreter: Interpreter) -> None:
    """Of a tensor of keys that is longer than what is read of it."""
    region = joined(choice(before, score, HALF), at(0, FIRST - 1), at(0, REST - 3, FIRST))
    region = replace(region, keep=(apply("lt", kv_idx, Const(FIRST + REST - 2)),))
    assert "read k1" in refused(region)
    shorter = {**SIZES, "N": FIRST + REST - 2}
    args = [*qkv(16, n=FIRST)[:2], normal(2, 3, FIRST + REST - 2, 16), normal(2, 3, 23, 16), normal(2, 3, REST, 16)]
    agree(interpreter, replace(region, keep=()), args, shorter, fixed=(("N", FIRST + REST - 2),))


# ---------------------------------------------------------------------------------------------------------------
# Beside a bias, where queries run down a tile: K and V keep their own keys


def beside_a_bias(region: AttentionRegion) -> AttentionRegion:
    """S + bias[h, q_idx, kv_idx]"""
    bias = Operand("bias", (H, M, N), "float32")
    s = apply("add", region.score, replace(load(0, h, q_idx, kv_idx), tensor="bias"))
    return replace(region, score=s, operands=(*region.operands, bias))


def test_two_tensors_of_keys_beside_a_bias(interpreter: Interpreter) -> None:
    q, k, _ = qkv(16, n=FIRST)
    args = [q, k, normal(2, 3, FIRST + REST, 16), normal(2, 3, 23, 16), normal(2, 3, REST, 16), normal(3, 23, 37)]
    agree(interpreter, beside_a_bias(own(choice(before, score, HALF))), args, SIZES, learn=["bias"], fixed=FIXED)


def test_keys_in_unequal_steps_beside_a_bias(interpreter: Interpreter) -> None:
    args = [qkv(16)[0], *(normal(2, 3, 10, 9, 16)[:, :, :, :4] for _ in range(2)), normal(3, 23, 40)]
    agree(interpreter, beside_a_bias(in_rows_of_four()), args, {**SIZES, "N": 40}, learn=["bias"])
