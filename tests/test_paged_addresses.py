"""The index arithmetic that page addresses are made of, against Python's on random numbers; and what must not pass."""

from __future__ import annotations

import itertools
import random

import pytest

from fusecomp.ir.algebra import apply, const, substitute
from fusecomp.ir.expr import Const, Expr, Load, Size, Var, kind, text
from fusecomp.ir.ranges import reach
from fusecomp.patterns.scalars import doubled, either_bit, halved, low_bits
from fusecomp.patterns.series import series

SIZES = {"b": 3, "n": 48, "d": 8}
B, N, D = (Var(name, Const(size)) for name, size in SIZES.items())
PLACES = list(itertools.product(range(3), range(0, 48, 5), range(8)))


def at(e: Expr, b: int, n: int, d: int) -> int:
    """The value of an expression in the three indices."""
    found = substitute(e, {B: const(b), N: const(n), D: const(d)})
    assert isinstance(found, Const)
    return int(found.value)


def some(seed: int) -> Expr:
    """A sum of multiples of indices."""
    rng = random.Random(seed)
    total: Expr = const(rng.randrange(-9, 9))
    for v in (B, N, D):
        total = apply("add", total, apply("mul", v, const(rng.choice((0, 1, 3, 8, 64, -8)))))
    return total


@pytest.mark.parametrize("by", [2, 3, 8, 16, 24, 128, 512])
def test_quotients_and_remainders_are_pythons(by: int) -> None:
    for seed in range(40):
        e = some(seed)
        quotient, rest = apply("floordiv", e, const(by)), apply("mod", e, const(by))
        for place in PLACES[:: 7 + seed % 3]:
            assert at(quotient, *place) == at(e, *place) // by, text(e)
            assert at(rest, *place) == at(e, *place) % by, text(e)


def test_a_page_comes_out_of_a_flat_position() -> None:
    flat = apply("add", apply("mul", N, const(64)), D)
    assert apply("floordiv", flat, const(512)) == apply("floordiv", N, const(8))
    assert apply("mod", flat, const(512)) == apply("add", apply("mul", apply("mod", N, const(8)), const(64)), D)


@pytest.mark.parametrize(("more", "within"), [(0, True), (-1, True), (1, False)])
def test_a_page_is_one_of_those_that_the_keys_are_counted_in(more: int, within: bool) -> None:
    """n < 8 L: n // 8 mod L = n // 8, however many pages L a call has."""
    pages = Size("L")
    page = apply("floordiv", Var("n", apply("add", apply("mul", pages, const(8)), const(more))), const(8))
    assert (apply("mod", page, pages) == page) == within


def test_bits_are_pythons() -> None:
    for seed, n in itertools.product(range(40), (0, 1, 3)):
        e, mask = some(seed), (1 << n) - 1
        for place in PLACES[::9]:
            x = at(e, *place)
            assert at(halved(e, const(n)) or e, *place) == x >> n
            assert at(doubled(e, const(n)) or e, *place) == x << n
            assert at(low_bits(e, const(mask)) or const(0), *place) == x & mask
            assert at(low_bits(const(~mask), e) or e, *place) == x & ~mask


def test_or_is_a_sum_only_where_no_bits_meet() -> None:
    pages = apply("mul", Load("table", (B,), "int64"), const(8))
    assert either_bit(pages, D) == apply("add", pages, D)
    assert either_bit(apply("mul", N, const(4)), D) is None
    assert either_bit(pages, apply("sub", D, const(1))) is None
    assert either_bit(pages, Load("offset", (N,), "int64")) is None


@pytest.mark.parametrize("mask", [6, 0, 5])
def test_other_masks_are_no_remainders(mask: int) -> None:
    assert low_bits(N, const(mask)) is None


def entry(k: int, step: int = 1) -> Expr:
    """pool[table[b, k], n]"""
    return Load("pool", (Load("table", (B, const(k * step)), "int64"), N), "float32")


@pytest.mark.parametrize("step", [1, 2, -3])
def test_blocks_in_step_are_a_series(step: int) -> None:
    found = series([entry(k, step) for k in range(5)])
    assert found is not None
    assert substitute(found[1], {found[0]: const(3)}) == entry(3, step)


