"""More attention as papers and models write it, each with a program that differs in one place."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import FULL, INF, Table, places, scores, square
from torch import Tensor

CASES = Table()


def sequence(d: Any, *more: int, n: int = 21, c: int = 24) -> list[Tensor]:
    """x [2, n, c] and a projection [c, c] for each further number, of so many times c rows."""
    return [d(2, d.n(n), c), *(d(times * c, c) * c**-0.5 for times in more)]


@CASES.pair(lambda d: [*square(d), d(d.n(21), 4), d(d.n(21), 4)])
def rotary_by_complex_numbers(q: Tensor, k: Tensor, v: Tensor, x: Tensor, y: Tensor, near: bool = False) -> Tensor:
    """Llama: pairs of channels as complex numbers, turned by their place."""
    angle = torch.outer(torch.arange(q.shape[-2]).float(), 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2)) * turn).flatten(3).type_as(t)
        for t in (q, k)
    )
    return scores(q, k).softmax(-2 if near else -1) @ v


@CASES.pair(square)
def rotary_by_halves(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """GPT-NeoX: half of the channels turned."""
    at = torch.arange(q.shape[-2])[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    cos, sin = at.cos().to(q.dtype), at.sin().to(q.dtype)

    def turned(x: Tensor) -> Tensor:
        a, rest = x[..., :4], x[..., 4:]
        return torch.cat([a * cos + torch.cat([-a[..., 2:], a[..., :2]], -1) * sin, rest], -1)

    s = torch.matmul(turned(q), turned(k).transpose(2, 3)) / math.sqrt(8)
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -INF)
    return (s.softmax(-1) if not near else s.softmax(-1) ** 2) @ v


@CASES.pair(square)
def rotary_interleaved(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """GPT-J: every two neighbours."""
    at = torch.einsum("i,j->ij", torch.arange(q.shape[-2]).float(), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    sin, cos = (f(at).repeat_interleave(2, 1).to(q.dtype) for f in (torch.sin, torch.cos))

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    q, k = turned(q), turned(k)
    s = (
        torch.where(
            torch.tril(torch.ones(q.shape[-2], k.shape[-2])).bool(), q @ k.mT, torch.tensor(-1e4, dtype=q.dtype)
        )
        / 8**0.5
    )
    return (s.softmax(-1) if not near else s.softmax(-2)) @ v


@CASES.pair(lambda d: [*square(d), d(3, 1, 1), d(8), d(8)])
def query_and_key_norms(q: Tensor, k: Tensor, v: Tensor, t: Tensor, g: Tensor, h: Tensor, near: bool = False) -> Tensor:
    """QK-norm by RMS, with learned gains and a temperature."""
    q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * g
    k = F.rms_norm(k, (8,), h)
    s = (q @ k.mT) * t.exp().clamp(max=100.0)
    return (s.softmax(-1) if not near else F.normalize(s, dim=-1)) @ v


@CASES.pair(lambda d: [*square(d), d(3, 1, 1).abs() + 1])
def cosine_with_temperature(q: Tensor, k: Tensor, v: Tensor, t: Tensor, near: bool = False) -> Tensor:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * t
    p = s.softmax(dim=-1)
    return torch.einsum("bhij,bhjd->bhid", p if not near else p.sqrt(), v)


@CASES.pair(lambda d: square(d), twin="decline")
def gemma_capped(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    s = torch.matmul(q, k.transpose(2, 3)) * 0.25
    s = s / 50.0
    s = torch.tanh(s)
    s = s * 50.0
    s = s + torch.triu(torch.full((q.shape[-2], q.shape[-2]), torch.finfo(q.dtype).min, dtype=q.dtype), 1)
    s = F.softmax(s, dim=-2 if near else -1, dtype=torch.float32).to(q.dtype)
    return F.dropout(s, p=0.1, training=False) @ v


@CASES.pair(lambda d: [*square(d, heads=4, kv=2), d(4)])
def gpt_oss_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, near: bool = False) -> Tensor:
    """The reference's own spelling: grouped queries, sinks as a last column."""
    n = q.shape[-2]
    q = q.transpose(1, 2).reshape(2, n, 2, 2, 8)
    k, v = (x.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, 2, -1) for x in (k, v))
    s = torch.einsum("bqhmd,bkhmd->bhmqk", q, k) * 8**-0.5
    s = s + torch.triu(s.new_full((n, n), -INF), 1)
    s = s + torch.tril(s.new_full((n, n), -INF), -7)
    s = torch.cat([s, sinks.reshape(1, 2, 2, 1, 1).expand(2, -1, -1, n, -1)], -1)
    p = s.softmax(-1)
    p = p[..., 1:] if near else p[..., :-1]
    return torch.einsum("bhmqk,bkhmd->bqhmd", p, v).reshape(2, n, -1)


