"""Softmaxes by hand whose normaliser is kept from 0, and what such a guard makes of rows that see no key."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
BLIND = 3
"""The query that sees no key."""


def blind(d: Any) -> list[Tensor]:
    keep = d.keep()
    keep[BLIND] = False
    return [*qkv(d), keep]


def two_masks(d: Any) -> list[Tensor]:
    return [*blind(d), d.keep()]


@CASES.fuse()
def lost_in_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep()])
def lost_in_the_sum_of_those_seen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.masked_fill(~keep, -INF).amax(-1, keepdim=True)).exp() * keep
    return (e / e.sum(-1, keepdim=True).clamp_min(1e-12)) @ v


@CASES.fuse()
def divided_by_the_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / (e.mean(-1, keepdim=True) * k.shape[-2])) @ v


@CASES.fuse()
def shifted_by_the_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.mean(-1, keepdim=True)).exp()
    return (e @ v) / e.mean(-1, keepdim=True)


@CASES.fuse()
def sharpened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) ** 1.5
    return (p / p.sum(-1, keepdim=True)) @ v


@CASES.fuse(blind, grad=())
def masked_by_a_product(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """exp(s + inf) * 0 is NaN in the row that sees no key."""
    s = scores(q, k)
    e = (s - s.masked_fill(~keep, -INF).amax(-1, keepdim=True)).exp() * keep
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.fuse(blind, grad=())
def masked_by_a_choice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """0 / 1e-9 in the row that sees no key."""
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - s.amax(-1, keepdim=True)).exp().masked_fill(~keep, 0)
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.fuse(blind, grad=())
def masked_by_a_choice_and_divided(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """0 / 0 in the row that sees no key."""
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - s.amax(-1, keepdim=True)).exp().masked_fill(~keep, 0)
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse(blind, grad=())
def finite_maximum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    m = s.amax(-1, keepdim=True)
    e = (s - torch.where(m == -INF, 0.0, m)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.fuse(blind, grad=())
def finite_maximum_without_a_guard(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    m = s.amax(-1, keepdim=True)
    e = (s - m.masked_fill(m.isinf(), 0.0)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse(blind, grad=(), dtypes=(torch.float32, torch.bfloat16))
def maximum_kept_above_the_least_number(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - s.amax(-1, keepdim=True).clamp(min=-3e38)).exp()
    return (e @ v) / e.sum(-1, keepdim=True).clamp(min=1e-9)


@CASES.fuse(blind, grad=())
def divided_by_one_instead_of_zero(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    m = s.amax(-1, keepdim=True)
    e = (s - m.masked_fill(m == -INF, 0.0)).exp()
    total = e.sum(-1, keepdim=True)
    return (e @ v) / torch.where(total == 0, 1.0, total)


@CASES.fuse(blind, grad=())
def finite_logsumexp(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    lse = s.logsumexp(-1, keepdim=True)
    return (s - torch.where(lse == -INF, 0.0, lse)).exp() @ v


@CASES.fuse()
def normalised_by_its_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return F.normalize((s - s.amax(-1, keepdim=True)).exp(), p=1, dim=-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# A number beside exponentials that the maximum was subtracted from


@CASES.fuse(grad=())
def one_beside_the_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.max(dim=-1, keepdim=True).values).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@CASES.fuse()
def one_beside_the_detached_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return (e @ v) / (e.sum(-1, keepdim=True) + 0.5)


@CASES.fuse()
def one_beside_the_largest_of_detached_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.detach().amax(-1, keepdim=True)).exp()
    return (e / (1 + e.sum(-1, keepdim=True))) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep()], grad=())
def a_millionth_beside_the_largest_seen(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@CASES.fuse(blind, grad=())
def one_beside_no_key(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """0 / 1 in the row that sees no key."""
    s = scores(q, k).masked_fill(~keep, -INF)
    m = s.amax(-1, keepdim=True)
    e = (s - torch.where(m == -INF, 0.0, m)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1)) @ v


@CASES.fuse(blind, grad=())
def one_beside_nothing(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """exp(-inf + inf) in the row that sees no key."""
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1)) @ v


# ----------------------------------------------------------------------------------------------------------------
# Normalised again after a factor


def span(q: Tensor, k: Tensor, reach: Tensor) -> Tensor:
    """1 up to a learned distance of each head, then down to 0."""
    i, j = places(q, k)
    return ((reach[:, None, None] + 4 - (i - j).abs().to(q.dtype)) / 4).clamp(0, 1)


def with_reach(d: Any) -> list[Tensor]:
    return [*square(d), d(3).abs() * 4 + 3]


@CASES.fuse(with_reach, grad=(0, 1, 2, 3))
def adaptive_span(q: Tensor, k: Tensor, v: Tensor, reach: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) * span(q, k, reach)
    return (p / (p.sum(-1, keepdim=True) + 1e-8)) @ v


@CASES.fuse(with_reach, grad=(0, 1, 2, 3))
def causal_adaptive_span(q: Tensor, k: Tensor, v: Tensor, reach: Tensor) -> Tensor:
    i, j = places(q, k)
    p = scores(q, k).masked_fill(j > i, -INF).softmax(-1) * span(q, k, reach)
    return torch.einsum("bhij,bhjd->bihd", p / p.sum(-1)[..., None], v)


@CASES.fuse(blind, grad=())
def masked_weights_over_an_epsilon(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """0 in the row that sees no key."""
    p = (scores(q, k) * keep).softmax(-1) * keep
    return (p / (p.sum(-1, keepdim=True) + 1e-13)) @ v


@CASES.fuse(lambda d: [*qkv(d), d(2, d.n(21)).sigmoid()], grad=(0, 1, 2, 3))
def keys_that_count_in_part(q: Tensor, k: Tensor, v: Tensor, share: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) * share[:, None, None]
    return (p / p.sum(-1, keepdim=True).clamp(min=0.25)) @ v


# ----------------------------------------------------------------------------------------------------------------
# Near misses


@CASES.decline(blind, "the normaliser adds 1e-09 to exponentials that were shifted", grad=())
def shifted_by_the_greatest_of_all(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """A row's sum may be less than 1e-9 where a masked score is the largest."""
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp() * keep
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.decline(two_masks, "the normaliser adds 1e-09", grad=())
def masked_by_a_product_of_a_choice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, other: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.masked_fill(~(keep & other), -INF).amax(-1, keepdim=True)).exp().masked_fill(~keep, 0) * other
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.decline(two_masks, "the normaliser adds 1e-09", grad=())
def not_all_masked_by_the_choice(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, other: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~other, -INF)
    e = (s - s.masked_fill(~keep, -INF).amax(-1, keepdim=True)).exp().masked_fill(~keep, 0)
    return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ v


