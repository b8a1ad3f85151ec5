"""Attention as model families write it: language models, vision, images, proteins."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from corpus.table import BIG, FULL, INF, Table, places, scores, square
from torch import Tensor

CASES = Table()
LEARNING = (0, 1, 2, 3)


def least(q: Tensor) -> float:
    return torch.finfo(q.dtype).min


# ----------------------------------------------------------------------------------------------------------------
# Language models


def packed(d: Any) -> list[Tensor]:
    """x [2, N, 24] and the weights of its projection."""
    return [d(2, d.n(21), 24), d(72, 24) * 0.2, d(72) * 0.1]


@CASES.fuse(packed)
def min_gpt(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    size, t, c = x.shape
    k, q, v = (y.view(size, t, 3, c // 3).transpose(1, 2) for y in F.linear(x, w, b).split(c, dim=2))
    buffer = torch.tril(torch.ones(64, 64, device=x.device)).view(1, 1, 64, 64)
    s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    p = F.softmax(s.masked_fill(buffer[:, :, :t, :t] == 0, -INF), dim=-1)
    return (p @ v).transpose(1, 2).contiguous().view(size, t, c)


@CASES.fuse(lambda d: [d(d.n(21), 2, 24), d(72, 24) * 0.2], grad=(0, 1))
def fairseq(x: Tensor, w: Tensor) -> Tensor:
    t, size, c = x.shape
    q, k, v = F.linear(x, w).chunk(3, -1)
    q, k, v = (y.contiguous().view(t, size * 3, 8).transpose(0, 1) for y in (q * 8**-0.5, k, v))
    s = torch.bmm(q, k.transpose(1, 2)) + torch.triu(torch.full((t, t), -INF, device=x.device, dtype=x.dtype), 1)
    p = F.softmax(s.float(), dim=-1).type_as(s)
    return torch.bmm(p, v).transpose(0, 1).contiguous().view(t, size, c)


@CASES.fuse(packed)
def whisper(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q, k, v = (y.view(*y.shape[:2], 3, -1).permute(0, 2, 1, 3) for y in F.linear(x, w, b).chunk(3, -1))
    mask = torch.empty(64, 64, device=x.device).fill_(-INF).triu_(1)
    s = ((q * 8**-0.25) @ (k * 8**-0.25).transpose(-1, -2) + mask[: x.shape[1], : x.shape[1]]).float()
    return (F.softmax(s, dim=-1).to(q.dtype) @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


@CASES.fuse(lambda d: [*square(d), torch.ones(2, d.n(21), dtype=torch.long).to(d.device)])
def static_cache_mask(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """transformers 4.4x, _update_causal_mask"""
    n, at = q.shape[2], torch.arange(q.shape[2], device=q.device)
    mask = torch.triu(torch.full((n, n), fill_value=least(q), dtype=q.dtype, device=q.device), diagonal=1)
    mask *= torch.arange(n, device=q.device) > at.reshape(-1, 1)
    mask = mask[None, None].expand(2, 1, -1, -1).clone()
    hidden = (mask[:, :, :, :n] + padding[:, None, None, :]) == 0
    mask[:, :, :, :n] = mask[:, :, :, :n].masked_fill(hidden, least(q))
    return F.softmax(scores(q, k) + mask, -1) @ v


@CASES.fuse(lambda d: [*square(d), d(2, d.n(21)) > -1])
def bloom(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    b, h, n, d = q.shape
    slopes = torch.pow(torch.tensor(2**-2.0, device=q.device), torch.arange(1, h + 1, device=q.device))
    at = ((seen.cumsum(-1) - 1) * seen)[:, None, :]
    alibi = (slopes[..., None] * at).reshape(b * h, 1, n).to(q.dtype)
    q, k, v = (x.reshape(b * h, n, d) for x in (q, k, v))
    s = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=d**-0.5).view(b, h, n, n)
    i, j = places(q, k)
    s = s.masked_fill((j > i) | ~seen[:, None, None, :], least(q))
    return torch.bmm(F.softmax(s, -1, dtype=torch.float32).to(q.dtype).view(b * h, n, n), v).view(b, h, n, d)


@CASES.fuse(square)
def mpt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = k.shape[2]
    ages = torch.arange(1 - n, 1, dtype=torch.int32, device=q.device).view(1, 1, 1, n)
    slopes = 1.0 / torch.pow(2, torch.arange(1, 5, dtype=torch.float32, device=q.device) * (8 / 4))
    s = scores(q, k) + (ages * slopes.view(1, 4, 1, 1)[:, :3]).to(q.dtype)
    i, j = places(q, k)
    return F.softmax(s.masked_fill(j > i, least(q)), -1) @ v


@CASES.fuse(lambda d: [*square(d), d(3)], grad=LEARNING)
def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    i, j = places(q, k)
    s = scores(q, k).masked_fill((j > i) | (j <= i - 7), -INF)
    s = torch.cat([s, sinks.reshape(1, -1, 1, 1).expand(*s.shape[:3], -1)], -1)
    return F.softmax(s - s.max(dim=-1, keepdim=True).values, dim=-1, dtype=s.dtype)[..., :-1] @ v


@CASES.fuse(square)
def sinks_and_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """StreamingLLM"""
    i, j = places(q, k)
    keep = (j <= i) & ((i - j < 6) | (j < 2))
    return torch.where(keep, scores(q, k), -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, d.n(13), 3, 16), d(2, d.n(13), 3, 4), d(2, d.n(21), 16), d(2, d.n(21), 4), d(3, 24, 16)],
            grad=(0, 1, 2, 3, 4))  # fmt: skip
def deepseek(nope: Tensor, rope: Tensor, latent: Tensor, keys: Tensor, w: Tensor) -> Tensor:
    q = torch.einsum("bshd,hdc->bshc", nope, w[:, :16])
    s = (torch.einsum("bshc,btc->bsht", q, latent) + torch.einsum("bshr,btr->bsht", rope, keys)) * 20**-0.5
    late = 1 + latent.shape[1] - q.shape[1]
    s = s + torch.full((q.shape[1], latent.shape[1]), -INF, device=q.device).triu_(late).unsqueeze(1)
    p = s.softmax(dim=-1, dtype=torch.float32).type_as(nope)
    return torch.einsum("bshc,hdc->bshd", torch.einsum("bsht,btc->bshc", p, latent), w[:, -8:])


@CASES.fuse(lambda d: [*square(d), d(2, 3, d.n(21))], grad=LEARNING)
def forgetting(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    kept = F.logsigmoid(gates).cumsum(-1)
    i, j = places(q, k)
    s = scores(q, k) + kept[..., :, None] - kept[..., None, :]
    return s.masked_fill(j > i, -INF).softmax(-1) @ v


@CASES.fuse(lambda d: [*square(d), d(2, 3, d.n(21), 8)], count=2)
def differential(q: Tensor, k: Tensor, v: Tensor, other: Tensor) -> Tensor:
    n = q.shape[2]
    blank = torch.zeros(n, n, device=q.device).fill_(-INF).triu(1)
    s = torch.nan_to_num(torch.cat([scores(q, k), scores(other, k)], 1)) + blank
    p = F.softmax(s, -1, dtype=torch.float32).type_as(q).view(2, 2, 3, n, n)
    return (p[:, 0] - 0.3 * p[:, 1]) @ v


@CASES.fuse(lambda d: [d(2, 3, 24, 8) for _ in range(3)])
def local_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """local-attention: each window looks at itself and the one before."""
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, n // 6, 6, d) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0), value=-1.0)[:, :-1], x], 2) for x in (k, v))
    at = torch.arange(n, device=q.device).reshape(1, n // 6, 6)
    of = torch.cat([F.pad(at, (0, 0, 1, 0), value=-1)[:, :-1], at], 2)
    s = torch.einsum("bwid,bwjd->bwij", q, k) * d**-0.5
    s = s.masked_fill((at[..., :, None] < of[..., None, :]) | (of[..., None, :] == -1), -torch.finfo(s.dtype).max)
    return torch.einsum("bwij,bwjd->bwid", s.softmax(-1), v).reshape(b, h, n, d)


# ----------------------------------------------------------------------------------------------------------------
# Vision


@CASES.fuse(lambda d: [d(8, 3, 9, 8), d(8, 3, 9, 8), d(8, 3, 9, 8), d(25, 3)], grad=LEARNING)
def swin(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Windows of 3 x 3, four of them in an image."""
    at = torch.stack(torch.meshgrid(*2 * [torch.arange(3, device=q.device)], indexing="ij")).flatten(1)
    distance = (at[:, :, None] - at[:, None, :] + 2).permute(1, 2, 0)
    index = distance[..., 0] * 5 + distance[..., 1]
    s = (q * 8**-0.5) @ k.transpose(-2, -1) + table[index.view(-1)].view(9, 9, -1).permute(2, 0, 1).contiguous()
    image = torch.zeros(1, 6, 6, 1, device=q.device)
    parts = (slice(0, -3), slice(-3, -1), slice(-1, None))
    for n, (rows, columns) in enumerate((r, c) for r in parts for c in parts):
        image[:, rows, columns, :] = n
    windows = image.view(1, 2, 3, 2, 3, 1).permute(0, 1, 3, 2, 4, 5).reshape(4, 9)
    apart = windows.unsqueeze(1) - windows.unsqueeze(2)
    mask = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
    s = s.view(2, 4, 3, 9, 9) + mask.unsqueeze(1).unsqueeze(0).to(s.dtype)
    return (s.view(-1, 3, 9, 9).softmax(-1) @ v).transpose(1, 2).reshape(8, 9, 24)


