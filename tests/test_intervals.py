"""What a mask may be over a tile, by the ends of what it reads: never less than it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from regions import kv_idx, load, q_idx

from fusecomp.ir.algebra import apply, cast
from fusecomp.ir.expr import Const, Expr, Load
from fusecomp.ir.intervals import Pair, truth
from fusecomp.ir.reference import Env, evaluate_expr

OF_QUERIES, OF_KEYS = load(0, q_idx, dtype="int64"), load(1, kv_idx, dtype="int64")
FLAGS = load(2, kv_idx, dtype="bool")
NUMBERS = st.deferred(lambda: st.one_of(LEAVES, SUMS, SCALED, st.builds(lambda x: apply("neg", x), NUMBERS)))
LEAVES = st.one_of(
    st.sampled_from([q_idx, kv_idx, OF_QUERIES, OF_KEYS]), st.integers(-4, 9).map(Const)
)  # fmt: skip
SUMS = st.builds(apply, st.sampled_from(["add", "sub", "min", "max"]), LEAVES, LEAVES)
SCALED = st.one_of(
    st.builds(lambda x, c: apply("mul", x, Const(c)), LEAVES, st.integers(-3, 3)),
    st.builds(lambda x, c: apply("floordiv", x, Const(c)), LEAVES, st.integers(1, 4)),
    st.builds(lambda x: apply("abs", x), SUMS),
)
TESTS = st.builds(apply, st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), NUMBERS, NUMBERS)
MASKS = st.recursive(
    st.one_of(TESTS, st.just(FLAGS)),
    lambda x: st.one_of(
        st.builds(apply, st.sampled_from(["and", "or", "eq", "ne", "xor"]), x, x),
        st.builds(lambda a: apply("not", a), x),
        st.builds(lambda c, a, b: apply("where", c, a, b), x, x, x),
        st.builds(lambda a, b: apply("lt", cast(a, "int32"), cast(b, "int32")), x, x),
    ),
    max_leaves=5,
)


def over_a_tile(mask: Expr, tensors: dict[str, torch.Tensor], m: range, n: range) -> tuple[bool, bool, bool, bool]:
    """(some, every) as they are said, then as they are."""
    env = Env(("q_idx", "kv_idx"), {"q_idx": m, "kv_idx": n}, {"M": 16, "N": 16}, tensors)
    values: dict[Expr, Pair] = {q_idx: (Const(m[0]), Const(m[-1])), kv_idx: (Const(n[0]), Const(n[-1]))}
    for x, span in ((OF_QUERIES, m), (OF_KEYS, n), (FLAGS, n)):
        held = tensors[x.tensor][span.start : span.stop]
        values[x] = Const(int(held.min())), Const(int(held.max()))
    some, every = (bool(evaluate_expr(e, env)) for e in truth(mask, values.get))
    true = evaluate_expr(mask, env).expand(env.shape)
    return some, every, bool(true.any()), bool(true.all())


@settings(max_examples=400, deadline=None)
@given(MASKS, st.integers(0, 2**31), st.integers(0, 8), st.integers(0, 8))
def test_never_less_than_it_is(mask: Expr, seed: int, first: int, start: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(-2, 4, (16,), generator=draw).sort().values for _ in range(2)]
    tensors = {"load0": ids[0], "load1": ids[1], "load2": torch.rand(16, generator=draw) < 0.5}
    some, every, any_, all_ = over_a_tile(mask, tensors, range(first, first + 8), range(start, start + 8))
    assert some or not any_
    assert all_ or not every


EXACT = [apply("eq", OF_QUERIES, OF_KEYS), apply("ge", q_idx, kv_idx), FLAGS, apply("ne", OF_KEYS, Const(1))]


@pytest.mark.parametrize("mask", EXACT, ids=str)
def test_no_more_where_ids_are_sorted(mask: Expr) -> None:
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    tensors = {"load0": ids, "load1": ids, "load2": ids < 2}
    for m in range(0, 16, 4):
        for n in range(0, 16, 4):
            some, every, any_, all_ = over_a_tile(mask, tensors, range(m, m + 4), range(n, n + 4))
            assert (some, every) == (any_, all_)


def test_what_is_not_known_may_be() -> None:
    for unknown in (apply("eq", apply("mod", kv_idx, Const(3)), Const(0)),
                    apply("lt", apply("mul", q_idx, kv_idx), Const(40)),
                    apply("lt", Load("x", (q_idx, kv_idx), "int64"), Const(0))):  # fmt: skip
        assert truth(unknown, {}.get) == (Const(True), Const(False))
