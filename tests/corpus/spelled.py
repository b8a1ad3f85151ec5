"""Attention in other words: the softmax, the two products, the scale and the heads as people write them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, Table, places, qkv, scores
from torch import Tensor

CASES = Table()


# ----------------------------------------------------------------------------------------------------------------
# The softmax


@CASES.fuse()
def log_softmax_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.log_softmax(scores(q, k), -1).exp() @ v


@CASES.fuse()
def exp_minus_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


@CASES.fuse()
def exp_minus_logsumexp_unsqueezed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    return torch.exp(s - torch.logsumexp(s, dim=-1)[..., None]) @ v


@CASES.fuse()
def exp_minus_log_of_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    m = s.amax(-1, keepdim=True)
    lse = m + (s - m).exp().sum(-1, keepdim=True).log()
    return (s - lse).exp() @ v


@CASES.fuse()
def detached_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = (s - s.max(-1, keepdim=True)[0].detach()).exp()
    return e.div(e.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def times_the_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


@CASES.fuse()
def deferred_division(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


@CASES.fuse()
def deferred_division_after_max(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e @ v) / e.sum(-1)[..., None]


@CASES.fuse()
def deferred_reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e @ v) * (1.0 / e.sum(-1, keepdim=True))


@CASES.fuse()
def powers_of_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k) * math.log2(math.e)
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def power_of_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = 2.0 ** scores(q, k)
    return (e / e.sum(-1, keepdim=True)) @ v


@CASES.fuse()
def softmin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmin(scores(q, k), dim=-1) @ v


@CASES.fuse()
def module(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.Softmax(dim=-1)(scores(q, k)) @ v


@CASES.fuse()
def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), dim=-1, dtype=torch.float32).type_as(q) @ v


@CASES.fuse()
def one_in_the_denominator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / (1.0 + e.sum(-1, keepdim=True))) @ v


@CASES.fuse()
def epsilon_in_the_denominator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + 1e-6)) @ v


@CASES.fuse()
def one_in_the_shifted_denominator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k)
    m = s.amax(-1, keepdim=True)
    e = (s - m).exp()
    return (e / ((-m).exp() + e.sum(-1, keepdim=True))) @ v


def with_sink(d: Any) -> list[Tensor]:
    return [*qkv(d), d(3)]


@CASES.fuse(with_sink, grad=(0, 1, 2, 3))
def sink_in_front(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = scores(q, k)
    s = torch.cat([sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1), s], -1)
    return s.softmax(-1)[..., 1:] @ v


@CASES.fuse()
def zero_sink_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.pad(scores(q, k), (1, 0)).softmax(-1)[..., 1:] @ v


@CASES.fuse(with_sink, grad=(0, 1, 2, 3))
def sink_as_a_term(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    e = scores(q, k).exp()
    return (e / (e.sum(-1, keepdim=True) + sink[:, None, None].exp())) @ v


@CASES.fuse()
def gate_on_the_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * 0.5) @ v


# ----------------------------------------------------------------------------------------------------------------
# The products


@CASES.fuse()
def transposed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (k @ q.transpose(-2, -1)).softmax(-2)
    return (v.transpose(-2, -1) @ p).transpose(-2, -1)


@CASES.fuse()
def transposed_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.transpose(-2, -1)).softmax(-2).transpose(-2, -1) @ v


@CASES.fuse()
def output_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.transpose(-2, -1) @ scores(q, k).softmax(-1).transpose(-2, -1)


@CASES.fuse()
def einsum_other_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("zyxw,zyvw->zyxv", q, k) * 0.3
    return torch.einsum("abcd,abde->abce", s.softmax(-1), v)


@CASES.fuse()
def einsum_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhkd,bhqd->bhqk", k, q)
    return torch.einsum("bhkd,bhqk->bqhd", v, s.softmax(-1))


@CASES.fuse()
def einsum_keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhqd,bhkd->bkhq", q, k)
    return torch.einsum("bkhq,bhkd->bhqd", s.softmax(1), v)


@CASES.fuse()
def einsum_with_ellipsis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", q, k).softmax(-1), v)


@CASES.fuse()
def einsum_implicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("id,jd", q[0, 0], k[0, 0]).softmax(-1) @ v[0, 0]


@CASES.fuse()
def tensordot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.tensordot(q[0, 0], k[0, 0], dims=([1], [1]))
    return torch.tensordot(s.softmax(-1), v[0, 0], dims=1)


@CASES.fuse()
def multiply_and_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q[:, :, :, None] * k[:, :, None]).sum(-1)
    return (s.softmax(-1)[..., None] * v[:, :, None]).sum(-2)


@CASES.fuse(lambda d: [x[0, 0] for x in qkv(d)])
def linear_as_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.linear(q, k).softmax(-1), v.t())


@CASES.fuse(lambda d: [x[0, 0] for x in qkv(d)])
def mm_and_addmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.addmm(torch.zeros(q.shape[0], k.shape[0], dtype=q.dtype), q, k.t(), beta=0.5, alpha=0.25)
    return s.softmax(-1).mm(v)


@CASES.fuse(lambda d: [*(x[0] for x in qkv(d)), d(3, d.n(13), d.n(21))], grad=(0, 1, 2, 3))
def baddbmm_with_beta(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.3).softmax(-1).bmm(v)


@CASES.fuse(lambda d: [*(x[0] for x in qkv(d)), d(3, 1, d.n(21))], grad=(0, 1, 2, 3))
def baddbmm_of_an_alibi(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor) -> Tensor:
    return alibi.baddbmm(q, k.transpose(1, 2), alpha=0.3).softmax(-1).bmm(v)


@CASES.fuse()
def add_with_alpha(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.add(torch.ones_like(q[:, :, :, :1]), q @ k.mT, alpha=0.25).softmax(-1) @ v


@CASES.fuse(dtypes=FULL)
def sub_with_alpha(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sub(q @ k.mT, torch.arange(k.shape[2]) / 8, alpha=0.5).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# The scale


@CASES.fuse()
def scale_on_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q / 8**0.25) @ (k / 8**0.25).mT).softmax(-1) @ v


@CASES.fuse()
def scale_as_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) / torch.sqrt(torch.tensor(q.shape[-1], dtype=q.dtype))).softmax(-1) @ v


@CASES.fuse(lambda d: qkv(d, 21))
def scale_after_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return ((q @ k.mT).masked_fill(j > i, -INF) / math.sqrt(8)).softmax(-1) @ v


@CASES.fuse(lambda d: qkv(d, 21), dtypes=BIG)
def scale_after_a_finite_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(q, k)
    return ((q @ k.mT).masked_fill(j > i, -1e9) * 0.125).softmax(-1) @ v


@CASES.fuse()
def scale_by_the_number_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * math.log(k.shape[-2]) / 4).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3).abs()], grad=(0, 1, 2, 3))
def temperature_per_head(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return ((q @ k.mT) / t[:, None, None]).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(1).abs()], grad=(0, 1, 2, 3))
def logit_scale_exponentiated(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return ((q @ k.mT) * t.clamp(max=math.log(100)).exp()).softmax(-1) @ v


@CASES.fuse(grad=())
def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s *= 0.25
    s.sub_(s.amax(-1, keepdim=True)).exp_()
    s /= s.sum(-1, keepdim=True)
    return s @ v


# ----------------------------------------------------------------------------------------------------------------
# Heads


@CASES.fuse(lambda d: qkv(d, heads=6, kv=2))
def tiled_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k.repeat(1, 3, 1, 1)).softmax(-1) @ v.repeat(1, 3, 1, 1)


@CASES.fuse(lambda d: qkv(d, heads=6, kv=2))
def grouped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhgqd,bhkd->bhgqk", q.unflatten(1, (2, 3)), k) * 0.3
    return torch.einsum("bhgqk,bhkd->bhgqd", s.softmax(-1), v).flatten(1, 2)


@CASES.fuse(lambda d: qkv(d, heads=6, kv=2))
def heads_by_index(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(6) // 3
    return scores(q, k[:, at]).softmax(-1) @ v.index_select(1, at)


@CASES.fuse(lambda d: qkv(d, heads=6, kv=2))
def keys_grouped_values_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k.repeat_interleave(3, 1)).softmax(-1) @ v.repeat(1, 3, 1, 1)


@CASES.fuse(lambda d: [*qkv(d)[:1], *(x[:, 0] for x in qkv(d)[1:])])
def keys_without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k[:, None]).softmax(-1) @ v[:, None]


@CASES.fuse(lambda d: qkv(d, heads=1, batch=1))
def one_head_one_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(lambda d: qkv(d, m=1, heads=1, batch=1))
def one_query_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(lambda d: qkv(d, n=1))
def one_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) @ v


@CASES.fuse(lambda d: [d(8), d(21, 8), d(21, 8)])
def one_query_vector(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q).softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, 3, 8), d(2, 3, 21, 8), d(2, 3, 21, 8)])
def one_query_without_an_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhd,bhkd->bhk", q, k)
    return torch.einsum("bhk,bhkd->bhd", s.softmax(-1), v)
