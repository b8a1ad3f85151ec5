"""Training: what learns beside Q, K and V, rows that padding hides whole, projections that lie beside each other.

Each argument named in `grad` gets the gradient that autograd gives it in eager.
"""

from __future__ import annotations

import math

import torch
from corpus.table import INF, Draw, Table, places, qkv, scores, square
from torch import Tensor
from torch.nn import functional as F

CASES = Table()
ALL = (0, 1, 2, 3)


def lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


# ----------------------------------------------------------------------------------------------------------------
# Biases


@CASES.fuse(lambda d: [*qkv(d), d(1, 3, d.n(13), d.n(21))], grad=ALL)
def bias_of_each_head(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + bias).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(2, 1, 1, d.n(21))], grad=ALL)
def bias_of_each_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (scores(q, k) + bias).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(d.n(13), d.n(21))], grad=(3,))
def only_the_bias_learns(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def buckets(distance: Tensor) -> Tensor:
    """T5's: exact up to 8, then logarithmic up to 32, either way."""
    far = distance.abs()
    rough = 8 + (torch.log(far.clamp(min=1).float() / 8) / math.log(4) * 8).long()
    return torch.where(far < 8, far, rough.clamp(max=15)) + 16 * (distance > 0)


@CASES.fuse(lambda d: [*qkv(d), d(32, 3)], grad=ALL)
def t5_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i, j = places(q, k)
    bias = F.embedding(buckets(j - i), table).permute(2, 0, 1)[None]
    return ((q @ k.transpose(-2, -1)) + bias).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d, 20), d(63, 3)], grad=ALL)
def swin_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Windows of 4 x 5: the place in the table is the difference of two coordinates."""
    y, x = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    y, x = (c.flatten().to(q.device) for c in (y, x))
    place = (y[:, None] - y + 3) * 9 + x[:, None] - x + 4
    bias = table[place.view(-1)].view(20, 20, -1).permute(2, 0, 1)
    return (scores(q, k) + bias[None]).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3, 2 * d.n(21))], grad=ALL)
def table_of_distances(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    i, j = places(q, k)
    return (scores(q, k) + table[:, j - i + q.shape[-2] - 1]).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3).abs()], grad=ALL)
def slopes(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k) - slope[:, None, None] * (i - j).abs()
    return s.masked_fill(j > i + 8, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d, heads=6, kv=2), d(6, d.n(13), d.n(21))], grad=ALL)
def bias_of_grouped_heads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    return (30 * torch.tanh((scores(q, k) + bias) / 30)).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Sinks, temperatures, gates


@CASES.fuse(lambda d: [*square(d), d(3)], grad=ALL)
def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = torch.cat([scores(q, k), sink.view(1, -1, 1, 1).expand(2, 3, q.shape[-2], 1)], -1)
    s = s - s.max(-1, keepdim=True).values
    return s.softmax(-1)[..., :-1] @ v


@CASES.fuse(lambda d: [*qkv(d), d(3, 1, 1)], grad=ALL)
def swin_temperature(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return (s * temperature.clamp(max=math.log(100.0)).exp()).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(1, 1).abs() + 1], grad=ALL)
def learned_cap(q: Tensor, k: Tensor, v: Tensor, cap: Tensor) -> Tensor:
    return (cap * torch.tanh(scores(q, k) / cap)).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3, 1, 1)], grad=ALL)
def gated_weights(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * gate.sigmoid()) @ v


# ----------------------------------------------------------------------------------------------------------------
# Padding


def lengths(d: Draw) -> list[Tensor]:
    """Q, K, V of two requests, the second of which is empty."""
    return [*square(d), d.ints(17, 0)]


@CASES.fuse(lengths)
def bert_padding(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    keep = torch.arange(k.shape[-2], device=q.device) < length[:, None, None, None]
    return scores(q, k).masked_fill(~keep, lowest(q)).softmax(-1) @ v


@CASES.fuse(lengths, dtypes=(torch.float32, torch.bfloat16))
def bert_padding_added(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    keep = torch.arange(k.shape[-2], device=q.device) < length[:, None, None, None]
    mask = torch.zeros(keep.shape, dtype=q.dtype, device=q.device).masked_fill(~keep, lowest(q))
    return (scores(q, k) + mask).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d.ints(4, 0), d(3, d.n(21), d.n(21))], grad=(0, 1, 2, 4))
def causal_behind_left_padding(q: Tensor, k: Tensor, v: Tensor, start: Tensor, bias: Tensor) -> Tensor:
    i, j = places(q, k)
    keep = (j <= i) & (j >= start[:, None, None, None])
    return torch.where(keep, scores(q, k) + bias, lowest(q)).softmax(-1) @ v


# ----------------------------------------------------------------------------------------------------------------
# Where Q, K and V lie


@CASES.fuse(lambda d: [d(2, d.n(21), 3 * 3 * 8), d(3)], grad=(0, 1))
def packed_projection(x: Tensor, slope: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in x.chunk(3, -1))
    i, j = places(q, k)
    return (scores(q, k) - slope[:, None, None] * (i - j).abs()).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(3)], grad=ALL)
def heads_in_the_batch(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    b, h, n, _ = q.shape
    q, k, v = (x.reshape(b * h, n, -1) for x in (q, k, v))
    s = torch.bmm(q, k.transpose(1, 2)).view(b, h, n, n) * scale[:, None, None]
    return torch.bmm(s.softmax(-1).view(b * h, n, n), v).view(b, h, n, -1)


# ----------------------------------------------------------------------------------------------------------------
# What is written into before the backward pass reads it


@CASES.fuse()
def output_doubled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = scores(q, k).softmax(-1) @ v
    out[:, 0] *= 2
    return out.transpose(1, 2)


@CASES.fuse(lambda d: [*qkv(d), d(1, 3, d.n(13), d.n(21))])
def bias_zeroed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = (scores(q, k) + bias).softmax(-1) @ v
    bias.zero_()
    return out


# ----------------------------------------------------------------------------------------------------------------
# Scores that several things which learn make together


@CASES.fuse(lambda d: [*square(d), d(3), d(3)], grad=(0, 1, 2, 3, 4))
def logarithm_of_the_distance(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """KERPLE's"""
    i, j = places(q, k)
    far = torch.log1p(b.exp()[:, None, None] * (i - j).abs().to(q.dtype))
    return (scores(q, k) - a.exp()[:, None, None] * far).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3, 1, 1), d(3)], grad=(0, 1, 2, 3, 4))
