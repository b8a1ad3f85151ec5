"""Softmaxes by hand whose normaliser is spelled as a norm, as a product, or in another base."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, MIN, Draw, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
LOG2_E = 1.4426950408889634


def rows(s: Tensor) -> Tensor:
    return s.amax(-1, keepdim=True)


@CASES.fuse()
def in_base_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k) * LOG2_E
    total = torch.log2(torch.exp2(s - rows(s)).sum(-1, keepdim=True)) + rows(s)
    return torch.exp2(s - total) @ v


@CASES.fuse()
def in_base_two_without_a_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.exp2(s - s.exp2().sum(-1, keepdim=True).log2()) @ v


@CASES.fuse(square)
def norm_of_masked_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k)
    e = torch.exp(s - rows(s.masked_fill(j > i, -torch.inf))) * (j <= i)
    return F.normalize(e, p=1, dim=-1) @ v


@CASES.fuse(square)
def norm_of_masked_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return F.normalize(scores(q, k).softmax(-1) * (j <= i).to(q.dtype), p=1, dim=-1) @ v


@CASES.fuse(lambda d: [*square(d), d(2, 3, d.n(21), d.n(21))], grad=(0, 1, 2, 3))
def norm_of_gated_weights(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return F.normalize(scores(q, k).softmax(-1) * gate.sigmoid(), p=1, dim=-1, eps=1e-6) @ v


@CASES.fuse(lambda d: [*square(d), d(3, d.n(21), d.n(21)).abs()], grad=(0, 1, 2, 3))
def exponentials_times_a_prior(q: Tensor, k: Tensor, v: Tensor, prior: Tensor) -> Tensor:
    s = scores(q, k)
    w = (s - rows(s)).exp() * prior
    return (w / w.sum(-1, keepdim=True)) @ v


@CASES.either(lambda d: [*square(d), d(3, d.n(21), d.n(21)).abs()], grad=())
def prior_under_autocast(q: Tensor, k: Tensor, v: Tensor, prior: Tensor) -> Tensor:
    with torch.autocast(q.device.type, torch.bfloat16):
        w = scores(q, k).exp() * prior
        return ((w / w.sum(-1, keepdim=True)) @ v).to(v.dtype)


@CASES.fuse(lambda d: [*square(d), d(2, 1, d.n(21), d.n(21)) > -0.5], note="an adjacency that is passed as numbers")
def edges_of_a_graph(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    w = edges.to(q.dtype).relu() * scores(q, k).exp()
    return torch.einsum("bhij,bhjd->bhid", w / w.sum(-1).unsqueeze(-1), v)


def far(d: Draw) -> list[Tensor]:
    """Scores of 7 and of -7, and numbers of edges: none goes to where the scores are 7."""
    n = d.n(21)
    sign = torch.where(torch.arange(n, device=d.device) == 3, 1.0, -1.0).to(d.dtype)
    edges = (d(n, n) > -0.5) * (sign < 0)
    edges[:, 5] = True
    return [d(2, 3, n, 1) * 0 + 1.0, d(2, 3, n, 1) * 0 + 7 * sign[:, None], d(2, 3, n, 8), edges.to(d.dtype)]


@CASES.fuse(far, dtypes=FULL, note="beside e^56, e^-56 is nothing")
def edges_beside_a_far_greater_exponential(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    w = (q @ k.mT * 8).exp() * edges
    return (w / w.sum(-1, keepdim=True)) @ v


@CASES.fuse(lambda d: [*square(d), d(d.n(21), d.n(21)).relu() * torch.ones(d.n(21), 1, device=d.device).tril(-1)],
            grad=(), dtypes=FULL, note="the first query has no edge")  # fmt: skip
def no_edge_at_all(q: Tensor, k: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    w = scores(q, k).exp() * edges
    return (w / w.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def sum_by_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(scores(q, k) - rows(scores(q, k)))
    return torch.einsum("bhij,bhjd->bhid", e, v) / torch.einsum("bhij->bhi", e)[..., None]


@CASES.fuse()
def sum_by_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) / (e @ torch.ones_like(v[0, 0, :, :1]))


@CASES.fuse()
def sum_by_a_vector_of_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) / torch.einsum("bhij,j->bhi", e, k.new_ones(k.shape[-2])).unsqueeze(-1)


@CASES.either(grad=())
def sum_by_ones_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast(q.device.type, torch.bfloat16):
        e = scores(q, k).exp()
        return ((e @ v) / (e @ torch.ones_like(v[0, 0, :, :1]))).to(v.dtype)


@CASES.fuse()
def log_softmax_at_a_temperature(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).log_softmax(-1) / 0.7).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Other functions


@CASES.decline(square)
def sum_over_the_queries_by_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return torch.einsum("bhij,bhjd->bhid", e, v) / torch.einsum("bhij->bhj", e)[..., None]


@CASES.decline(square)
def sum_over_the_queries_by_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) / (e.mT @ torch.ones_like(v[0, 0, :, :1]))


@CASES.decline(square)
def letters_without_a_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) / torch.einsum("bhji", e)[..., :1]


@CASES.decline(square)
def sum_by_ones_that_were_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e, z = scores(q, k).exp(), torch.ones_like(v[0, 0, :, :1])
    z[3:] = 0.5
    return (e @ v) / (e @ z)


@CASES.decline(square)
def sum_by_twos(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) / (e @ torch.full_like(v[0, 0, :, :1], 2.0))


@CASES.decline(lambda d: [*square(d), d(3, d.n(21), d.n(21)).abs()], "not a softmax of the scores times a factor")
def prior_and_an_epsilon(q: Tensor, k: Tensor, v: Tensor, prior: Tensor) -> Tensor:
    s = scores(q, k)
    w = (s - rows(s)).exp() * prior
    return (w / (w.sum(-1, keepdim=True) + 0.5)) @ v


@CASES.decline(lambda d: [*square(d), d(2, 3, d.n(21), d.n(21))])
def norm_of_weights_that_may_be_negative(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return F.normalize(scores(q, k).softmax(-1) * gate, p=1, dim=-1) @ v


@CASES.decline(lambda d: [*square(d), d(3, d.n(21), d.n(21)).abs()])
def prior_of_the_sum_alone(q: Tensor, k: Tensor, v: Tensor, prior: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / (e * prior).sum(-1, keepdim=True)) @ v


@CASES.decline(square)
def sum_by_ones_that_were_written_in_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Before they are looked at as a column."""
    e, z = scores(q, k).exp(), torch.ones_like(v[0, 0, :, 0])
    z[5:] = 0
    return (e @ v) / (e @ z.unsqueeze(-1))


