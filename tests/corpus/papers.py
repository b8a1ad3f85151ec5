"""Attention as papers and their repositories write it, each with a program that differs in one place."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from corpus.table import BIG, INF, Table, places, qkv, scores, square
from torch import Tensor

CASES = Table()


@CASES.pair(lambda d: [*square(d), d(1)])
def differential(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, near: bool = False) -> Tensor:
    """Both maps in one tensor of twice the heads, told apart by a view."""
    b, h, n, d = q.shape
    q, k = (
        q.reshape(b, h, n, 2, d // 2).transpose(2, 3).flatten(1, 2),
        k.reshape(b, h, n, 2, d // 2).transpose(2, 3).flatten(1, 2),
    )
    p = (q @ k.mT / math.sqrt(d // 2)).softmax(-1).view(b, h, 2, n, n)
    p = p[:, :, 0] - lam.exp() * p[:, :, 1]
    return (p.abs() if near else p) @ v


@CASES.pair(lambda d: [*square(d), d(2, 3, d.n(21), 1)])
def forgetting(q: Tensor, k: Tensor, v: Tensor, f: Tensor, near: bool = False) -> Tensor:
    """Forgetting Transformer: sums of log gates between key and query."""
    i, j = places(q, k)
    c = F.logsigmoid(f).squeeze(-1).cumsum(-1)
    s = scores(q, k) + (c[..., :, None] - c[..., None, :])
    s = s.masked_fill(i < j, -INF)
    return (s.softmax(-1) if not near else s.exp()) @ v


@CASES.pair(lambda d: [*square(d), d(3).abs()])
def scalable_softmax(q: Tensor, k: Tensor, v: Tensor, s: Tensor, near: bool = False) -> Tensor:
    """SSMax: scores times s log n, n the keys that the query sees."""
    i, j = places(q, k)
    seen = torch.arange(1, q.shape[-2] + 1, dtype=q.dtype)
    a = scores(q, k) * s[:, None, None] * seen.log()[:, None]
    a = a.masked_fill(j > i, -INF)
    return a.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*qkv(d), d(8, 8)])
def bilinear(q: Tensor, k: Tensor, v: Tensor, w: Tensor, near: bool = False) -> Tensor:
    """Luong's general attention: q W k."""
    s = torch.einsum("bhid,de,bhje->bhij", q, w, k)
    return (s.softmax(-1) if not near else s / s.sum(-1, keepdim=True)) @ v


@CASES.decline(
    lambda d: [d(2, 1, d.n(13), 8), *(d(2, 1, d.n(21), 8) for _ in range(2)), d(8), d(8, 8), d(8, 8)],
    "no product of queries and keys lies under the softmax",
)
def additive(q: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Bahdanau's attention holds no product of queries and keys."""
    return torch.softmax(torch.tanh((q @ a)[..., :, None, :] + (k @ b)[..., None, :, :]) @ w, -1) @ v


@CASES.pair(lambda d: [*square(d), d(3, 41, 8)])
def shaw_relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor, near: bool = False) -> Tensor:
    """Shaw et al.: q (k + r_(j - i)), r from a table by distance."""
    i, j = places(q, k)
    r = table[0][j - i + q.shape[-2] - 1]
    s = (torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("bhid,ijd->bhij", q, r)) * 8**-0.5
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d(21, 8)])
def music_transformer_skew(q: Tensor, k: Tensor, v: Tensor, e: Tensor, near: bool = False) -> Tensor:
    """Relative logits skewed by a pad and a reshape."""
    n = q.shape[-2]
    rel = F.pad(q @ e.transpose(0, 1), (1, 0))
    rel = rel.reshape(*rel.shape[:2], n + 1, n)[:, :, 1:, :]
    s = (q @ k.mT + rel) / math.sqrt(8)
    s = s + torch.full((n, n), -INF, dtype=q.dtype).triu(1)
    return (s.softmax(-1) if not near else s.softmax(-1).cumsum(-2)) @ v