def place_that_each_head_looks_at(q: Tensor, k: Tensor, v: Tensor, at: Tensor, width: Tensor) -> Tensor:
    """A Gaussian over the keys, whose centre and width learn"""
    j = torch.arange(k.shape[-2], device=q.device).to(q.dtype)
    away = (j - k.shape[-2] * at.sigmoid()) ** 2 / (2 * (2 + width.exp()[:, None, None]) ** 2)
    return (scores(q, k) - away).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(2, 3, d.n(21))], grad=ALL)
def gates_that_forget(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    kept = F.logsigmoid(gate).cumsum(-1)
    i, j = places(q, k)
    return (scores(q, k) + kept[..., :, None] - kept[..., None, :]).masked_fill(j > i, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), *qkv(d)[:2], d(3, 1, 1)], grad=(0, 1, 2, 3, 4, 5))
def scores_of_two_kinds(q: Tensor, k: Tensor, v: Tensor, q2: Tensor, k2: Tensor, share: Tensor) -> Tensor:
    return (scores(q, k) + share * scores(q2, k2)).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), *qkv(d)[:2]], grad=(0, 1, 2, 3, 4))
def scores_gated_by_others(q: Tensor, k: Tensor, v: Tensor, q2: Tensor, k2: Tensor) -> Tensor:
    return (scores(q, k) * scores(q2, k2).sigmoid()).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3, d.n(13), d.n(21))], grad=ALL)
def larger_of_score_and_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.maximum(scores(q, k), bias).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(4, 4), d.keep(2, d.n(21)).long()], grad=ALL)
def table_of_labels(q: Tensor, k: Tensor, v: Tensor, table: Tensor, label: Tensor) -> Tensor:
    mine = label[:, : q.shape[-2], None]
    return (scores(q, k) + table[mine, label[:, None]].unsqueeze(1)).softmax(-1) @ v


@CASES.fuse(lambda d: [*qkv(d), d(3, d.n(13), d.n(21))], grad=ALL)
def logsumexp_beside_a_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(q, k) + bias
    return s.softmax(-1) @ v, s.logsumexp(-1)


@CASES.fuse(lambda d: [*qkv(d), d(3)], grad=ALL)
def gate_by_the_logsumexp(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    s = scores(q, k)
    return (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sink[:, None, None])


@CASES.fuse(lambda d: [*qkv(d, heads=6, kv=2), d(6, 1, d.n(21)), d(6), d(6, 1, 1)], grad=(0, 1, 2, 3, 4, 5))
def grouped_heads_with_all_of_it(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor, scale: Tensor) -> Tensor:
    s = scores(q, k.repeat_interleave(3, 1)) * scale + bias
    beside = torch.cat([s, sink[None, :, None, None].expand(s.shape[0], -1, s.shape[2], -1)], -1)
    return beside.softmax(-1)[..., :-1] @ v.repeat_interleave(3, 1)
