"""Ways of writing the softmax that divide, shift, mask or round by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()
HALF = (torch.float16,)


def masked(d: Any) -> list[Tensor]:
    return [*qkv(d), d.keep()]


def with_sinks(d: Any) -> list[Tensor]:
    return [*qkv(d), d(3, 4)]


# ----------------------------------------------------------------------------------------------------------------
# Numerators and denominators


@CASES.fuse()
def greatest_of_all_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.max())
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def greatest_of_each_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.amax((-2, -1), keepdim=True).detach())
    return (e @ v) / e.sum(-1, keepdim=True)


@CASES.fuse()
def shift_above_the_greatest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - (s.amax(-1, keepdim=True) + 1.0))
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def normalize_after_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return F.normalize((s - s.amax(-1, keepdim=True)).exp(), p=1.0, dim=-1) @ v


@CASES.fuse()
def denominator_kept_from_zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e @ v) / e.sum(-1, keepdim=True).clamp_min(1e-6)


@CASES.fuse()
def square_of_a_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (scores(q, k) / 2).exp().square()
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def out_of_the_logarithm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).log().exp() @ v


@CASES.fuse()
def normalised_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1)
    return (p / p.sum(-1, keepdim=True)) @ v


@CASES.fuse(masked)
def weights_masked_and_renormalised(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    p = scores(q, k).softmax(-1) * keep
    return (p / p.sum(-1, keepdim=True)) @ v


@CASES.fuse(masked)
def exponentials_masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp().masked_fill(~keep, 0.0)
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse(masked)
def exponentials_times_mask_over_one_more(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    e = scores(q, k).exp() * keep.to(q.dtype)
    return (e @ v) / (e.sum(-1, keepdim=True) + 1)


@CASES.fuse(masked, dtypes=FULL, note="left to eager in training")
def logsumexp_of_a_row_without_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Its weights are 1 each: the logarithm of their number is lost in the fill"""
    live = keep & (torch.arange(13) != 4)[:, None]
    s = scores(q, k).masked_fill(~live, -1e30)
    return (s - s.logsumexp(-1, keepdim=True)).exp() @ v


@CASES.fuse(masked, dtypes=FULL)
def log_softmax_of_a_row_without_keys(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    live = keep & (torch.arange(13) != 4)[:, None]
    return scores(q, k).masked_fill(~live, -1e30).log_softmax(-1).exp() @ v


@CASES.fuse(with_sinks, grad=(0, 1, 2, 3))
def four_sinks_in_front(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    s = scores(q, k)
    s = torch.cat([sinks[None, :, None].expand(2, 3, s.shape[2], 4), s], -1)
    return s.softmax(-1)[..., 4:] @ v


@CASES.fuse()
def sinks_on_both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    one = s.new_ones(*s.shape[:-1], 1)
    return torch.cat([one, s, -one], -1).softmax(-1)[..., 1:-1] @ v


@CASES.fuse(with_sinks, grad=(0, 1, 2, 3))
def two_sinks_as_terms(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    e = scores(q, k).exp()
    a, b = sinks[:, 0, None, None], sinks[:, 1, None, None]
    return (e / (e.sum(-1, keepdim=True) + a.exp() + b.exp())) @ v


@CASES.fuse(with_sinks, grad=(0, 1, 2, 3))
def sink_in_the_logarithm(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    s = scores(q, k)
    return (s - torch.logaddexp(s.logsumexp(-1, keepdim=True), sinks[:, :1, None])).exp() @ v


@CASES.fuse(masked)
def exponentials_times_a_tensor(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    e = scores(q, k).exp() * keep.to(q.dtype).cos()
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.decline(masked, "the exponentials are multiplied by a tensor before they are normalised")
def exponentials_times_a_tensor_whose_sum_is_returned(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor
) -> tuple[Tensor, Tensor]:
    e = scores(q, k).exp() * keep.to(q.dtype).cos()
    total = e.sum(-1, keepdim=True)
    return (e / total) @ v, total


@CASES.decline(qkv, "the weights are multiplied by something that depends on the scores")
def weights_times_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s.softmax(-1) * s) @ v


@CASES.decline(lambda d: [*qkv(d), d(8)], "the normaliser adds something that depends on the scores or differs by key")
def denominator_differs_by_key(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + (k @ w)[:, :, None].exp())) @ v


@CASES.decline(lambda d: [*qkv(d), d(21)], "`amax` is not a pointwise function of the scores", grad=(0, 1, 2, 3))
def shift_scaled_by_key(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    s = scores(q, k)
    return ((s - s.amax(-1, keepdim=True)) * t).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Where the gradient stops. Only of the shift may it be stopped without a difference


@CASES.fuse()
def queries_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q.detach(), k).softmax(-1) @ v


@CASES.fuse()
def values_as_data(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v.data


@CASES.fuse()
def keys_transposed_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        kt = k.transpose(-2, -1)
    return (q @ kt).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(2, 3, 13, 21)], grad=(0, 1, 2, 3))
def bias_detached(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + bias.detach()).softmax(-1) @ v


@CASES.fuse()
def shift_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    with torch.no_grad():
        m = s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def scores_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).detach().softmax(-1) @ v


@CASES.fuse()
def weights_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        p = scores(q, k).softmax(-1)
    return p @ v


@CASES.fuse(note="left to eager in training")
def denominator_detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / e.sum(-1, keepdim=True).detach()) @ v