@CASES.fuse(lambda d: [d(2, 3, 17, 8), d(2, 3, 17, 8), d(2, 3, 17, 8), d(52, 3)], grad=LEARNING)
def beit(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A class token beside 4 x 4 patches."""
    at = torch.stack(torch.meshgrid(*2 * [torch.arange(4, device=q.device)], indexing="ij")).flatten(1)
    distance = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + 3
    index = torch.zeros(17, 17, dtype=torch.long, device=q.device)
    index[1:, 1:] = distance[..., 0] * 7 + distance[..., 1]
    index[0, 0:], index[0:, 0], index[0, 0] = 49, 50, 51
    bias = F.embedding(index, table).permute(2, 0, 1)
    return ((q * 8**-0.5) @ k.mT + bias[None]).softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, 3, 16, 8), d(2, 3, 16, 8), d(2, 3, 16, 8), d(7, 8), d(7, 8)], grad=(0, 1, 2, 3, 4))
def segment_anything(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    b, h, n, d = q.shape
    apart = torch.arange(4, device=q.device)[:, None] - torch.arange(4, device=q.device) + 3
    grid = q.reshape(b * h, 4, 4, d)
    down, along = (torch.einsum(f"bhwc,{a}kc->bhwk", grid, t[apart]) for a, t in (("h", rows), ("w", columns)))
    s = ((q * d**-0.5) @ k.transpose(-2, -1)).view(b * h, 4, 4, 4, 4)
    s = (s + down[:, :, :, :, None] + along[:, :, :, None, :]).view(b, h, n, n)
    return s.softmax(-1) @ v


@CASES.fuse(lambda d: [d(2, 24, 4, d.n(5)), d(72, 24, 1, 1) * 0.2], grad=(0, 1))
def image_diffusion(x: Tensor, w: Tensor) -> Tensor:
    b, c, rows, columns = x.shape
    q, k, v = (y.reshape(b, 3, c // 3, rows * columns) for y in F.conv2d(x, w).chunk(3, dim=1))
    p = torch.einsum("bhdi,bhdj->bhij", q * (c // 3) ** -0.5, k).softmax(dim=-1)
    return torch.einsum("bhij,bhdj->bhid", p, v).permute(0, 1, 3, 2).reshape(b, c, rows, columns)


@CASES.fuse(lambda d: [*(d(2, 24, d.n(20)) for _ in range(3)), d(2, 24, 5), d(2, 24, 5)], grad=(0, 1, 2, 3, 4))
def guided_diffusion(q: Tensor, k: Tensor, v: Tensor, text_k: Tensor, text_v: Tensor) -> Tensor:
    b = len(q)
    q, k, v, text_k, text_v = (x.reshape(b * 3, 8, -1) for x in (q, k, v, text_k, text_v))
    k, v = torch.cat([text_k, k], -1), torch.cat([text_v, v], -1)
    p = torch.softmax(torch.einsum("bct,bcs->bts", q * 8**-0.25, k * 8**-0.25).float(), -1).type(q.dtype)
    return torch.einsum("bts,bcs->bct", p, v).reshape(b, 24, -1)


@CASES.fuse(lambda d: [d(2, d.n(13), 24), d(2, d.n(21), 16), d(24, 24) * 0.2, d(48, 16) * 0.2, d(2, d.n(21)) > -0.5],
            grad=LEARNING)  # fmt: skip
def perceiver(x: Tensor, context: Tensor, wq: Tensor, wkv: Tensor, seen: Tensor) -> Tensor:
    q, k, v = (
        y.unflatten(-1, (3, -1)).transpose(1, 2).flatten(0, 1) for y in (x @ wq.T, *(context @ wkv.T).chunk(2, dim=-1))
    )
    s = torch.einsum("bid,bjd->bij", q, k) * 8**-0.5
    seen = seen[:, None].expand(-1, 3, -1).reshape(-1, 1, seen.shape[-1])
    s.masked_fill_(~seen, -torch.finfo(s.dtype).max)
    return torch.einsum("bij,bjd->bid", s.softmax(dim=-1), v).reshape(2, 3, -1, 8).transpose(1, 2).flatten(2)


@CASES.fuse(lambda d: [*(d(2, 5, 3, d.n(13), 8) for _ in range(3)), d(2, 5, d.n(13)) > -1, d(2, 3, d.n(13), d.n(13))],
            grad=(0, 1, 2, 4), dtypes=FULL)  # fmt: skip
def evoformer(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, pair: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2) + ((seen.to(q.dtype) - 1) * 1e9)[..., None, None, :] + pair[:, None]
    return torch.matmul(s.softmax(-1), v).transpose(-2, -3)


# ----------------------------------------------------------------------------------------------------------------
# Near misses


@CASES.decline(square, dtypes=BIG)
def normalised_over_the_slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slot attention: the softmax runs over the queries."""
    p = scores(q, k).softmax(dim=-2) + 1e-8
    return (p / p.sum(dim=-1, keepdim=True)) @ v


@CASES.decline(lambda d: [*square(d), d(3, 3)], "mixes scores of different heads", dtypes=BIG)
def talking_heads(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """CaiT"""
    s = torch.einsum("bhij,hg->bgij", scores(q, k), w)
    return s.softmax(-1) @ v
