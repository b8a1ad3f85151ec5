"""What rises evenly along the keys is a row of numbers and a shift, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch
from regions import age, b, h, kv_idx, load, q_idx, score, times
from torch import Tensor

from fusecomp.codegen.base2 import exponent
from fusecomp.codegen.slope import PLACED, Slope, sloped
from fusecomp.ir.algebra import apply, substitute
from fusecomp.ir.expr import Cast, Const, Expr, Load
from fusecomp.ir.reference import Env, evaluate_expr

MOVING = frozenset({"q_idx", "kv_idx", "d", "dv"})
SCALED = times(score, 0.125)
SLOPES = load(0, h)
FLOATS = Cast(apply("sub", kv_idx, q_idx), "float32")
EVEN = {
    "slopes": apply("sub", SCALED, apply("mul", SLOPES, age)),
    "positions as floats": apply("add", apply("mul", FLOATS, SLOPES), SCALED),
    "of the keys alone": apply("add", SCALED, apply("mul", kv_idx, load(0, b, h))),
    "apart": apply("sub", apply("add", SCALED, apply("mul", SLOPES, kv_idx)), apply("mul", SLOPES, q_idx)),
    "after a cap": apply("sub", times(apply("tanh", SCALED), 30.0), times(age, 0.5)),
    "one that falls": apply("sub", SCALED, apply("mul", apply("exp2", apply("neg", h)), kv_idx)),
}
NOT = {
    "nothing": SCALED,
    "rounded": apply("add", SCALED, Cast(apply("mul", SLOPES, FLOATS), "bfloat16")),
    "distances": apply("sub", SCALED, apply("mul", SLOPES, apply("abs", age))),
    "a slope of each query": apply("add", SCALED, apply("mul", load(0, q_idx), kv_idx)),
    "a product": apply("mul", SCALED, apply("add", Cast(kv_idx, "float32"), Const(1.0))),
    "a bias of each key": apply("add", SCALED, load(0, kv_idx)),
    "inside a cap": times(apply("tanh", apply("add", SCALED, apply("mul", SLOPES, FLOATS))), 30.0),
    "of the query alone": apply("add", SCALED, apply("mul", SLOPES, q_idx)),
}


def split(e: Expr) -> Slope | None:
    return sloped(exponent(e, MOVING), q_idx, kv_idx, MOVING)


def over(e: Expr, first: int) -> Tensor:
    """[2, 3, 11, 16], with the keys from `first` on."""
    spans = {"b": range(2), "h": range(3), "q_idx": range(11), "kv_idx": range(first, first + 16)}
    seeded = torch.Generator().manual_seed(0)
    loads = {"load0": torch.rand(2, 3, 1, generator=seeded).squeeze(-1)}
    own = {"load0": loads["load0"][0]} if Load("load0", (h,), "float32") in _loads(e) else loads
    scores = torch.randn(2, 3, 11, 32, generator=seeded, dtype=torch.float64)[..., first : first + 16]
    env = Env(("b", "h", "q_idx", "kv_idx"), spans, {"B": 2, "H": 3, "M": 11, "N": 32}, own, (scores,))
    return evaluate_expr(e, env).expand(env.shape)


def _loads(e: Expr) -> list[Expr]:
    return [e, *(y for x in e.args for y in _loads(x))]


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("e", EVEN.values(), ids=EVEN)
def test_it_is_the_score(e: Expr, first: int) -> None:
    found = split(e)
    assert found is not None
    place = apply("sub", kv_idx, Const(first))
    tile = substitute(found.score, {PLACED: apply("mul", found.slope, place)})
    parts = over(tile, first) + over(substitute(found.shift, {kv_idx: Const(first)}), first)
    torch.testing.assert_close(parts, over(exponent(e, MOVING).score, first))


@pytest.mark.parametrize("e", NOT.values(), ids=NOT)
def test_what_is_left_as_it_is(e: Expr) -> None:
    assert split(e) is None
