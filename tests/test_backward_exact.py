"""Which elements of Q, K and V a gradient is written to: once each, or there is no backward kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gradients import SIZES, agree, qkv, small
from kernels import Interpreter
from regions import B, H, M, N, attention, b, causal, h, kv_idx, q_idx, scaled_score
from test_codegen import normal

from fusecomp.codegen.backward import emit_backward
from fusecomp.codegen.backward_exact import below, decided
from fusecomp.errors import KernelError
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr, Load, Size, Var
from fusecomp.ir.region import Access, AttentionRegion, Operand

six, three, four = Const(6), Const(3), Const(4)
d, g = Var("d", Const(8)), Var("g", three)
w = Var("w", Const(12))


def div(x: Expr, n: Expr) -> Expr:
    return apply("floordiv", x, n)


def mod(x: Expr, n: Expr) -> Expr:
    return apply("mod", x, n)


def plus(*terms: Expr) -> Expr:
    total: Expr = Const(0)
    for t in terms:
        total = apply("add", total, t)
    return total


def times(x: Expr, n: Expr) -> Expr:
    return apply("mul", x, n)


@pytest.mark.parametrize(
    ("index", "names"),
    [
        ((b, h, q_idx), "b h q_idx"),
        ((plus(times(b, H), h), q_idx), "b h q_idx"),
        ((div(b, six), mod(b, six)), "b"),
        ((div(b, six), plus(times(mod(b, six), Const(8)), d)), "b d"),
        ((plus(times(h, three), g),), "h g"),
        ((h, plus(q_idx, h)), "h q_idx"),
        ((plus(times(mod(w, four), Const(8)), d), div(w, four)), "w d"),
        ((div(w, four), plus(mod(div(w, Const(2)), Const(2)), times(mod(w, Const(2)), Const(2)))), "w"),
        ((plus(times(d, three), times(h, Const(24))),), "d h"),
        ((plus(times(d, three), times(h, Const(18))),), ""),
        ((div(b, six), mod(b, three)), ""),
        ((mod(b, six),), ""),
        ((plus(h, g),), ""),
        ((plus(times(h, Const(2)), g),), ""),
        ((times(b, h),), ""),
    ],
)
def test_what_an_index_decides(index: tuple[Expr, ...], names: str) -> None:
    assert {v.name for v in decided(index) if isinstance(v, Var)} == set(names.split())


def test_below() -> None:
    row = plus(times(Var("h", six), Const(8)), d)
    assert below(row, plus(Var("e", Const(8)), Const(48)))
    assert not below(row, plus(Var("e", Const(8)), Const(47)))
    assert not below(row, plus(row, Const(0)))


def folded() -> AttentionRegion:
    """One batch axis of requests and heads, Q and V of which lie in [B // 3, 3, ...] and [B // 3, L, 3 D]."""
    r, n = attention(scaled_score, causal, batch=(b,)), Size("R")
    x, y, p = r.products[0].d, r.dv, r.products[0]
    q = Access("q", (div(b, three), mod(b, three), q_idx, x))
    v = Access("v", (div(b, three), kv_idx, plus(times(mod(b, three), Const(16)), y)))
    operands = (
        Operand("q", (n, three, M, Const(16)), "float32"), r.operands[1],
        Operand("v", (n, N, Const(48)), "float32"),
    )  # fmt: skip
    return replace(r, operands=operands, products=(replace(p, q=q),), v=v)


def test_requests_and_heads_in_one_axis(interpreter: Interpreter) -> None:
    args = [normal(2, 3, 23, 16), normal(6, 37, 16), normal(2, 37, 48)]
    agree(interpreter, folded(), args, {**SIZES, "B": 6})


def packed(head: int = 16, part_of: int = 48, step: int = 1) -> AttentionRegion:
    """Q, K and V beside each other in [B, L, 3 H D]."""
    r = attention(scaled_score, causal)
    x, y, p = r.products[0].d, r.dv, r.products[0]

    def part(row: Var, i: int, column: Var) -> Access:
        place = plus(times(h, Const(head)), times(column, Const(step)), Const(part_of * i))
        return Access("qkv", (b, row, place))

    operand = Operand("qkv", (B, Size("L"), Const(144)), "float32")
    product = replace(p, q=part(q_idx, 0, x), k=part(kv_idx, 1, x))
    return replace(r, operands=(operand,), products=(product,), v=part(kv_idx, 2, y))


def test_a_packed_projection(interpreter: Interpreter) -> None:
    with pytest.raises(KernelError, match="may be the same element"):  # of four heads they would meet
        emit_backward(packed(), small(packed()), frozenset(), (("H", 4),))
    agree(interpreter, packed(), [normal(2, 37, 144)], {**SIZES, "M": 37}, fixed=(("H", 3),))


@pytest.mark.parametrize(("part_of", "step"), [(16, 1), (1, 3)])
def test_heads_of_a_packed_projection_side_by_side(interpreter: Interpreter, part_of: int, step: int) -> None:
    """Each head's Q, K and V after each other, or element by element."""
    agree(interpreter, packed(48, part_of, step), [normal(2, 37, 144)], {**SIZES, "M": 37})
    with pytest.raises(KernelError, match="may be the same element"):
        emit_backward(packed(48, 15 if step == 1 else 3, step), small(packed()))


def test_an_axis_of_length_1(interpreter: Interpreter) -> None:
    """Queries that all requests share have a gradient that is a sum, unless there is one request."""
    r = attention(scaled_score, causal)
    q = Access("q", (Const(0), h, q_idx, r.products[0].d))
    operands = (Operand("q", (Const(1), H, M, Const(16)), "float32"), *r.operands[1:])
    r = replace(r, operands=operands, products=(replace(r.products[0], q=q),))
    with pytest.raises(KernelError, match="sum over b"):
        emit_backward(r, small(r))
    q_, k, v = qkv(16)
    agree(interpreter, r, [q_[:1], k[:1], v[:1]], {**SIZES, "B": 1}, fixed=(("B", 1),))


def test_one_query_read_at_no_index(interpreter: Interpreter) -> None:
    """Several would share its gradient; and keys of a tile are told apart by the index, though there is one."""
    r = attention(scaled_score)
    q, k = (Access(name, (b, h, Const(0), r.products[0].d)) for name in "qk")
    one = replace(r, products=(replace(r.products[0], q=q),))
    with pytest.raises(KernelError, match="sum over q_idx"):
        emit_backward(one, small(one))
    agree(interpreter, one, qkv(16, m=1), {**SIZES, "M": 1}, fixed=(("M", 1),))
    with pytest.raises(KernelError, match="sum over kv_idx"):
        emit_backward(replace(r, products=(replace(r.products[0], k=k),)), small(r), fixed=(("N", 1),))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_operand_that_is_part_of_the_scores_too(name: str) -> None:
    """Its gradient is a sum of two; one that is only compared has none."""
    row = q_idx if name == "q" else kv_idx
    x = Load(name, (b, h, row, Const(0)), "float32")
    with pytest.raises(KernelError, match="part of the scores"):
        emit_backward(attention(apply("add", scaled_score, x)), small(attention(scaled_score)))
    compared = attention(scaled_score, apply("gt", x, Const(0.0)))
    emit_backward(compared, small(compared))


@pytest.mark.parametrize("keys", [37, 50])
def test_nothing_is_zeroed_that_is_written_whole(interpreter: Interpreter, keys: int) -> None:
    """Operands of a static graph have lengths that its axes have too; keys past the last one have no gradient."""
    r = attention(scaled_score, causal)
    shapes = [(2, 3, 23, 16), (2, 3, keys, 16), (2, 3, keys, 16)]
    operands = [Operand(o.name, tuple(map(Const, s)), o.dtype) for o, s in zip(r.operands, shapes, strict=True)]
    r, fixed = replace(r, operands=tuple(operands)), tuple({**SIZES, "B": 2, "H": 3, "M": 23, "N": 37}.items())
    agree(interpreter, r, [normal(*s) for s in shapes], dict(fixed), fixed=fixed)
    zeroed = [f"grad_{name}.zero_()  # not every element is read" for name in "qkv"]
    text = emit_backward(r, small(r), frozenset(), fixed).text
    assert [z in text for z in zeroed] == [False, keys > 37, keys > 37]
    assert all(z in emit_backward(r, small(r)).text for z in zeroed)


@pytest.mark.parametrize("heads", [3, 2])
def test_nothing_is_zeroed_that_heads_fill(interpreter: Interpreter, heads: int) -> None:
    """Heads beside each other in one axis, Q, K and V in one tensor: two of its three heads leave columns."""
    r = packed(48, 16)
    sizes = {**SIZES, "B": 2, "H": heads, "M": 37, "N": 37, "L": 37}
    agree(interpreter, r, [normal(2, 37, 144)], sizes, fixed=(fixed := tuple(sizes.items())))
    zeroed = "grad_qkv.zero_()  # not every element is read"
    assert (zeroed in emit_backward(r, small(r), frozenset(), fixed).text) == (heads == 2)
