"""Bounds on the keys: exactly the term they come from, and monotone along the queries, where M and N differ."""

from __future__ import annotations

import pytest
import torch
from regions import age, b, causal, kv_idx, load, q_idx
from torch import Tensor

from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Const, Expr
from fusecomp.ir.ranges import bound_of, reach
from fusecomp.ir.reference import Env, evaluate_expr

SIZES = {"M": 41, "N": 67}
OF_ROW = {"q_idx": range(41), "kv_idx": range(67)}


def less(e: Expr, n: Expr | int) -> Expr:
    return apply("lt", e, n if isinstance(n, Expr) else Const(n))


def either(x: Expr, y: Expr) -> Expr:
    return apply("or", x, y)


WINDOW, PREFIX, LATER = less(age, 9), less(kv_idx, 13), apply("ge", kv_idx, Const(30))
LOADED = less(kv_idx, load(0, b, dtype="int64"))
BOUNDS = {
    "causal": ("upper", causal),
    "window": ("lower", WINDOW),
    "prefix": ("upper", either(causal, PREFIX)),
    "prefix of a prefix": ("upper", either(PREFIX, either(less(kv_idx, 5), causal))),
    "two windows": ("lower", either(WINDOW, less(age, 4))),
    "window or the last keys": ("lower", either(WINDOW, LATER)),
    "causal twice as fast": ("upper", either(less(kv_idx, apply("mul", q_idx, Const(2))), causal)),
}
NONE = {
    "the first keys and a window": either(PREFIX, WINDOW),
    "edges that cross": either(causal, less(apply("add", q_idx, kv_idx), 30)),
    "a part of a prefix": either(causal, apply("and", PREFIX, apply("ne", kv_idx, Const(3)))),
    "one key": either(causal, apply("eq", kv_idx, Const(3))),
}


def over(e: Expr, *axes: str) -> Tensor:
    """[...] over those axes."""
    env = Env(axes, {a: OF_ROW[a] for a in axes}, SIZES)
    return evaluate_expr(e, env).expand(env.shape)


@pytest.mark.parametrize(("side", "term"), BOUNDS.values(), ids=BOUNDS)
def test_a_bound_is_its_term(side: str, term: Expr) -> None:
    found = bound_of(term, "q_idx", "kv_idx")
    assert found is not None
    assert found[0] == side
    edge, keys = over(found[1].edge, "q_idx")[:, None], torch.arange(67)
    assert torch.equal(over(term, "q_idx", "kv_idx"), keys < edge if side == "upper" else keys >= edge)
    assert not reach((term,)).loose


@pytest.mark.parametrize(("side", "term"), BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("rows", [range(16), range(16, 32), range(32, 41)], ids=str)
def test_extremes_of_a_tile(side: str, term: Expr, rows: range) -> None:
    found = bound_of(term, "q_idx", "kv_idx")
    assert found is not None
    edges = over(found[1].edge, "q_idx")[rows.start : rows.stop]
    ends = [f(Const(rows.start), Const(rows.stop - 1), q_idx) for f in (found[1].least, found[1].greatest)]
    assert [int(over(e, "q_idx")[0]) for e in ends] == [int(edges.min()), int(edges.max())]


@pytest.mark.parametrize("term", NONE.values(), ids=NONE)
def test_what_bounds_nothing(term: Expr) -> None:
    assert bound_of(term, "q_idx", "kv_idx") is None
    assert reach((term,)).loose == (term,)


def test_the_wider_of_two_where_it_is_known() -> None:
    found = bound_of(either(less(kv_idx, 3), less(kv_idx, apply("add", q_idx, Const(8)))), "q_idx", "kv_idx")
    assert found is not None
    assert str(found[1].edge) == "q_idx + 8"


def test_an_end_that_data_knows() -> None:
    """kv_idx < lengths[b] or q_idx >= kv_idx"""
    found = bound_of(either(LOADED, causal), "q_idx", "kv_idx")
    assert found is not None
    assert str(found[1].edge) == "max(load0[b], q_idx + 1)"