@CASES.decline(qkv, "the normaliser is kept above 2.0", grad=())
def kept_above_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=2.0)) @ v


@CASES.decline(qkv, "the normaliser is kept above 1e-09", grad=())
def maximum_kept_above_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True).clamp(min=0.0)).exp()
    return (e / e.sum(-1, keepdim=True).clamp(min=1e-9)) @ v


@CASES.decline(with_reach, "the weights are not a softmax of the scores times a factor")
def normalised_by_the_largest(q: Tensor, k: Tensor, v: Tensor, reach: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) * span(q, k, reach)
    return (p / (p.amax(-1, keepdim=True) + 1e-8)) @ v


@CASES.decline(with_reach)
def normalised_over_the_queries(q: Tensor, k: Tensor, v: Tensor, reach: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) * span(q, k, reach)
    return (p / (p.sum(-2, keepdim=True) + 1e-8)) @ v


@CASES.decline(with_reach)
def sum_that_is_returned_with_the_weights(q: Tensor, k: Tensor, v: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    p = scores(q, k).softmax(-1) * span(q, k, reach)
    return (p / (p.sum(-1, keepdim=True) + 1e-8)) @ v, p


@CASES.decline(qkv, "a query may see no key", grad=(), dtypes=FULL)
def one_beside_a_finite_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k).masked_fill(j + 2 > i, -1e9)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / (e.sum(-1, keepdim=True) + 1)) @ v


@CASES.decline(qkv, "its logarithm is read", grad=(), dtypes=FULL)
def logarithm_beside_the_largest(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k)
    m = s.amax(-1, keepdim=True)
    total = (s - m).exp().sum(-1, keepdim=True) + 1
    return ((s - m).exp() / total) @ v, m + total.log()


@CASES.decline()
def divided_by_the_mean_of_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / e.mean(-2, keepdim=True)) @ v


@CASES.decline(lambda d: [*qkv(d), d.keep()], "`mean` is not a pointwise function of the scores", grad=())
def shifted_by_the_mean_of_the_masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """NaN: the mean is -inf."""
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - s.mean(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.decline()
def raised_to_a_negative_power(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) ** -1.5
    return (p / p.sum(-1, keepdim=True)) @ v


@CASES.decline(reason="the normaliser adds infinity")
def infinity_beside_the_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + INF)) @ v
