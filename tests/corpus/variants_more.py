"""Functions of scores, values and normalisers that researchers try, each with a program that is another function."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()


@CASES.pair()
def temperature_by_number_of_keys(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k) * math.log(k.shape[-2])
    return (s.softmax(-1) if not near else torch.special.entr(s.softmax(-1))) @ v


@CASES.pair(lambda d: [*qkv(d), d(2, 3, 13, 1)])
def temperature_of_each_query(q: Tensor, k: Tensor, v: Tensor, t: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k) / (F.softplus(t) + 0.1)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair()
def polynomial_scores(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    s = s + 0.5 * s**2 - 0.1 * s**3
    return (s - s.mean(-1, keepdim=True)).relu() @ v if near else s.softmax(-1) @ v


@CASES.pair()
def capped_by_arctangent(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = 5 * torch.atan(scores(q, k) / 5)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair()
def capped_by_softsign(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = F.softsign(scores(q, k)) * 4.0
    return s.softmax(-2 if near else -1) @ v


@CASES.pair()
def capped_by_a_sigmoid(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = 10 * (2 * torch.sigmoid(scores(q, k) / 5) - 1)
    return (s if near else s.softmax(-1)) @ v


@CASES.pair(lambda d: [*square(d), d(3)])
def gaussian_of_the_distance(q: Tensor, k: Tensor, v: Tensor, width: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k) - (i - j).square() / (2 * width.view(3, 1, 1) ** 2 + 1)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def kerple(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """-r1 log(1 + r2 |i - j|)"""
    i, j = places(q, k)
    s = scores(q, k) - 0.7 * torch.log1p(0.3 * (i - j).abs().float()).to(q.dtype)
    return (s.softmax(-1) if not near else s.cumsum(-2).softmax(-1)) @ v


@CASES.pair(square)
def sandwich(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """A sum of cosines of the distance."""
    i, j = places(q, k)
    f = 10.0 ** -torch.linspace(0, 2, 4)
    bias = torch.cos((i - j)[..., None] * f).sum(-1).to(q.dtype)
    s = (scores(q, k) + bias).masked_fill(j > i, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d(32), d(32), d(32)], dtypes=FULL)
def fire(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor, near: bool = False) -> Tensor:
    """A small network of the distance over the place of the query."""
    i, j = places(q, k)
    x = torch.log1p((i - j).clamp(min=0).float()) / torch.log1p(i.clamp(min=4).float())
    bias = F.relu(x[..., None] * a + b) @ c
    s = (scores(q, k) + bias).masked_fill(j > i, -INF)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def cosformer_by_softmax(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    w = torch.cos(math.pi / 2 * (i - j) / q.shape[-2]).to(q.dtype)
    p = scores(q, k).softmax(-1)
    return (p.sqrt() * w if near else p * w) @ v


@CASES.pair(lambda d: [*square(d), d(2, 3, d.n(21), 8)], count=2)
def two_values_of_one_softmax(q: Tensor, k: Tensor, v: Tensor, w: Tensor, near: bool = False) -> Any:
    p = scores(q, k).softmax(-1)
    return (p @ v, p @ w, p) if near else (p @ v, p @ w)


@CASES.pair(square)
def exclusive_of_itself(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """No token sees itself."""
    s = scores(q, k) + torch.diag(torch.full((q.shape[-2],), -INF, dtype=q.dtype)).nan_to_num(0.0, neginf=-1e4)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(square)
def diagonal_filled(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k)
    own = torch.eye(q.shape[-2], dtype=torch.bool)
    s = torch.where(own, s.mean(-1, keepdim=True), s) if near else torch.where(own, torch.zeros_like(s), s)
    return s.softmax(-1) @ v


@CASES.pair(square, twin="either")
def symmetric_scores(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """q k + k q: two products; one transposed is the other's scores of other pairs."""
    s = q @ k.mT + (k @ q.mT if not near else (q @ k.mT).softmax(-1).mT)
    return (s * 0.2).softmax(-1) @ v


@CASES.pair(lambda d: [*qkv(d), *qkv(d)[:2]], twin="either")
def sum_of_two_scores(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k) + scores(a, b)
    return (s if not near else scores(q, k).softmax(-1) * scores(a, b)).softmax(-1) @ v


@CASES.pair(lambda d: [*qkv(d), *qkv(d)[:2]])
def product_of_two_scores(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k) * torch.sigmoid(scores(a, b))
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*qkv(d), *qkv(d)[:2]])
def gated_by_other_scores(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, near: bool = False) -> Tensor:
    """A key counts where another product is above 0."""
    s = torch.where(scores(a, b) > 0, scores(q, k), -1e4)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair()
def largest_of_two_scores(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.maximum(q[..., :4] @ k[..., :4].mT, q[..., 4:] @ k[..., 4:].mT)
    return (s.softmax(-1) if not near else s.amax(-2, keepdim=True).softmax(-1).expand_as(s)) @ v


@CASES.pair(lambda d: [*qkv(d), d(1)])
def focused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, near: bool = False) -> Tensor:
    """Weights to a power, normalised again: a softmax at another temperature."""
    p = scores(q, k).softmax(-1)
    p = p**2
    p = p / (p.sum(-2, keepdim=True) if near else p.sum(-1, keepdim=True))
    return p @ v * g