@pytest.mark.parametrize(
    "terms",
    [
        [entry(0), entry(2), entry(1)],
        [entry(0), entry(1), entry(1)],
        [entry(0), Load("other", entry(1).args, "float32")],
        [entry(0), Load("pool", entry(1).args, "bfloat16")],
        [entry(0), apply("mul", entry(1), const(2.0))],
        [const(0.5), const(1.5)],
    ],
)
def test_other_blocks_are_none(terms: list[Expr]) -> None:
    assert series(terms) is None


KEY, LENGTH, OTHER = Var("kv_idx", Const(48)), Load("length", (B,), "int32"), Load("other", (B,), "int32")
SHORTER = apply("lt", KEY, apply("sub", LENGTH, const(4)))
ENDS, ENDS_ELSEWHERE = apply("lt", KEY, LENGTH), apply("lt", KEY, OTHER)
EITHER_END = apply("or", ENDS, ENDS_ELSEWHERE)
SEEN = Load("tree", (KEY,), "bool")


@pytest.mark.parametrize(
    ("term", "edge"),
    [
        (apply("or", SHORTER, apply("and", SEEN, ENDS)), LENGTH),
        (EITHER_END, apply("max", LENGTH, OTHER)),
        (apply("where", SEEN, SHORTER, ENDS), LENGTH),
        (apply("not", apply("and", apply("not", SHORTER), apply("not", ENDS))), LENGTH),
        (apply("or", ENDS, SEEN), None),
        (apply("or", ENDS, apply("ge", KEY, OTHER)), None),
        (apply("where", SEEN, ENDS, apply("not", SEEN)), None),
    ],
    ids=lambda x: text(x) if isinstance(x, Expr) else "no end",
)
def test_an_alternative_ends_where_its_sides_do(term: Expr, edge: Expr | None) -> None:
    assert kind(term) == "bool"
    found = reach((term,))
    assert [x.edge for x in found.upper] == ([] if edge is None else [edge])
    assert found.loose == (() if term == EITHER_END else (term,))  # which is a bound itself


ROW = Var("q_idx", Const(10))
GROUP, BY_PAGE = apply("floordiv", ROW, const(4)), apply("floordiv", KEY, const(16))


@pytest.mark.parametrize(
    ("term", "lower", "upper", "loose"),
    [
        (apply("le", KEY, apply("add", GROUP, const(20))), 0, 23, True),
        (apply("lt", apply("mul", const(2), KEY), GROUP), 0, 48, True),
        (apply("lt", KEY, apply("sub", const(30), GROUP)), 0, 48, True),
        (apply("lt", KEY, apply("mod", ROW, const(4))), 0, 48, True),
        (apply("lt", BY_PAGE, const(2)), 0, 32, False),
        (apply("le", BY_PAGE, const(1)), 0, 32, False),
        (apply("ge", BY_PAGE, const(1)), 16, 48, False),
        (apply("gt", const(2), BY_PAGE), 0, 32, False),
        (apply("le", BY_PAGE, apply("floordiv", apply("add", ROW, const(7)), const(16))), 0, 32, True),
        (apply("lt", apply("mul", const(2), BY_PAGE), const(2)), 0, 48, True),
        (apply("lt", apply("floordiv", apply("add", KEY, const(8)), const(16)), const(2)), 0, 48, True),
    ],
    ids=lambda x: text(x) if isinstance(x, Expr) else "",
)
def test_ends_of_pages_and_of_rows_that_share_a_query(term: Expr, lower: int, upper: int, loose: bool) -> None:
    found = reach((term,))
    edges = [[int(e.value) for x in bounds if isinstance(e := x.edge, Const)] for bounds in (found.lower, found.upper)]
    assert (max([0, *edges[0]]), min([48, *edges[1]])) == (lower, upper)
    assert bool(found.loose) == loose
    seen = [k for k in range(48) for r in range(10) if substitute(term, {KEY: const(k), ROW: const(r)}) == const(True)]
    assert all(lower <= k < upper for k in seen)
    assert loose or sorted(set(seen)) == list(range(lower, upper))
