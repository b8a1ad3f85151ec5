"""Decode as inference engines write it: pools of engines, rings and windows, encoders and beams, sparse pages.

Words and sizes as in `paged`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from corpus.paged import HKV, PAGE, POOL, B, D, Draw, H, paged
from corpus.paged_masked import drafts, fetched
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """q [B, M, H, D], k and v [B, N, Hkv, D], keep [B, M, N] or broadcast to it."""
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.unflatten(2, (-1, q.shape[2] // k.shape[2])), k) * q.shape[-1] ** -0.5
    s = s.masked_fill(~keep[:, None, None], -INF)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1), v).flatten(2, 3)


def before(lengths: Tensor, n: int) -> Tensor:
    """[B, 1, N]"""
    return (torch.arange(n, device=lengths.device) < lengths[:, None])[:, None]


# ----------------------------------------------------------------------------------------------------------------
# Pools of engines


def block_offsets(d: Draw) -> tuple[Tensor, ...]:
    """TensorRT-LLM: one pool of blocks [2 P, Hkv, page, D], offsets [B, 2, pages] of keys and of values."""
    q, *_, table, lengths = paged(d)
    return q, d(2 * d.n(POOL), HKV, PAGE, D), torch.stack([2 * table, 2 * table + 1], 1), lengths


@CASES.fuse(block_offsets, note="TensorRT-LLM: keys and values have numbers of their own in one pool")
def offsets_of_keys_and_values(q: Tensor, pool: Tensor, offsets: Tensor, lengths: Tensor) -> Tensor:
    k, v = (pool[offsets[:, i].long()].transpose(2, 3).flatten(1, 2) for i in (0, 1))
    return attend(q, k, v, before(lengths, k.shape[1]))


@CASES.fuse(block_offsets)
def offsets_fetched_at_once(q: Tensor, pool: Tensor, offsets: Tensor, lengths: Tensor) -> Tensor:
    k, v = pool[offsets].permute(1, 0, 3, 2, 4, 5).reshape(2, len(q), HKV, -1, D).unbind(0)
    keep = before(lengths, k.shape[2])[:, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=keep, enable_gqa=True).transpose(1, 2)


@CASES.fuse(lambda d: (d(B, 1, H, D), d(2, d.n(POOL), PAGE * HKV * D), d.table(), d.lengths()), note="vLLM's first V1")
def rows_of_flat_blocks(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k_pool, v_pool = (x.view(-1, PAGE, HKV, D) for x in cache)
    k, v = (x.index_select(0, table.reshape(-1)).view(len(table), -1, HKV, D) for x in (k_pool, v_pool))
    return attend(q, k, v, before(lengths, k.shape[1]))


@CASES.fuse(paged, note="flash-attention's reference: the mask is made of distances, the weights are filled again")
def distances_filled_twice(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table.long().flatten()].view(len(table), -1, HKV, D).repeat_interleave(G, 2) for x in (k_pool, v_pool))
    m, n = q.shape[1], k.shape[1]
    row = torch.arange(m, device=q.device, dtype=torch.long).view(-1, 1)
    column = torch.arange(n, device=q.device, dtype=torch.long)
    sk = lengths.view(-1, 1, 1, 1).long()
    hidden = (column > row + sk - m) | (column < row + sk - m - 20) | (column >= sk)
    s = torch.einsum("bthd,bshd->bhts", q / math.sqrt(D), k)
    s.masked_fill_(hidden, float("-inf"))
    p = torch.softmax(s, dim=-1).masked_fill(hidden, 0.0)
    return torch.einsum("bhts,bshd->bthd", p, v)


@CASES.fuse(lambda d: (*paged(d), d.ints([0, 0, 0, 1, 1, 1, 0, 1, 0, 1])), note="a table of each head's key head")
def heads_by_table(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, kv_head: Tensor
) -> Tensor:
    k, v = (x[table].flatten(1, 2)[:, :, kv_head].transpose(1, 2) for x in (k_pool, v_pool))
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~before(lengths, k.shape[2])[:, None], -INF)
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(drafts, note="XQA: queries and heads of a group are rows of one product")
def rows_of_group_and_query(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    b, m = q.shape[:2]
    k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in (k_pool, v_pool))
    rows = q.view(b, m, HKV, G, D).permute(0, 2, 1, 3, 4).reshape(b, HKV, m * G, D)
    position = lengths[:, None] - m + torch.arange(m * G, device=q.device) // G
    keep = torch.arange(k.shape[2], device=q.device) <= position[..., None]
    s = (rows @ k.mT * SCALE).masked_fill(~keep[:, None], -INF)
    out = s.softmax(-1) @ v
    return out.view(b, HKV, m, G, D).permute(0, 2, 1, 3, 4).reshape(b, m, H, D)


@CASES.fuse(paged, note="softmax1: a logit of 0 that no key has")
def softmax_off_by_one(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~before(lengths, k.shape[2])[:, None], -INF)
    top = s.amax(-1, keepdim=True).clamp(min=0)
    e = (s - top).exp()
    return (e / (e.sum(-1, keepdim=True) + (-top).exp()) @ v).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------------
# Rings and windows


def ring(d: Draw) -> tuple[Tensor, ...]:
    """q [B, H, 1, D], new k and v, rings [B, Hkv, 16, D], the position of each sequence's new token."""
    return d(B, H, 1, D), d(B, HKV, 1, D), d(B, HKV, 1, D), d(B, HKV, 16, D), d(B, HKV, 16, D), d.ints([29, 4, 15])