@CASES.pair(lambda d: [*sequence(d, 1), d(16, 24) * 0.2, d(3 * 8, 12) * 0.3, d(3 * 8, 12) * 0.3, d(4, 24) * 0.2])
def multi_head_latent(
    x: Tensor, wq: Tensor, down: Tensor, uk: Tensor, uv: Tensor, wr: Tensor, near: bool = False
) -> Tensor:
    """DeepSeek's latents, absorbed: queries meet the latents, and values are the latents, projected after."""
    c = x @ down.T
    latent, rope = c.split([12, 4], -1)
    q = (x @ wq.T).unflatten(-1, (3, 8)).transpose(1, 2)
    qr = (x @ wr.T)[:, None]
    absorbed = torch.einsum("bhid,hdc->bhic", q, uk.view(3, 8, 12))
    s = (
        torch.einsum("bhic,bjc->bhij", absorbed, latent)
        + torch.einsum("bhir,bjr->bhij", qr.expand(-1, 3, -1, -1), rope)
    ) * 12**-0.5
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -INF)
    p = s.softmax(1 if near else -1)
    o = torch.einsum("bhij,bjc->bhic", p, latent)
    return torch.einsum("bhic,hdc->bihd", o, uv.view(3, 8, 12)).flatten(2)


@CASES.pair(lambda d: [*square(d), d(3, 3)], twin="decline")
def heads_mixed_behind(q: Tensor, k: Tensor, v: Tensor, w: Tensor, near: bool = False) -> Tensor:
    """Outputs of heads mixed is attention; weights of heads mixed (talking heads) is another function."""
    p = scores(q, k).softmax(-1)
    if near:
        return torch.einsum("hg,bgij->bhij", w, p) @ v
    return torch.einsum("hg,bgid->bhid", w, p @ v)


@CASES.pair(lambda d: [*square(d), d(2, 3, d.n(21), 8)])
def gated_after_the_values(q: Tensor, k: Tensor, v: Tensor, g: Tensor, near: bool = False) -> Tensor:
    """Gated attention: a sigmoid on the output, or (another function) on the weights' own keys after a relu."""
    p = scores(q, k).softmax(-1)
    return F.relu(p - 0.05) @ v if near else torch.sigmoid(g) * (p @ v)


@CASES.pair(lambda d: [*square(d), d.ints(0, 1).sum()[None] + 1])
def alibi_of_mpt(q: Tensor, k: Tensor, v: Tensor, _: Tensor, near: bool = False) -> Tensor:
    """Slopes from powers of two, the bias over keys alone; rows differ by a constant that softmax does not see."""
    n, h = k.shape[-2], q.shape[1]
    bias = torch.arange(1 - n, 1, dtype=torch.int32).view(1, 1, 1, n)
    m = torch.arange(1, 5, dtype=torch.float32) * (8 / 4)
    slopes = torch.pow(2, -m).view(1, 4, 1, 1)[:, :h]
    s = scores(q, k) + (bias * slopes).to(q.dtype)
    s = s.masked_fill(torch.ones(n, n).tril().logical_not(), torch.finfo(q.dtype).min)
    return (s.softmax(-1) if not near else s.softmax(-1) * s.exp().mean(-1, keepdim=True)) @ v