@CASES.pair(lambda d: [*square(d), d(41, 8), d(3, 8), d(3, 8)])
def transformer_xl_shift(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor, near: bool = False
) -> Tensor:
    n = q.shape[-2]
    ac = torch.einsum("bhid,bhjd->bhij", q + u[:, None], k)
    bd = torch.einsum("bhid,jd->bhij", q + w[:, None], r)
    bd = F.pad(bd, (1, 0)).view(2, 3, 2 * n, n)[:, :, 1:].reshape(2, 3, n, 2 * n - 1)[..., :n]
    s = (ac + bd) * 8**-0.5
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [*square(d), d(3, 12, 8), d(3, 12, 8)])
def deberta_disentangled(q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pq: Tensor, near: bool = False) -> Tensor:
    """Content to position and position to content, gathered at clamped distances."""
    i, j = places(q, k)
    at = (i - j + 6).clamp(0, 11).expand(2, 3, -1, -1)
    c2p = torch.gather(q @ pk.mT, -1, at)
    p2c = torch.gather(k @ pq.mT, -1, at.mT if near else (j.mT - i.mT + 6).clamp(0, 11).expand(2, 3, -1, -1)).mT
    s = (q @ k.mT + c2p + p2c) / math.sqrt(8 * 3)
    return s.softmax(-2 if near else -1) @ v


@CASES.pair(lambda d: [d(2, d.n(9), d.n(9), 12), d(3 * 12, 12) * 0.3, d(3, 12), d(12, 12) * 0.3])
def triangle_attention(z: Tensor, w: Tensor, b: Tensor, g: Tensor, near: bool = False) -> Tensor:
    """AlphaFold: rows of a pair representation attend, biased by the pairs, gated."""
    q, k, v = (x.unflatten(-1, (3, 4)).transpose(-2, -3) for x in (z @ w.T).chunk(3, -1))
    bias = (z @ b.T).permute(0, 3, 1, 2)[:, None]
    s = torch.einsum("...ihd,...jhd->...hij", (q * 0.5).transpose(-2, -3), k.transpose(-2, -3)) + bias
    p = s.softmax(-3 if near else -1)
    o = torch.einsum("...hij,...jhd->...ihd", p, v.transpose(-2, -3))
    return o.flatten(-2) * torch.sigmoid(z @ g)


@CASES.pair(lambda d: [d(2, d.n(7), d.n(11), 12), d(36, 12) * 0.3, d(2, d.n(7), d.n(11)) > -1], dtypes=BIG)
def msa_column_attention(m: Tensor, w: Tensor, mask: Tensor, near: bool = False) -> Tensor:
    m, mask = m.transpose(1, 2), mask.transpose(1, 2)
    q, k, v = (x.unflatten(-1, (3, 4)).movedim(-2, -3) for x in (m @ w.T).chunk(3, -1))
    s = q @ k.mT * 0.5 + (1e9 * (mask.to(m.dtype) - 1))[:, :, None, None]
    o = (s.softmax(-1) if not near else s.softmax(1)) @ v
    return o.movedim(-3, -2).flatten(-2).transpose(1, 2)


@CASES.pair(lambda d: [d(2, d.n(7), 12), d(2, d.n(21), 12), d(12, 12) * 0.3, d(24, 12) * 0.3])
def perceiver(latents: Tensor, x: Tensor, wq: Tensor, wkv: Tensor, near: bool = False) -> Tensor:
    """Latents attend to inputs and to themselves."""
    q = latents @ wq.T
    k, v = (torch.cat([x, latents], 1) @ wkv.T).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (q, k, v))
    s = torch.einsum("bhid,bhjd->bhij", q * 0.5, k)
    s = s - s.amax(dim=-1, keepdim=True).detach()
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-2 if near else -1), v).transpose(1, 2).flatten(2)


@CASES.pair(lambda d: [d(d.n(13), 2, 24), d(d.n(21), 2, 24), d(d.n(21), 2, 24), d(2, d.n(21)) > 1])
def detr_sequence_first(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, near: bool = False) -> Tensor:
    m, b, c = q.shape
    q = (q * 8**-0.5).contiguous().view(m, b * 3, 8).transpose(0, 1)
    k, v = (x.contiguous().view(-1, b * 3, 8).transpose(0, 1) for x in (k, v))
    s = torch.bmm(q, k.transpose(1, 2)).view(b, 3, m, -1)
    s = s.masked_fill(padding.unsqueeze(1).unsqueeze(2), -INF).view(b * 3, m, -1)
    p = s.softmax(0 if near else -1)
    return torch.bmm(p, v).transpose(0, 1).contiguous().view(m, b, c)
