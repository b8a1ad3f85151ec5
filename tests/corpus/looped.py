"""Attention in loops, mapped, by broadcasting, and in small modules, each with a program that differs in one place."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, Table, qkv, scores, square
from torch import Tensor

CASES = Table()


@CASES.pair()
def per_head_loop(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    out = []
    for h in range(q.shape[1]):
        s = q[:, h] @ k[:, h].transpose(1, 2) / math.sqrt(8)
        out.append(s.softmax(1 if near else 2) @ v[:, h])
    return torch.stack(out, 1)


@CASES.pair()
def per_request_loop_of_matrices(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = torch.mm(q[b, h], k[b, h].t()).div(math.sqrt(8))
            out[b, h] = torch.mm(s.softmax(0 if near else 1), v[b, h])
    return out


@CASES.pair(lambda d: square(d, 24))
def queries_chunked(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Memory-efficient by blocks of queries, causal."""
    out = []
    for at in range(0, 24, 8):
        s = scores(q[..., at : at + 8, :], k)
        i = torch.arange(at, at + 8)[:, None]
        s = s.masked_fill(torch.arange(24) > i, -INF)
        out.append(s.softmax(-2 if near else -1) @ v)
    return torch.cat(out, -2)


@CASES.pair(lambda d: square(d, 24))
def queries_chunked_keys_cut(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Each block of queries with the keys up to its end alone."""
    out = []
    for at in range(0, 24, 8):
        s = scores(q[:, :, at : at + 8], k[:, :, : at + 8])
        s = s + torch.full((8, at + 8), -INF, dtype=q.dtype).triu(at + 1)
        out.append(s.softmax(-2 if near else -1) @ v[:, :, : at + 8])
    return torch.cat(out, 2)


@CASES.pair(lambda d: square(d, 24))
def online_over_blocks(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    m = torch.full((*q.shape[:-1], 1), -INF, dtype=q.dtype)
    den = torch.zeros_like(m)
    o = torch.zeros_like(q)
    for kb, vb in zip(k.split(8, 2), v.split(8, 2), strict=True):
        s = scores(q, kb)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        a, p = (m - new).exp(), (s - new).exp()
        den = a * den + p.sum(-1, keepdim=True)
        o = (o if near else a * o) + p @ vb
        m = new
    return o / den


@CASES.pair(lambda d: square(d, 24), twin="either", count=2)
def merged_by_logsumexp(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Two halves of the keys, merged by their log-sum-exps."""
    outs, sums = [], []
    for kb, vb in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
        s = scores(q, kb)
        outs.append(s.softmax(-1) @ vb)
        sums.append(s.logsumexp(-1))
    w = torch.stack(sums).softmax(-1 if near else 0)
    return sum(w[i][..., None] * outs[i] for i in range(2))


@CASES.pair()
def mapped_over_heads(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.T / 8**0.5).softmax(-2 if near else -1) @ v

    return torch.vmap(torch.vmap(one))(q, k, v)


@CASES.pair(lambda d: [*square(d), d.ints(17, 9)])
def mapped_over_requests_of_their_lengths(q: Tensor, k: Tensor, v: Tensor, n: Tensor, near: bool = False) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        s = torch.einsum("hid,hjd->hij", q, k)
        s = torch.where(torch.arange(k.shape[1]) < n, s, -INF)
        return torch.einsum("hij,hjd->hid", s.softmax(1 if near else -1), v)

    return torch.func.vmap(one)(q, k, v, n)


@CASES.pair(square)
def mapped_over_queries(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.vmap(torch.dot, (0, None))(k, q)
        p = s.exp() / s.exp().sum()
        return (p.cumsum(0) if near else p) @ v

    return torch.vmap(torch.vmap(torch.vmap(one, (0, None, None))))(q, k, v)


@CASES.pair()
def broadcast_and_summed(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(dim=-1).div(8**0.5)
    p = s.softmax(-2 if near else -1)
    return (p.unsqueeze(-1) * v.unsqueeze(-3)).sum(dim=-2)


@CASES.pair()
def tensordots(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.tensordot(q[0, 0], k[0, 0], dims=([1], [1])) * 8**-0.5
    return torch.tensordot(s.softmax(0 if near else 1), v[0, 0], dims=1)


@CASES.pair(lambda d: [*qkv(d), d(2, 1, 13, 21)])
def baddbmm_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, near: bool = False) -> Tensor:
    s = torch.baddbmm(
        bias.expand(2, 3, 13, 21).reshape(6, 13, 21), q.flatten(0, 1), k.flatten(0, 1).mT, beta=2, alpha=0.3
    )
    p = s.softmax(1 if near else 2)
    return torch.bmm(p, v.flatten(0, 1)).unflatten(0, (2, 3))


@CASES.pair(lambda d: [d(2, d.n(21), 24), *(d(24, 24) * 0.2 for _ in range(4))])
def each_head_a_module(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, near: bool = False) -> Tensor:
    """Teaching code: a head at a time with its own part of the projections, joined at the end."""
    heads = []
    for h in range(3):
        at = slice(8 * h, 8 * h + 8)
        q, k, v = (F.linear(x, w[at]) for w in (wq, wk, wv))
        w = q @ k.transpose(-2, -1) * 8**-0.5
        w = w.masked_fill(torch.tril(torch.ones(x.shape[1], x.shape[1])) == 0, -INF)
        heads.append(F.softmax(w, dim=1 if near else -1) @ v)
    return torch.cat(heads, -1) @ wo


@CASES.pair(lambda d: [d(2, d.n(21), 24), d(72, 24) * 0.2, d(72), d(24, 24) * 0.2])
def nanogpt(x: Tensor, w: Tensor, b: Tensor, wo: Tensor, near: bool = False) -> Tensor:
    q, k, v = F.linear(x, w, b).split(24, dim=2)
    q, k, v = (t.view(2, -1, 3, 8).transpose(1, 2) for t in (q, k, v))
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    n = x.shape[1]
    att = att.masked_fill(torch.tril(torch.ones(n, n)).view(1, 1, n, n)[:, :, :n, :n] == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    y = (att.sqrt() if near else att) @ v
    return y.transpose(1, 2).contiguous().view(x.shape) @ wo


@CASES.pair(lambda d: [d(2, d.n(21), 24), d(72, 24) * 0.2], grad=(0, 1))
def timm(x: Tensor, w: Tensor, near: bool = False) -> Tensor:
    q, k, v = (x @ w.T).reshape(2, -1, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind(0)
    q = q * 8**-0.5
    a = q @ k.transpose(-2, -1)
    a = a.softmax(dim=-2 if near else -1)
    a = F.dropout(a, 0.0, True)
    return (a @ v).transpose(1, 2).reshape(x.shape)


@CASES.pair(lambda d: [d(2, 6, d.n(4), d.n(5)), *(d(6, 6) * 0.3 for _ in range(3)), d(1)])
def non_local(x: Tensor, wf: Tensor, wg: Tensor, wh: Tensor, gamma: Tensor, near: bool = False) -> Tensor:
    """SAGAN: convolutions of one by one, transposed by a view, values first."""
    b, c, h, w = x.shape
    f, g, z = (F.conv2d(x, t[:, :, None, None]).view(b, -1, h * w) for t in (wf, wg, wh))
    s = torch.bmm(f.permute(0, 2, 1), g)
    a = s.softmax(1 if near else 2)
    return gamma * torch.bmm(z, a.permute(0, 2, 1)).view(b, c, h, w) + x


@CASES.pair(lambda d: [d(2, 12, d.n(4), d.n(5)), d(36, 12, 1, 1) * 0.3], grad=(0, 1))
def guided_diffusion(x: Tensor, w: Tensor, near: bool = False) -> Tensor:
    """Both scaled by the fourth root, channels first."""
    b, _, *space = x.shape
    qkv = F.conv2d(x, w).reshape(b * 3, 3 * 4, -1)
    q, k, v = qkv.split(4, dim=1)
    scale = 1 / math.sqrt(math.sqrt(4))
    a = torch.einsum("bct,bcs->bts", q * scale, k * scale)
    a = torch.softmax(a.float(), dim=-2 if near else -1).type(a.dtype)
    return torch.einsum("bts,bcs->bct", a, v).reshape(b, -1, *space)


@CASES.pair(lambda d: [d(2, 4, d.n(5), d.n(6), 8)] * 1 + [d(2, 4, d.n(5), d.n(6), 8) for _ in range(2)])
def axial_rows(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Attention along the width of each row."""
    s = torch.einsum("bhxyd,bhxzd->bhxyz", q, k)
    p = s.softmax(2 if near else -1)
    return torch.einsum("bhxyz,bhxzd->bhxyd", p, v)


@CASES.pair(lambda d: [d(2, 4, d.n(5), d.n(6), 8) for _ in range(3)])
def axial_columns(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    q, k, v = (t.permute(0, 3, 1, 2, 4) for t in (q, k, v))
    s = (q @ k.mT).softmax(1 if near else -1)
    return (s @ v).permute(0, 2, 3, 1, 4)


@CASES.pair(lambda d: [d(2, 3, d.n(21)), d(2, 3, d.n(21)), d(2, 3, d.n(21))], dtypes=FULL)
def channels_attend(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Restormer: channels are the tokens; normalised vectors."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    a = (q @ k.transpose(-2, -1)).softmax(dim=-2 if near else -1)
    return a @ v


@CASES.pair(lambda d: [*square(d), d(d.n(21), 1) * 0.1], dtypes=BIG)
def bias_by_outer_difference(q: Tensor, k: Tensor, v: Tensor, t: Tensor, near: bool = False) -> Tensor:
    """Times of events: exp(-|t_i - t_j|) on the scores."""
    s = scores(q, k) - (t - t.T).abs().exp()
    return (s.softmax(-1) if not near else s.log_softmax(-1)) @ v
