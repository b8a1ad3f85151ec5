"""What is said of integers holds for every value of their indices, sizes and data."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from agreement import agree
from torch import Tensor

from fusecomp.ir.algebra import apply, const
from fusecomp.ir.expr import Const, Expr, Load, Size, Var
from fusecomp.ir.poly import is_natural, poly, upper

SIZE = Size("N")
PLACES: dict[Expr, Callable[[int, random.Random], int]] = {
    SIZE: lambda n, _: n,
    Var("i", SIZE): lambda n, r: r.randrange(n),
    Var("j", Const(5)): lambda n, r: r.randrange(5),
    Load("x", (Var("i", SIZE),), "int64"): lambda n, r: r.randrange(-9, 9),
    Load("y", (Var("j", Const(5)),), "int64"): lambda n, r: r.randrange(-9, 9),
}
BINARY: dict[str, Callable[[int, int], int]] = {
    "add": int.__add__, "sub": int.__sub__, "mul": int.__mul__, "max": max, "min": min,
    "floordiv": int.__floordiv__, "mod": int.__mod__,
}  # fmt: skip
Meaning = Callable[[dict[Expr, int]], int]


def drawn(r: random.Random, depth: int) -> tuple[Expr, Meaning]:
    """An expression, and its value where places have values."""
    if depth == 0 or r.random() < 0.1:
        leaf = r.choice([*PLACES, const(r.randrange(-4, 5))])
        return leaf, (lambda _: int(leaf.value)) if isinstance(leaf, Const) else lambda at: at[leaf]
    (a, x), (b, y) = drawn(r, depth - 1), drawn(r, depth - 1)
    op = r.choice(["where", "neg", *BINARY, *BINARY])
    if op == "where":
        return apply("where", apply("lt", a, const(0)), b, a), lambda at: y(at) if x(at) < 0 else x(at)
    if op == "neg":
        return apply("neg", a), lambda at: -x(at)
    if op in ("floordiv", "mod"):
        c = r.randrange(1, 5)
        return apply(op, a, const(c)), lambda at: BINARY[op](x(at), c)
    return apply(op, a, b), lambda at: BINARY[op](x(at), y(at))


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold(seed: int) -> None:
    r, said = random.Random(seed), 0
    for _ in range(200):
        e, meaning = drawn(r, r.randrange(1, 4))
        natural, most = is_natural(e), upper(e)
        said += natural
        for _ in range(30):
            n = r.randrange(1, 8)
            got = meaning({place: value(n, r) for place, value in PLACES.items()})
            assert not natural or got >= 0, (str(e), got)
            assert most is None or got <= most, (str(e), got, most)
    assert said > 20


def test_products_of_naturals_and_squares_are_natural() -> None:
    i, j, x = Var("i", SIZE), Var("j", Const(5)), Load("x", (Var("i", SIZE),), "int64")
    for e in (apply("mul", i, j), apply("mul", x, x), apply("mul", SIZE, apply("sub", SIZE, i))):
        assert is_natural(e), poly(e)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both are words": lambda a, b: a[:, None] * b > 0,
    "neither is padding": lambda a, b: ~(a[:, None] * b < 1),
    "of one sign": lambda a, b: (a[:, None] - 1) * (b - 1) >= 0,
    "place and word": lambda a, b: torch.arange(7)[:, None] * (b - 1) >= 0,
    "clipped distance": lambda a, b: torch.where((d := torch.arange(7)[:, None] - torch.arange(9)) < 0, -1, d) >= 0,
    "lesser": lambda a, b: torch.minimum(torch.arange(9), 1 - a[:, None]) <= 0,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_integers(name: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~MASKS[name](a, b), -1e9).softmax(-1) @ v

    q, k, v = (torch.randn(1, 2, n, 8) for n in (7, 9, 9))
    agree(attention, [q, k, v, torch.arange(7) % 3, torch.arange(9) % 4 % 3])
