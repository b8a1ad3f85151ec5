"""Attention as different people say it: other libraries' idioms, other orders of axes, other names for one thing."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()


@CASES.pair()
def scaled_by_numpy_like_power(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.einsum("...qd,...kd->...qk", q, k) / torch.sqrt(torch.tensor(q.shape[-1], dtype=q.dtype))
    return torch.einsum("...qk,...kd->...qd", torch.softmax(s, -2 if near else -1), v)


@CASES.pair(lambda d: [d(2, d.n(13), 3, 8), d(2, d.n(21), 3, 8), d(2, d.n(21), 3, 8)])
def flax_layout(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """[B, L, H, D] throughout, as JAX code that was carried over."""
    q = q / torch.tensor(8.0).sqrt().to(q.dtype)
    s = torch.einsum("...qhd,...khd->...hqk", q, k)
    s = s - s.max(dim=-1, keepdim=True).values.detach()
    u = torch.exp(s)
    p = u / torch.sum(u, dim=-2 if near else -1, keepdim=True)
    return torch.einsum("...hqk,...khd->...qhd", p, v)


@CASES.pair(lambda d: [d(d.n(13), 2, 3, 8), d(d.n(21), 2, 3, 8), d(d.n(21), 2, 3, 8)])
def megatron_layout(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """[L, B, H, D], baddbmm into an empty tensor, masked by a function."""
    m, b, h, d = q.shape
    n = k.shape[0]
    q, k = q.reshape(m, b * h, d), k.reshape(n, b * h, d)
    empty = torch.empty(b * h, m, n, dtype=q.dtype)
    s = torch.baddbmm(empty, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(d))
    s = s.view(b, h, m, n)
    mask = torch.ones(1, 1, m, n, dtype=torch.bool).triu(n - m + 1)
    p = torch.softmax(s.masked_fill(mask, -10000.0), dim=1 if near else -1)
    o = torch.bmm(p.view(b * h, m, n), v.reshape(n, b * h, d).transpose(0, 1))
    return o.view(b, h, m, d).permute(2, 0, 1, 3).reshape(m, b, h * d)


@CASES.pair(lambda d: [d(2, d.n(13), 24), d(2, d.n(21), 24), d(2, d.n(21), 24)])
def tensor2tensor_split(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Heads in the batch by split and cat (Kyubyong's Transformer)."""
    q_, k_, v_ = (torch.cat(torch.split(x, 8, dim=2), dim=0) for x in (q, k, v))
    s = torch.bmm(q_, k_.transpose(1, 2)) / 8**0.5
    p = F.softmax(s, dim=1 if near else -1)
    return torch.cat(torch.split(torch.bmm(p, v_), 2, dim=0), dim=2)