# ----------------------------------------------------------------------------------------------------------------
# Integers and floating-point numbers that are not what they seem


@CASES.fuse(square)
def bytes_wrap_around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (x.to(torch.uint8) for x in places(q, k))
    return scores(q, k).masked_fill(i - j > 5, -INF).softmax(-1) @ v


@CASES.fuse(square)
def signed_bytes_wrap_around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill((i.to(torch.int8) * 20 < j) & (i != j), -INF).softmax(-1) @ v


@CASES.fuse(square)
def negative_number_as_a_byte(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill((i - j).to(torch.uint8) > 5, -INF).softmax(-1) @ v


@CASES.fuse(square)
def quotients_of_negative_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill((i - j) // 4 < -1, -INF).softmax(-1) @ v


@CASES.fuse(square)
def remainders_of_negative_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return scores(q, k).masked_fill((i - j) % 3 == 1, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: square(d, 300, heads=1, batch=1), note="bfloat16 has no 257")
def positions_in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (x.to(torch.bfloat16) for x in places(q, k))
    return scores(q, k).masked_fill(j > i, -INF).softmax(-1) @ v


@CASES.fuse(square, dtypes=HALF, grad=(), note="a row without a key forgets its scores: -65504 + s is -65504")
def least_float16_in_the_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    least = torch.finfo(q.dtype).min
    mask = torch.full((21, 21), least, dtype=q.dtype)
    mask[:15, :3] = 0
    return (scores(q, k) + mask).softmax(-1) @ v


@CASES.fuse(masked, dtypes=HALF, grad=())
def least_float16_times_a_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    live = keep.to(q.dtype) * (torch.arange(13) != 4)[:, None].to(q.dtype)
    return (scores(q, k) - (1 - live) * -torch.finfo(q.dtype).min).softmax(-1) @ v


@CASES.fuse(square, dtypes=FULL)
def numbers_of_ones_own_for_infinities(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k).log().masked_fill(torch.ones(21, 21).triu(1).bool(), -INF)
    return s.nan_to_num(-1.0, 0.5, -2.0).softmax(-1) @ v


@CASES.fuse(dtypes=FULL, grad=())
def scores_that_are_high_enough(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT) * 0.4
    return torch.tanh(s).masked_fill((s < -0.5) | (s.abs() > 1.5), -INF).softmax(-1) @ v


@CASES.fuse(square, dtypes=FULL)
def low_scores_and_later_keys_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT) * 0.4
    return s.masked_fill((s < 0.2) | torch.ones(21, 21, dtype=torch.bool).triu(1), -1e9).softmax(-1) @ v


@CASES.fuse(lambda d: qkv(d, heads=4))
def two_heads_of_queries_for_four_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q[:, :2].repeat_interleave(2, 1), k).softmax(-1) @ v


@CASES.decline(square, "scores are rounded to int32", dtypes=FULL)
def scores_as_integers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) * 4).to(torch.int32).to(q.dtype).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d.keep(2, 21)])
def lengths_counted_from_the_padding(q: Tensor, k: Tensor, v: Tensor, live: Tensor) -> Tensor:
    keep = torch.arange(k.shape[2]) < live.sum(-1)[:, None]
    return scores(q, k).masked_fill(~keep[:, None, None], -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*(x[0].transpose(0, 1) for x in square(d)), d.ints(0, 4, 11, 21)])
def documents_counted_from_their_ends(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    i = torch.arange(len(q))
    mine = (i[:, None] >= ends[1:]).sum(-1)
    s = torch.einsum("qhd,khd->hqk", q, k).masked_fill(mine[:, None] != mine, -INF)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v)


