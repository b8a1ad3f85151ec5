"""The recogniser finds the region that each variant means, and says truly why it leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from corpus import spelled
from corpus.table import INF, MIN, Draw, places, qkv, scores, square
from recognising import candidates, mathematics, region_of
from torch import Tensor
from variants import VARIANTS, Variant

from fusecomp.backend import explain
from fusecomp.ir.algebra import apply
from fusecomp.ir.expr import Cast, Const, Expr, Size, dtype_kind, kind, text, transform
from fusecomp.ir.reference import evaluate
from fusecomp.ir.region import AttentionRegion
from fusecomp.patterns.attention import Declined
from fusecomp.patterns.masks import oriented


def named(rows: list) -> list[pytest.ParameterSet]:
    return [pytest.param(x, id=x.name) for x in rows]


# ----------------------------------------------------------------------------------------------------------------
# The table of variants


def as_found(region: AttentionRegion, sizes: dict[str, int]) -> AttentionRegion:
    """The hand-written region as it is recognised at these lengths: lengths are numbers, scores are not rounded, and
    the fill of a mask in which every query sees a key says nothing."""

    def fixed(e: Expr) -> Expr:
        def rule(x: Expr) -> Expr | None:
            match x:
                case Size(name):
                    return Const(sizes[name])
                case Cast(y, dtype) if kind(y) == "float" and dtype_kind(dtype) == "float":
                    return fixed(y)
            return None

        return oriented(transform(e, rule, apply))

    fill = region.fill if region.filled_score is not None else -INF
    return replace(region, score=fixed(region.score), keep=tuple(map(fixed, region.keep)), fill=fill)


@pytest.mark.parametrize("variant", named(VARIANTS))
def test_variant_is_recognised_as_what_it_means(variant: Variant) -> None:
    args = variant.make_args()
    found = region_of(variant.fn, *args)
    assert mathematics(found) == mathematics(as_found(variant.region, variant.sizes(args)))
    wide = variant.make_args(torch.float64)
    expected = evaluate(variant.region, wide, variant.sizes(args))
    sizes = {name: variant.sizes(args)[name] for name in found.sizes}
    torch.testing.assert_close(evaluate(found, wide, sizes), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", named(VARIANTS[2::3]))
def test_variant_of_any_length_is_recognised_alike(variant: Variant) -> None:
    """With symbolic lengths the same operands, masks and scores are found."""
    args = variant.make_args()
    static, dynamic = (region_of(variant.fn, *args, dynamic=d) for d in (False, True))
    assert [o.dtype for o in static.operands] == [o.dtype for o in dynamic.operands]
    assert len(static.keep) == len(dynamic.keep)
    assert (static.sink, static.weight, static.empty_row) == (dynamic.sink, dynamic.weight, dynamic.empty_row)
    sizes = {**variant.sizes(args), **dict.fromkeys(dynamic.sizes, 0), **variant.sizes(args)}
    if not any(name.startswith("L") for name in dynamic.sizes):
        wide = variant.make_args(torch.float64)
        both = [evaluate(r, wide, {n: sizes[n] for n in r.sizes}) for r in (static, dynamic)]
        torch.testing.assert_close(*both, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------
# One mathematics, many spellings


def args_of(build: Callable = qkv) -> list[Tensor]:
    return build(Draw(torch.float32, "cpu", 1))


@pytest.mark.parametrize("name", ["log_softmax_exp", "exp_minus_logsumexp", "exp_minus_log_of_the_sum", "detached_max",
                                  "times_the_reciprocal", "deferred_division", "deferred_reciprocal", "module",
                                  "deferred_division_after_max", "exp_minus_logsumexp_unsqueezed"])  # fmt: skip
def test_spellings_of_the_softmax_make_one_region(name: str) -> None:
    plain = region_of(lambda q, k, v: scores(q, k).softmax(-1) @ v, *args_of())
    (case,) = [c for c in spelled.CASES if c.name == name]
    assert region_of(case.fn, *args_of()).key == plain.key


MASKS: list[tuple[str, str, Callable[..., Tensor]]] = [
    ("q_idx >= kv_idx", "compare", lambda i, j: j > i),
    ("q_idx >= kv_idx", "the other way round", lambda i, j: ~(i >= j)),
    ("q_idx >= kv_idx", "difference", lambda i, j: i - j < 0),
    ("q_idx >= kv_idx", "triu", lambda i, j: torch.ones(21, 21).triu(1).bool()),
    ("q_idx >= kv_idx", "tril compared", lambda i, j: torch.ones(21, 21).tril() == 0),
    ("q_idx >= kv_idx", "tril inverted", lambda i, j: (1 - torch.tril(torch.ones(21, 21))).bool()),
    ("q_idx >= kv_idx", "triu of a bool", lambda i, j: torch.ones(21, 21, dtype=torch.bool).triu(diagonal=1)),
    ("q_idx != kv_idx", "identity", lambda i, j: torch.eye(21, dtype=torch.bool)),
    ("q_idx - kv_idx < 4 q_idx + 3 >= kv_idx", "band", lambda i, j: (i - j).abs() >= 4),
    ("q_idx >= kv_idx q_idx - kv_idx < 4", "window", lambda i, j: (j > i) | (i - j >= 4)),
    ("kv_idx < 7", "prefix", lambda i, j: (j >= 7).expand(21, 21)),
]


@pytest.mark.parametrize(("keep", "name", "dead"), [pytest.param(*m, id=m[1]) for m in MASKS])
def test_masks_become_predicates(keep: str, name: str, dead: Callable[..., Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).masked_fill(dead(*places(q, k)), -INF).softmax(-1) @ v

    region = region_of(fn, *args_of(square))
    assert (" ".join(map(text, region.keep)), region.loads) == (keep, ())


FILLS = [(-INF, True), (MIN, False), (-1e9, False), (-1e4, False)]


@pytest.mark.parametrize(("fill", "lost"), FILLS)
def test_finite_fills_are_kept_for_rows_that_may_see_no_key(fill: float, lost: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, scores(q, k), fill).softmax(-1) @ v

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places(q, k)
        return torch.where(j <= i, scores(q, k), fill).softmax(-1) @ v

    draw = Draw(torch.float32, "cpu", 1)
    region = region_of(fn, *qkv(draw), draw.keep())
    assert (region.fill, region.filled_score is None) == (fill, lost)
    assert region_of(causal, *square(draw)).filled_score is None


def test_a_fill_that_leaves_weight_is_no_mask() -> None:
    draw = Draw(torch.float32, "cpu", 1)
    region = region_of(lambda q, k, v, m: torch.where(m, scores(q, k), -2.0).softmax(-1) @ v, *qkv(draw), draw.keep())
    assert (region.keep, region.fill) == ((), -INF)
    assert text(region.score) == "score * 0.3535533905932738 if load0[q_idx, kv_idx] else -2.0"


def test_page_tables_are_read_through() -> None:
    """However the pages are fetched, keys are read at table[b, kv_idx // page], kv_idx % page."""
    found = []
    for fetch in (lambda pool, table, n: pool[table].flatten(1, 2),
                  lambda pool, table, n: pool.flatten(0, 1)[table[:, n // 4] * 4 + n % 4],
                  lambda pool, table, n: pool[table[:, n // 4], n % 4]):  # fmt: skip

        def fn(q: Tensor, pool: Tensor, table: Tensor, fetch: Callable[..., Tensor] = fetch) -> Tensor:
            kv = fetch(pool, table, torch.arange(12))[:, None]
            return scores(q, kv).softmax(-1) @ kv

        found.append(region_of(fn, torch.randn(2, 3, 1, 8), torch.randn(9, 4, 8), torch.randint(0, 9, (2, 3))))
    assert len({r.products for r in found}) == 1
    at = "load0[b, kv_idx // 4]"
    assert str(found[0].v) == f"k[{at} + 9 if {at} < 0 else {at}, kv_idx % 4, dv]"


def test_what_one_query_reads_does_not_vary_with_it() -> None:
    """Lengths [B, 1, 1, 1] beside one query bound the keys of a request; beside several, [B, 1, M, 1] may differ."""

    def fn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        dead = torch.arange(k.shape[2]) >= lengths
        return scores(q, k).masked_fill(dead, -INF).softmax(-1) @ v

    for m, place in ((1, "0"), (4, "q_idx")):
        lengths = torch.full((2, 1, m, 1), 9)
        region = region_of(fn, torch.randn(2, 3, m, 8), torch.randn(2, 3, 12, 8), torch.randn(2, 3, 12, 8), lengths)
        (keep,) = region.keep
        assert text(keep) == f"kv_idx < load0[b, 0, {place}, 0]"


def test_costly_index_arithmetic_stays_outside() -> None:
    """T5's buckets take a logarithm: the bias that they lead to is read, the table is not."""

    def fn(q: Tensor, k: Tensor, v: Tensor, table: Tensor, cheap: bool = False) -> Tensor:
        i, j = places(q, k)
        near = (j - i).abs()
        bucket = near if cheap else torch.log(near + 1.0).long()
        return (scores(q, k) + table[bucket].permute(2, 0, 1)).softmax(-1) @ v

    args = [*args_of(square), torch.randn(32, 3)]
    assert text(region_of(fn, *args).score) == "score * 0.3535533905932738 + load0[q_idx, kv_idx, h]"
    assert "load0[abs(kv_idx - q_idx), h]" in text(region_of(lambda *x: fn(*x, cheap=True), *args).score)


# ----------------------------------------------------------------------------------------------------------------
# Reasons

def test_the_line_is_that_of_the_operation_in_the_way() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(q, k)
        s = s.cumsum(-1)
        return s.softmax(-1) @ v

    (found,) = candidates(fn, *args_of())
    assert isinstance(found, Declined)
    assert (found.reason, found.place.source) == (
        "`cumsum` is not a pointwise function of the scores", "s = s.cumsum(-1)",
    )  # fmt: skip


def test_nothing_is_said_of_a_graph_without_attention() -> None:
    def router(x: Tensor, w: Tensor, experts: Tensor, out: Tensor) -> Tensor:
        """Mixture of experts, a norm, and the projection of the next layer: a product that the weights do not enter."""
        top, which = (x.double() @ w.double()).softmax(-1).to(x.dtype).topk(2)
        y = sum((top * (which == e)).sum(-1, keepdim=True) * (x @ experts[e]) for e in range(4))
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True))) @ out * torch.exp(x)

    args = torch.randn(5, 8), torch.randn(8, 4), torch.randn(4, 8, 8), torch.randn(8, 8)
    assert explain(router, *args).entries == ()


def test_near_misses_are_told() -> None:
    def best(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).softmax(-1).topk(2).values @ v[..., :2, :]

    def given(s: Tensor, v: Tensor) -> Tensor:
        return s.softmax(-1) @ v

    (found,) = explain(best, *args_of()).entries
    assert found.reason == "`topk` is not a pointwise function of the weights"
    (found,) = explain(given, torch.randn(2, 5, 7), torch.randn(2, 7, 8)).entries
    assert found.reason == "no product of queries and keys lies under the softmax"
