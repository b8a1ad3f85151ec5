"""Numbers that need 64 bits, as numbers of data that a program widens, and products of positions: kernels compute them
so. What passes 2^31 in int32 is the graph's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernels import Interpreter, agree, tiles
from recognising import region_of
from torch import Tensor

import fusecomp
from fusecomp.codegen.printer import Names, triton_text
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Cast, Const, Expr, Size, Var, parts
from fusecomp.ir.poly import is_natural
from fusecomp.ir.region import AttentionRegion
from fusecomp.ir.widths import LONGEST, in_64_bits, place_in_64_bits

INF, PAGE = float("inf"), 4
Q, POOL, VALUES = torch.randn(2, 3, 1, 16), torch.randn(40, 3, 16), torch.randn(40, 3, 16)
KEYS, LENGTHS = torch.randn(2, 3, 40, 16), torch.tensor([37, 12])
NUMBERS = torch.randint(2, 9, (2, 10), dtype=torch.int32)
DOCUMENTS = torch.randint(0, 5, (2, 40), dtype=torch.int32)
SIZES = {"B": 2, "H": 3, "M": 1, "N": 40}


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~keep, -INF).softmax(-1) @ v


def hashed(q: Tensor, pool: Tensor, values: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
    """Rows of the pools by a hash of page numbers."""
    n = torch.arange(numbers.shape[1] * PAGE)
    row = (numbers.long()[:, n // PAGE] * (1 << 30) + n % PAGE * 7) % 1009 % 40
    k, v = (x[row].transpose(1, 2) for x in (pool, values))
    return attend(q, k, v, (n < lengths[:, None])[:, None, None])


def ordered(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, lengths: Tensor) -> Tensor:
    """Keys of documents up to the query's own."""
    rank = documents.long() * 1_000_003_000
    own = rank.gather(1, lengths[:, None] - 1)
    return attend(q, k, v, (rank <= own)[:, None, None])