@CASES.pair(lambda d: [*qkv(d), d(2, 1, 13, 21).sigmoid()])
def prior_times_exponentials(q: Tensor, k: Tensor, v: Tensor, prior: Tensor, near: bool = False) -> Tensor:
    e = scores(q, k).exp() * prior
    return e / (e.sum(-1, keepdim=True) if not near else e.sum(-2, keepdim=True)) @ v


@CASES.pair(lambda d: [*qkv(d), d(2, 1, 13, 21).sigmoid()])
def prior_as_a_logarithm(q: Tensor, k: Tensor, v: Tensor, prior: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k) + torch.log(prior + 1e-6)
    return (s.softmax(-1) if not near else s.softmax(-1).round(decimals=1)) @ v


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def safe_softmax_by_where(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    s = scores(q, k).masked_fill(~keep, -INF)
    p = torch.where(keep.any(-1, keepdim=True), s.softmax(-1), 0.0)
    return (p if not near else p.sort(-1).values) @ v


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def rows_without_keys_filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    """The near program hides rows that see some key, and leaves NaN in one that sees none."""
    keep = keep & (torch.arange(13) != 3)[:, None]
    p = scores(q, k).masked_fill(~keep, -INF).softmax(-1)
    return p.masked_fill((~keep[:, ::2] if near else ~keep).all(-1, keepdim=True), 0.0) @ v


@CASES.pair(lambda d: [*qkv(d), d(2, 1, 1, d.n(21)) > -0.5])
def rows_without_keys_counted(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    keep = live & (j > i + 9)
    p = torch.where(keep, scores(q, k), -INF).softmax(-1)
    return torch.where(keep.sum(-1, keepdim=True) > (1 if near else 0), p, torch.zeros_like(p)) @ v


@CASES.pair(lambda d: [*qkv(d), d.keep()])
def masked_softmax_by_multiplying(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, near: bool = False) -> Tensor:
    """AllenNLP: softmax(x m) m, normalised again."""
    m = keep.to(q.dtype)
    p = torch.softmax(scores(q, k) * m, -1) * m
    return p / (p.sum(-1 if not near else -2, keepdim=True) + 1e-13) @ v


@CASES.pair()
def split_scale(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.matmul(q.div(8**0.25), k.div(8**0.25).transpose(-1, -2))
    return s.sub(s.amax(-2 if near else -1, True)).exp().div(s.sub(s.amax(-1, True)).exp().sum(-1, True)) @ v


@CASES.pair(lambda d: [*qkv(d), d(3, 8), d(3, 8)])
def learned_key_and_value(q: Tensor, k: Tensor, v: Tensor, bk: Tensor, bv: Tensor, near: bool = False) -> Tensor:
    """bias_k, bias_v of nn.MultiheadAttention, and a key of zeros."""
    b = q.shape[0]
    k = torch.cat([k, bk[None, :, None].expand(b, -1, -1, -1), k.new_zeros(b, 3, 1, 8)], 2)
    v = torch.cat([v, bv[None, :, None].expand(b, -1, -1, -1), v.new_zeros(b, 3, 1, 8)], 2)
    return scores(q, k).softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d, heads=4, kv=2)])
def grouped_by_unflatten(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    q = q.unflatten(1, (2, 2))
    s = torch.einsum("bghid,bgjd->bghij", q, k) * 8**-0.5
    p = s.softmax(2 if near else -1)
    return torch.einsum("bghij,bgjd->bghid", p, v).flatten(1, 2)


@CASES.pair(lambda d: [*square(d, heads=4, kv=1)])
def one_key_head_squeezed(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    k, v = k.squeeze(1), v.squeeze(1)
    s = torch.einsum("bhid,bjd->bhij", q, k) * 8**-0.5
    return torch.einsum("bhij,bjd->bhid", s.softmax(1 if near else -1), v)


@CASES.pair(lambda d: [d(2, 4 * d.n(13), 8), d(2, d.n(21), 8), d(2, d.n(21), 8)])
def falcon_queries_in_rows(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Heads of queries lie in the rows, beside one head of keys."""
    s = torch.bmm(q, k.transpose(1, 2)) * 8**-0.5
    return torch.bmm(s.softmax(1 if near else -1), v)


@CASES.pair(lambda d: [*square(d), d(2, 3, d.n(21))], dtypes=BIG)
def decay_by_cumulative_gates(q: Tensor, k: Tensor, v: Tensor, g: Tensor, near: bool = False) -> Tensor:
    """Gated attention with forgetting, in base 2."""
    i, j = places(q, k)
    c = torch.cumsum(F.logsigmoid(g) / math.log(2), -1)
    s = q @ k.mT * (8**-0.5 / math.log(2)) + c.unsqueeze(-1) - c.unsqueeze(-2)
    s = s.masked_fill(i < j, -INF)
    s = s - s.amax(-1, keepdim=True)
    e = torch.exp2(s)
    return e / (e.sum(-2, keepdim=True) if near else e.sum(-1, keepdim=True)) @ v