@CASES.decline(square)
def two_bases(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.exp2(s - s.exp2().sum(-1, keepdim=True).log()) @ v


@CASES.decline(square)
def logarithm_to_another_base(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.exp(s - s.exp().sum(-1, keepdim=True).log2()) @ v


@CASES.decline(square, "the normaliser is kept above 1e-12")
def norm_below_the_greatest_of_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A row's sum may be less than 1e-12 where a masked score is the largest."""
    i, j = places(q, k)
    s = scores(q, k)
    return F.normalize(torch.exp(s - rows(s)) * (j <= i), p=1, dim=-1) @ v


@CASES.decline(square)
def norm_of_the_exponentials_times_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What may be negative is not its own absolute value."""
    s = scores(q, k)
    return F.normalize(torch.exp(s - rows(s)) * k[..., 0].unsqueeze(-2), p=1, dim=-1) @ v


@CASES.decline(square)
def euclidean_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return F.normalize(torch.exp(s - rows(s)), p=2, dim=-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# The largest score of those that count, and a number beside the sum


def blind(draw: Draw) -> list[Tensor]:
    """One query sees no key."""
    keep = draw.keep()
    keep[4] = False
    return [*qkv(draw), keep]


@CASES.pair(lambda d: [*qkv(d), d.keep()], twin="either", dtypes=FULL, grad=())
def least_number_under_the_maximum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    e = (s - rows(s.masked_fill(~keep, -9 if near else MIN))).exp() * keep
    return e / (e.sum(-1, keepdim=True) + 1e-6) @ v


@CASES.fuse(blind, dtypes=FULL, grad=())
def nan_of_an_infinity_times_zero(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return least_number_under_the_maximum(q, k, v, keep)


@CASES.fuse(blind, dtypes=FULL, grad=())
def masked_behind_the_maximum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """exp(-inf) / 1e-6 = 0 in the row that sees no key; masked in front of the maximum, it is NaN."""
    s = scores(q, k)
    e = (s - rows(s.masked_fill(~keep, -INF))).masked_fill(~keep, -INF).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-6) @ v


@CASES.fuse(blind, dtypes=FULL, grad=())
def masked_behind_the_maximum_in_powers_of_two(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    e = ((s - rows(s.masked_fill(~keep, -INF))) * 1.5).masked_fill(~keep, -INF).exp2()
    return e / (e.sum(-1, keepdim=True) + 1e-6) @ v


@CASES.decline(blind, dtypes=FULL, reason="the normaliser is kept above 1e-06")
def guarded_before_it_is_scaled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """MIN is no -inf, but MIN times 1.5 is: NaN in the row that sees no key."""
    s = scores(q, k).masked_fill(~keep, MIN)
    m = rows(s)
    e = (s * 1.5 - torch.where(m == -INF, 0.0, m) * 1.5).exp()
    return e / e.sum(-1, keepdim=True).clamp(min=1e-6) @ v


@CASES.decline(lambda d: [*blind(d), d.keep()], dtypes=FULL, reason="the normaliser adds")
def another_mask_under_the_maximum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, other: Tensor) -> Tensor:
    """exp(-inf - MIN) 1 / 1e-6 = 0 in the row that sees no key, where a mask of one kind alone is NaN."""
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - rows(s.masked_fill(~other, MIN))).exp() * other
    return e / (e.sum(-1, keepdim=True) + 1e-6) @ v


@CASES.fuse(blind, dtypes=FULL, grad=())
def masked_in_front_of_the_maximum(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    e = (s - rows(s)).exp()
    return e / (e.sum(-1, keepdim=True) + 1e-6) @ v