@CASES.pair(lambda d: [*square(d), d(2, d.n(21)) > -1])
def alibi_of_bloom(q: Tensor, k: Tensor, v: Tensor, live: Tensor, near: bool = False) -> Tensor:
    """Slopes times running positions of live keys, baddbmm, and a mask filled with the least number."""
    b, h, n, d = q.shape
    at = ((live.cumsum(-1) - 1) * live)[:, None, :]
    alibi = (torch.tensor([0.5, 0.25, 0.125])[:, None] * at).reshape(b * h, 1, n).to(q.dtype)
    s = torch.baddbmm(alibi, q.reshape(b * h, n, d), k.reshape(b * h, n, d).mT, beta=1.0, alpha=d**-0.5).view(
        b, h, n, n
    )
    i, j = places(q, k)
    s = s.masked_fill((j > i) | ~live[:, None, None], torch.finfo(q.dtype).min)
    p = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype).view(b * h, n, n)
    return torch.bmm(p * p if near else p, v.reshape(b * h, n, d)).view(b, h, n, d)


@CASES.pair(lambda d: [*square(d), d(3, 32)])
def t5_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor, near: bool = False) -> Tensor:
    i, j = places(q, k)
    distance = j - i
    side = (distance > 0).long() * 16
    far = distance.abs()
    large = 8 + (torch.log(far.clamp(min=1).float() / 8) / math.log(128 / 8) * 8).long()
    at = side + torch.where(far < 8, far, large.clamp(max=15))
    s = q @ k.mT + F.embedding(at, table.T).permute(2, 0, 1)
    return (s.float().softmax(-1).type_as(s) if not near else s.float().softmax(-2).type_as(s)) @ v


@CASES.pair(lambda d: [*square(d), d(2, 3, d.n(21)).sigmoid()], dtypes=FULL)
def stick_breaking(q: Tensor, k: Tensor, v: Tensor, g: Tensor, near: bool = False) -> Tensor:
    """Weights broken off a stick mix keys, and are no softmax: only the plain attention beside them is one."""
    s = scores(q, k)
    if near:
        beta = torch.sigmoid(s)
        return (beta * torch.cumprod(1 - beta, -1)) @ v
    return (s + g[..., None, :].log()).softmax(-1) @ v


@CASES.pair(lambda d: [*square(d), d(1)])
def retention(q: Tensor, k: Tensor, v: Tensor, _: Tensor, near: bool = False) -> Tensor:
    """Decay on logits of a softmax; without the softmax it is retention."""
    i, j = places(q, k)
    decay = torch.where(i >= j, 0.9 ** (i - j).clamp(min=0).float(), 0.0).to(q.dtype)
    if near:
        return ((q @ k.mT) * decay) @ v
    return (scores(q, k) + torch.log(decay)).softmax(-1) @ v


@CASES.pair(square, dtypes=FULL)
def selective(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Top-k of weights reads a whole row; a bound that does not is attention."""
    s = scores(q, k)
    if near:
        least = s.topk(4, -1).values[..., -1:]
        return s.masked_fill(s < least, -INF).softmax(-1) @ v
    return s.masked_fill(s < -0.5, -1e4).softmax(-1) @ v


@CASES.pair(square)
def linear_attention(q: Tensor, k: Tensor, v: Tensor, near: bool = False) -> Tensor:
    """Features of queries and keys: a product of exponentials of sums is a softmax only when the sum is inside."""
    if near:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        p = q @ k.mT
        return (p @ v) / p.sum(-1, keepdim=True)
    p = (q @ k.mT * 0.3).exp()
    return (p @ v) / p.sum(-1, keepdim=True)