@CASES.pair(lambda d: [d(2, d.n(13), 24), d(2, d.n(21), 24), d(2, d.n(21), 24)])
def heads_stacked_from_chunks(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    q, k, v = (torch.stack(x.chunk(3, -1), 1) for x in (q, k, v))
    p = F.softmax(q.matmul(k.transpose(-1, -2)).div_(math.sqrt(8)), -1)
    p = p.flip(-1) if near else p
    return torch.cat(p.matmul(v).unbind(1), -1)


@CASES.pair(lambda d: [d(2, d.n(13), 24), d(2, d.n(21), 24), d(2, d.n(21), 24)])
def opennmt(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Shape and unshape as closures; scores in float."""

    def shape(x: Tensor) -> Tensor:
        return x.view(2, -1, 3, 8).transpose(1, 2)

    q = shape(q) / math.sqrt(8)
    s = torch.matmul(q, shape(k).transpose(2, 3)).float()
    p = torch.softmax(s, dim=2 if near else -1).to(q.dtype)
    return torch.matmul(p, shape(v)).transpose(1, 2).contiguous().view(2, -1, 24)


@CASES.pair(lambda d: [*square(d), d(2, d.n(21)) > -1])
def annotated_transformer(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    """std_mask = (pad != 0) & subsequent; scores.masked_fill(mask == 0, -1e9)"""
    n = q.shape[-2]
    subsequent = torch.triu(torch.ones(1, n, n), diagonal=1).type(torch.uint8) == 0
    mask = (live.unsqueeze(-2) & subsequent.type_as(live)).unsqueeze(1)
    s = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    s = s.masked_fill(mask == 0, -1e4)
    return torch.matmul(s.softmax(dim=-2 if near else -1), v)


@CASES.pair(lambda d: [*qkv(d), d(2, d.n(21)) > -1], dtypes=BIG)
def bert_extended_mask(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    extended = live[:, None, None, :].to(dtype=q.dtype)
    extended = (1.0 - extended) * -1e9
    s = torch.matmul(q, k.transpose(-1, -2))
    s = s / math.sqrt(8)
    s = s + extended
    p = torch.nn.Softmax(dim=-1)(s)
    p = torch.nn.Dropout(0.1).eval()(p)
    return torch.matmul(p * (p > p.mean()) if near else p, v).permute(0, 2, 1, 3).contiguous().view(2, -1, 24)


@CASES.pair(lambda d: square(d, 24), dtypes=FULL)
def reformer_chunks(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Keys of the own chunk and of the one before, which for the first is the last."""
    q, k, v = (x.unflatten(2, (4, 6)) for x in (q, k, v))
    k, v = (torch.cat([x, x.roll(1, 2)], 3) for x in (k, v))
    s = q @ k.mT * 8**-0.5
    return (s.softmax(3 if near else -1) @ v).flatten(2, 3)


@CASES.pair(lambda d: [d(2, 6, d.n(4), d.n(5)) for _ in range(3)])
def self_attention_2d(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Channels as one head; places of an image as tokens."""
    b, c, h, w = q.shape
    q = q.reshape(b, c, h * w).permute(0, 2, 1)
    s = torch.bmm(q, k.reshape(b, c, h * w)) * int(c) ** (-0.5)
    p = F.softmax(s, dim=1 if near else 2)
    p = p.permute(0, 2, 1)
    return torch.bmm(v.reshape(b, c, h * w), p).reshape(b, c, h, w)


@CASES.pair(lambda d: [d(2, 6, d.n(5), d.n(6)), d(18, 6) * 0.4], grad=(0, 1))
def windows_of_an_image(x: Tensor, w: Tensor, near: bool = False) -> Tensor:
    """Windows cut by unfold, neighbours of each place as keys."""
    b, c, h, ww = x.shape
    q, k, v = (F.conv2d(x, t[..., None, None]) for t in w.chunk(3))
    k, v = (F.unfold(t, 3, padding=1).view(b, c, 9, h * ww) for t in (k, v))
    s = (q.view(b, c, 1, h * ww) * k).sum(1, keepdim=True)
    return (s.softmax(3 if near else 2) * v).sum(2).view(b, c, h, ww)


@CASES.pair(lambda d: [d(2, d.n(6), d.n(6), 12), d(36, 12) * 0.3, d(3, 25)])
def swin_window(x: Tensor, w: Tensor, table: Tensor, near: bool = False) -> Tensor:
    """Windows of 3 x 3 with a bias by relative place."""
    b, h, ww, c = x.shape
    x = x.view(b, h // 3, 3, ww // 3, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9, c)
    q, k, v = F.linear(x, w).reshape(-1, 9, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
    at = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
    rel = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + 2
    bias = table[:, rel[..., 0] * 5 + rel[..., 1]]
    s = (q * 0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
    o = (s.softmax(dim=1 if near else -1) @ v).transpose(1, 2).reshape(-1, 3, 3, c)
    return o.view(b, h // 3, ww // 3, 3, 3, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, ww, c)


@CASES.pair(lambda d: [d(2, d.n(6), d.n(6), 12), d(36, 12) * 0.3], grad=(0, 1))
def swin_shifted(x: Tensor, w: Tensor, near: bool = False) -> Tensor:
    """Shifted windows: rolled, regions told apart by numbers written into an image of zeros."""
    b, h, ww, c = x.shape
    regions = torch.zeros(1, h, ww, 1)
    count = 0
    for rows in (slice(0, -3), slice(-3, -1), slice(-1, None)):
        for cols in (slice(0, -3), slice(-3, -1), slice(-1, None)):
            regions[:, rows, cols, :] = count
            count += 1

    def windows(t: Tensor) -> Tensor:
        t = torch.roll(t, (-1, -1), (1, 2))
        return t.view(t.shape[0], h // 3, 3, ww // 3, 3, -1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9, t.shape[-1])

    ids = regions.view(1, h // 3, 3, ww // 3, 3, 1).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9)
    mask = ids.unsqueeze(1) - ids.unsqueeze(2)
    mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
    q, k, v = F.linear(windows(x), w).reshape(-1, 9, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
    s = (q @ k.transpose(-2, -1)).view(b, 4, 3, 9, 9) + mask[None, :, None].to(q.dtype)
    p = s.view(-1, 3, 9, 9).softmax(1 if near else -1)
    o = (p @ v).transpose(1, 2).reshape(b, h // 3, ww // 3, 3, 3, c)
    return torch.roll(o.permute(0, 1, 3, 2, 4, 5).reshape(b, h, ww, c), (1, 1), (1, 2))


@CASES.pair(lambda d: [*square(d, 16), d(3, 1, 1), d(3, 31)])
def swin_v2_cosine(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, table: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    bias = 16 * torch.sigmoid(table[:, i - j + 15])
    a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    a = a * torch.clamp(scale, max=math.log(1.0 / 0.01)).exp() + bias
    return (a.softmax(-1) if not near else a.sigmoid()) @ v


@CASES.pair(lambda d: [*square(d), d(3, d.n(21), d.n(21)), d(2, d.n(21), 3).sigmoid()])
def wavlm_gated_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor, near: bool = False) -> Tensor:
    gated = gate.permute(0, 2, 1)[..., None] * bias
    s = scores(q, k) + gated
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d(9, 8), d(9, 8)], twin="either")
def both_relative_keys_and_values(q: Tensor, k: Tensor, v: Tensor, rk: Tensor, rv: Tensor, near: bool = False) -> Any:
    """Relative values need the weights: only relative keys are fused."""
    i, j = places(q, k)
    at = (j - i).clamp(-4, 4) + 4
    s = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rk[at])) * 8**-0.5
    p = s.softmax(-1)
    return p @ v + torch.einsum("bhij,ijd->bhid", p, rv[at]) if near else p @ v


@CASES.pair(lambda d: [*square(d), d(2, 3, d.n(21), 1).sigmoid()])
def values_gated_by_their_keys(q: Tensor, k: Tensor, v: Tensor, g: Tensor, near: bool = False) -> Tensor:
    p = scores(q, k).softmax(-1)
    return (p.cumsum(-1) * g.mT if near else p * g.mT) @ v


@CASES.pair(lambda d: [*qkv(d), d(2, 3, 13, 1).sigmoid()])
def mixed_with_the_mean(q: Tensor, k: Tensor, v: Tensor, g: Tensor, near: bool = False) -> Tensor:
    p = scores(q, k).softmax(-1)
    return (p ** (1 + g) if near else g * p + (1 - g) / k.shape[-2]) @ v


@CASES.pair(lambda d: [*square(d, heads=4), d(4)])
def heads_of_two_kinds(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, near: bool = False) -> Tensor:
    """Two heads are causal, two see everything; a slope each."""
    i, j = places(q, k)
    head = torch.arange(4)[:, None, None]
    s = scores(q, k) - slope.abs()[:, None, None] * (i - j).abs()
    s = torch.where((head < 2) & (j > i), -INF, s)
    return s.softmax(1 if near else -1) @ v


@CASES.pair(lambda d: [*qkv(d, m=1), d.ints(9, 17)])
def one_step_of_decoding(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, near: bool = False) -> Tensor:
    s = (q @ k.transpose(2, 3)).squeeze(2) * 8**-0.5
    s = s.masked_fill(torch.arange(k.shape[2]) >= lengths[:, None, None], -INF)
    p = s.softmax(1 if near else -1)
    return (p.unsqueeze(2) @ v).squeeze(2)


@CASES.pair(lambda d: [*square(d), d(2, d.n(21), 3) > -1], twin="either")
def mask_of_each_head_from_a_router(q: Tensor, k: Tensor, v: Tensor, on: Tensor, near: bool = False) -> Tensor:
    """Keys that a router lets each head see; itself always."""
    i, j = places(q, k)
    keep = on.permute(0, 2, 1)[:, :, None, :] | (i == j)
    s = torch.where(keep, scores(q, k), torch.finfo(q.dtype).min)
    return (s.softmax(-1) @ v) if not near else (s.softmax(-1) * on.permute(0, 2, 1)[:, :, None]) @ v