# ----------------------------------------------------------------------------------------------------------------
# Sums of softmaxes before the product


def two_halves(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return scores(q[..., :4], k[..., :4]).softmax(-1), scores(q[..., 4:], k[..., 4:]).softmax(-1)


@CASES.fuse(lambda d: [*square(d), d(1)], count=2, grad=(0, 1, 2, 3))
def difference_with_a_learned_weight(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    a, b = two_halves(q, k)
    return torch.matmul(a - lam * b, v) * 0.2


@CASES.fuse(square, count=2)
def mean_of_two_softmaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b = two_halves(q, k)
    return torch.einsum("bhij,bhjd->bihd", (a + b) / 2, v)


@CASES.fuse(square, count=3)
def mixture_of_three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (a, b), c = two_halves(q, k), scores(k, q).softmax(-1)
    return (0.5 * a - (0.3 * b - 0.2 * c)) @ v


@CASES.decline(square, "the weights are made of more than one softmax")
def product_of_two_softmaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b = two_halves(q, k)
    return (a * b) @ v


@CASES.decline(square, "the weights are made of more than one softmax")
def difference_that_is_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a, b = two_halves(q, k)
    p = a - b
    return p @ v, p


@CASES.fuse(square)
def softmax_less_the_identity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) - torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)) @ v


@CASES.fuse()
def share_for_every_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (0.9 * scores(q, k).softmax(-1) + 0.005) @ v


@CASES.fuse(lambda d: [*square(d), d(3), d(3, d.n(21), d.n(21))], grad=(0, 1, 2, 3, 4))
def gated_mixture_with_a_table(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, table: Tensor) -> Tensor:
    """ConViT"""
    g = gate.sigmoid().view(1, -1, 1, 1)
    return ((1.0 - g) * scores(q, k).softmax(-1) + g * table.softmax(-1)) @ v


@CASES.decline(reason="read elsewhere too")
def softmax_and_its_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (s.softmax(-1) + 0.1 * s) @ v


# ----------------------------------------------------------------------------------------------------------------
# Products and functions under other names


@CASES.fuse()
def sum_that_keeps_its_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[:, :, :, None] * k[:, :, None]).sum(-1, keepdim=True).squeeze(-1).softmax(-1) @ v


@CASES.fuse()
def vecdot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.linalg.vecdot(q[:, :, :, None], k[:, :, None]).softmax(-1) @ v


@CASES.fuse()
def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.inner(q[0, 0], k[0, 0]).softmax(-1) @ v[0, 0]


@CASES.fuse(square)
def activations_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return (F.gelu(s) + F.softplus(s) + F.elu(s, 0.5) + F.leaky_relu(s, 0.2) + F.logsigmoid(s)).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(2, 3, 21, 5), d(5)], grad=(0, 1, 2))
def bias_of_each_key_by_a_product(q: Tensor, k: Tensor, v: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return (scores(q, k) + (x @ w)[:, :, None]).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(1)], count=2, grad=(0, 1, 2, 3))
def difference_of_halves_of_one_softmax(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    b, h, n, _ = q.shape
    q, k = (x.unflatten(-1, (2, 4)).transpose(2, 3).reshape(b, 2 * h, n, 4) for x in (q, k))
    a = (q @ k.mT).softmax(-1).view(b, h, 2, n, n)
    return (a[:, :, 0] - lam * a[:, :, 1]) @ v


@CASES.fuse()
def output_scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(scores(q, k).softmax(-1), v).mul_(2.0)


@CASES.fuse(lambda d: [*qkv(d)[:2], d(2, 3, 1, 8)])
def one_value_for_all_keys(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1) * torch.arange(k.shape[-2], device=q.device)
    return weights @ x.expand(2, 3, k.shape[-2], 8)


@CASES.fuse(lambda d: [qkv(d)[0], d(2, 3, 1, 8), qkv(d)[2]])
def one_key_repeated(q: Tensor, x: Tensor, v: Tensor) -> Tensor:
    k = x.expand(2, 3, v.shape[-2], 8)
    return (scores(q, k) - torch.arange(v.shape[-2], device=q.device) * scores(q, k)).softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, 3, 1, 8), *qkv(d)[1:], d(d.n(13), d.n(21))], grad=(0, 1, 2, 3))
def one_query_repeated(x: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = scores(x.expand(2, 3, bias.shape[0], 8), k)
    return (s - bias * s).softmax(-1) @ v