def in_ring(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None], enable_gqa=True)


@CASES.fuse(ring, note="Mistral: position modulo the window; the age of a slot tells whether it is filled")
def ring_by_age(q: Tensor, k_new: Tensor, v_new: Tensor, k_ring: Tensor, v_ring: Tensor, at: Tensor) -> Tensor:
    row, n = torch.arange(len(q), device=q.device), k_ring.shape[2]
    k_ring[row, :, at % n], v_ring[row, :, at % n] = k_new[:, :, 0], v_new[:, :, 0]
    age = (at[:, None] - torch.arange(n, device=q.device)) % n
    return in_ring(q, k_ring, v_ring, age <= at[:, None])


@CASES.fuse(ring, note="until the ring is full its end is empty")
def ring_filled_or_not(q: Tensor, k_new: Tensor, v_new: Tensor, k_ring: Tensor, v_ring: Tensor, at: Tensor) -> Tensor:
    n = k_ring.shape[2]
    slot = (at % n).long().view(-1, 1, 1, 1).expand_as(k_new)
    k_ring.scatter_(2, slot, k_new)
    v_ring.scatter_(2, slot, v_new)
    filled = torch.clamp(at + 1, max=n)
    return in_ring(q, k_ring, v_ring, torch.arange(n, device=q.device) < filled[:, None])


@CASES.fuse(ring, note="Gemma on JAX: the ring is turned so that the oldest comes first")
def ring_unrolled(q: Tensor, k_new: Tensor, v_new: Tensor, k_ring: Tensor, v_ring: Tensor, at: Tensor) -> Tensor:
    n = k_ring.shape[2]
    order = (at[:, None] + 1 + torch.arange(n, device=q.device)) % n
    k, v = (x.gather(2, order[:, None, :, None].expand(-1, HKV, -1, D)) for x in (k_ring, v_ring))
    keep = at[:, None] + 1 - n + torch.arange(n, device=q.device) >= 0
    s = torch.einsum("bhgmd,bhnd->bhgmn", q.unflatten(1, (HKV, G)), k) * SCALE
    s = s.masked_fill(~keep[:, None, None, None], torch.finfo(q.dtype).min)
    return torch.einsum("bhgmn,bhnd->bhgmd", s.softmax(-1), v).flatten(1, 2)