def in_place(q: Tensor, pool: Tensor, values: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
    """Pages by their numbers: nothing is multiplied."""
    k, v = (x[numbers.long()].flatten(1, 2).transpose(1, 2) for x in (pool, values))
    return attend(q, k, v, (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None])


def widened(region: AttentionRegion) -> bool:
    held = (*region.keep, *region.products[0].k.index, *region.v.index)
    return any(isinstance(x, Cast) and x.dtype == "int64" for e in held for x in parts(e))


@pytest.mark.parametrize("skeleton", ["decode", "prefill"])
def test_rows_by_large_products(interpreter: Interpreter, skeleton: str) -> None:
    region = region_of(hashed, Q, POOL, VALUES, NUMBERS, LENGTHS)
    assert widened(region)
    agree(interpreter, region, [Q, POOL, VALUES, LENGTHS, NUMBERS], SIZES, tiles(region, 16, 16, skeleton))


def test_masks_by_large_products(interpreter: Interpreter) -> None:
    region = region_of(ordered, Q, KEYS, KEYS.flip(2), DOCUMENTS, LENGTHS)
    assert widened(region)
    agree(interpreter, region, [Q, KEYS, KEYS.flip(2), DOCUMENTS, LENGTHS], SIZES, tiles(region, 16, 16, "decode"))


def test_where_nothing_is_multiplied_nothing_is_widened() -> None:
    pools = (x.unflatten(0, (-1, PAGE)) for x in (POOL, VALUES))
    assert not widened(region_of(in_place, Q, *pools, NUMBERS, LENGTHS))


# ----------------------------------------------------------------------------------------------------------------
# Positions


def positions(q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.arange(q.shape[2], dtype=dtype)[:, None] * 70_000, torch.arange(k.shape[2], dtype=dtype) * 7


def multiplied(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Pairs by a hash of both positions."""
    i, j = positions(q, k, dtype)
    return attend(q, k, v, (i * j) % 11 < 7)


def compared(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """All of them, unless a product begins anew at -2^31."""
    i, j = positions(q, k, dtype)
    return attend(q, k, v, i * j >= 0)


def operands(n: int) -> list[Tensor]:
    return [torch.randn(1, 1, n, 16) for _ in range(3)]


def test_products_of_positions(interpreter: Interpreter) -> None:
    """What a kernel of any length is verified with is too short to pass 2^31."""
    region = region_of(multiplied, *operands(21), dynamic=True)
    assert widened(region)
    agree(interpreter, region, operands(100), {"B": 1, "H": 1, "M": 100, "N": 100}, tiles(region, 16, 64))


def test_short_products_need_no_more_bits() -> None:
    assert not widened(region_of(multiplied, *operands(60), dynamic=False))
    assert widened(region_of(multiplied, *operands(70), dynamic=False))


@pytest.mark.parametrize("fn", [multiplied, compared])
def test_products_in_32_bits(fn: Callable[..., Tensor]) -> None:
    """They begin anew at -2^31, as eager's."""
    fast = torch.compile(fn, backend="fusecomp", dynamic=True, options={"inner": "eager"})
    torch._dynamo.reset()
    for n in (21, 100):
        args = operands(n)
        torch.testing.assert_close(fast(*args, torch.int32), fn(*args, torch.int32))
    assert fusecomp.counters()["fused"]
    assert not region_of(fn, *operands(21), torch.int32, dynamic=False).operands[3:]


def test_products_of_data_in_32_bits() -> None:
    """Data times a large number or other data may pass 2^31: the sign of the product is not that of its factors."""

    def signed(q: Tensor, k: Tensor, v: Tensor, x: Tensor, factor: int | Tensor) -> Tensor:
        return attend(q, k, v, (x * factor >= 0)[None])

    x = torch.arange(40, dtype=torch.int32)
    read = [region_of(signed, *operands(40), x, n).operand("load0").label for n in (2, 500_000_000, x)]
    assert read == ["x", "", ""]


ROW, KEY = Var("q_idx", Size("M")), Var("kv_idx", Size("N"))
NARROW = [
    apply("ge", ROW, KEY), apply("lt", apply("sub", ROW, KEY), Const(100_000)),
    apply("ge", apply("mul", apply("floordiv", ROW, Const(128)), Const(128)), KEY),
    apply("lt", apply("mul", Var("kv_idx", Const(1 << 20)), Const(1000)), ROW),
    apply("ge", apply("mul", apply("floordiv", ROW, Size("W")), Size("W")), KEY),
    apply("lt", apply("sub", ROW, Var("kv_idx", apply("mul", Size("P"), Size("W")))), Const(9)),
]  # fmt: skip


@pytest.mark.parametrize("e", NARROW, ids=str)
def test_other_arithmetic_stays_in_32_bits(e: Expr) -> None:
    assert in_64_bits(e) == e


def test_where_64_bits_are_needed() -> None:
    product = apply("mul", ROW, KEY)
    assert str(in_64_bits(apply("mod", product, Const(7)))) == "int64(kv_idx) * int64(q_idx) % 7"
    assert is_natural(in_64_bits(product))
    assert place_in_64_bits(product) == product
    assert str(place_in_64_bits(apply("floordiv", product, Const(7)))) == "int64(kv_idx) * int64(q_idx) // 7"
    assert in_64_bits(apply("mul", ROW, Const((1 << 31) // LONGEST))) != apply("mul", ROW, Const((1 << 31) // LONGEST))


def test_products_are_whole_numbers_before_they_are_real() -> None:
    """float32 rounds each of two squares, of which a small number may be left."""
    squares = apply("sub", apply("mul", KEY, KEY), apply("mul", ROW, ROW))
    names = Names({}, {ROW: "q_pos", KEY: "kv_pos"})
    assert triton_text(apply("mul", squares, Const(0.5)), names) == "(kv_idx * kv_idx - q_idx * q_idx) * 0.5"
    assert triton_text(apply("mul", apply("sub", KEY, ROW), Const(0.5)), names) == "(kv_pos - q_pos) * 0.5"
    assert triton_text(in_64_bits(apply("mul", KEY, ROW)), names) == "kv_idx.to(tl.int64) * q_idx.to(tl.int64)"