@CASES.fuse(lambda d: (*paged(d)[:3], d.table()[:, :3], d.lengths()), note="a ring of pages")
def ring_of_pages(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(6 * PAGE, device=q.device)
    slot = table.long()[:, (n // PAGE) % table.shape[1]] * PAGE + n % PAGE
    k, v = (x.flatten(0, 1)[slot] for x in (k_pool, v_pool))
    keep = (n < lengths[:, None]) & (n >= lengths[:, None] - 13)
    return attend(q, k, v, keep[:, None])


@CASES.fuse(drafts, note="Llama 4: attention within chunks of 16 positions")
def chunk_of_the_query(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = fetched(k_pool, v_pool, table)
    at = (lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device))[..., None]
    n = torch.arange(k.shape[2], device=q.device)
    keep = (n <= at) & (n // 16 == at // 16)
    s = (q.transpose(1, 2) @ k.mT * SCALE).masked_fill(~keep[:, None], -INF)
    return (s.softmax(-1) @ v).transpose(1, 2)


@CASES.fuse(lambda d: (*drafts(d), d(H)), note="gpt-oss: window, sinks and drafts in one")
def sinks_window_and_drafts(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor
) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    m, n = q.shape[1], k.shape[1]
    s = torch.einsum("bmhgd,bnhd->bhgmn", q.view(-1, m, HKV, G, D), k) * SCALE
    at = lengths.view(-1, 1, 1) - m + torch.arange(m, device=q.device)[:, None]
    key = torch.arange(n, device=q.device)
    hide = torch.where((key <= at) & (at - key < 10), 0.0, -INF)
    s = s + hide[:, None, None].to(s.dtype)
    s = torch.cat([s, sinks.view(1, HKV, G, 1, 1).expand(len(q), -1, -1, m, -1)], -1)
    return torch.einsum("bhgmn,bnhd->bmhgd", s.softmax(-1)[..., :-1], v).flatten(2, 3)


# ----------------------------------------------------------------------------------------------------------------
# Other sequences: encoders, beams


def encoder(d: Draw) -> tuple[Tensor, ...]:
    """Two beams of each of the B sequences, and the pages of their encoders."""
    return d(2 * B, 4, H, D), *paged(d)[1:]


@CASES.fuse(encoder, note="cross attention: beams of one request read the same pages")
def encoder_of_each_beam(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    pages, ends = table.repeat_interleave(2, 0), lengths.repeat_interleave(2)
    k, v = (x[pages].flatten(1, 2) for x in (k_pool, v_pool))
    return attend(q, k, v, before(ends, k.shape[1]))


@CASES.fuse(encoder, note="the same, beams an axis of the queries")
def beams_as_queries(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    s = torch.einsum("bwmhgd,bnhd->bwhgmn", q.view(len(table), 2, 4, HKV, G, D), k) * SCALE
    s = s.masked_fill(~before(lengths, k.shape[1])[:, None, None, None], -INF)
    return torch.einsum("bwhgmn,bnhd->bwmhgd", s.softmax(-1), v).reshape(q.shape)


def beams(d: Draw) -> tuple[Tensor, ...]:
    """q [B, 4, H, D], caches [B, 4, Hkv, N, D]: which beam each position was written by, [B, 4, N]; lengths."""
    n = d.n(48)
    origin = torch.randint(0, 4, (B, 4, n), generator=d.generator).to(d.device)
    return d(B, 4, H, D), d(B, 4, HKV, n, D), d(B, 4, HKV, n, D), origin, d.lengths()


@CASES.fuse(beams, note="FasterTransformer: cache indirection, by gather")
def beams_gathered(q: Tensor, k_cache: Tensor, v_cache: Tensor, origin: Tensor, lengths: Tensor) -> Tensor:
    at = origin[:, :, None, :, None].expand(-1, -1, HKV, -1, D)
    k, v = (x.gather(1, at) for x in (k_cache, v_cache))
    s = torch.einsum("bwhgd,bwhnd->bwhgn", q.view(B, 4, HKV, G, D), k) * SCALE
    s = s.masked_fill(~before(lengths, k.shape[3])[:, None, None], -INF)
    return torch.einsum("bwhgn,bwhnd->bwhgd", s.softmax(-1), v).reshape(q.shape)


@CASES.fuse(beams, note="TensorRT-LLM: the same by three index tensors")
def beams_indexed(q: Tensor, k_cache: Tensor, v_cache: Tensor, origin: Tensor, lengths: Tensor) -> Tensor:
    n = torch.arange(k_cache.shape[3], device=q.device)
    row = torch.arange(len(q), device=q.device)[:, None, None]
    k, v = (x[row, origin, :, n].repeat_interleave(G, 3) for x in (k_cache, v_cache))
    s = torch.einsum("bwhd,bwnhd->bwhn", q, k).float() * SCALE
    s = s.masked_fill(~before(lengths, len(n))[:, None], -INF)
    return torch.einsum("bwhn,bwnhd->bwhd", s.softmax(-1).to(q.dtype), v)


# ----------------------------------------------------------------------------------------------------------------
# Sparse pages


def chosen_pages(d: Draw) -> tuple[Tensor, ...]:
    """Logical pages that each sequence reads, [B, 3], or each of its key heads, [B, Hkv, 3]."""
    return *paged(d), d.ints([[5, 0, 2], [1, 0, 4], [0, 1, 2]], torch.int64)


@CASES.fuse(chosen_pages, note="Quest: the chosen pages of each sequence, positions with them")
def pages_chosen(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, chosen: Tensor) -> Tensor:
    pages = table.long().gather(1, chosen)
    k, v = (x[pages].flatten(1, 2) for x in (k_pool, v_pool))
    position = (chosen[..., None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(1)
    return attend(q, k, v, (position < lengths[:, None])[:, None])


@CASES.fuse(lambda d: (*chosen_pages(d)[:5], d.ints([[[5, 0, 2], [0, 1, 3]], [[1, 0, 4], [0, 1, 5]], [[0, 1, 2]] * 2])))
def pages_chosen_by_head(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, chosen: Tensor
) -> Tensor:
    pages = torch.take_along_dim(table[:, None], chosen.long(), 2).long()
    head = torch.arange(HKV, device=q.device)[None, :, None]
    k, v = (x[pages, :, head].flatten(2, 3) for x in (k_pool, v_pool))
    position = (chosen[..., None] * PAGE + torch.arange(PAGE, device=q.device)).flatten(2)
    s = torch.einsum("bhgd,bhnd->bhgn", q.view(len(q), HKV, G, D), k) * SCALE
    s = s.masked_fill((position >= lengths[:, None, None])[:, :, None], -INF)
    return torch.einsum("bhgn,bhnd->bhgd", s.softmax(-1), v).reshape(q.shape)


@CASES.fuse(lambda d: (d(B, H, 1, D), d(B, HKV, 48, D), d(B, HKV, 48, D), d(B, HKV, 48).argsort(-1)[..., :12]))
def tokens_chosen_by_head(q: Tensor, k_cache: Tensor, v_cache: Tensor, chosen: Tensor) -> Tensor:
    """Heavy hitters: the tokens of each head by gather"""
    k, v = (x.gather(2, chosen[..., None].expand(-1, -1, -1, D)) for x in (k_cache, v_cache))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
