"""Decode over a paged cache beside keys that all requests share, by trees of drafts, and with other softmaxes.

Words and sizes as in `paged`.
"""

from __future__ import annotations

from typing import Any

import torch
from corpus.paged import HKV, PAGE, POOL, B, D, Draw, H, paged
from corpus.table import INF, Table
from torch import Tensor

CASES = Table(draw=Draw)
G = H // HKV
SCALE = D**-0.5


def fetched(pool: Tensor, table: Tensor) -> Tensor:
    """[B, N, H, D]"""
    return pool[table].flatten(1, 2).repeat_interleave(G, 2)


def late(table: Tensor, lengths: Tensor) -> Tensor:
    """[B, 1, 1, N]: places behind the length."""
    return (torch.arange(table.shape[1] * PAGE, device=table.device) >= lengths[:, None])[:, None, None]


def scored(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, M, N]"""
    return torch.einsum("bmhd,bnhd->bhmn", q, k) * SCALE


def weighed(p: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhmn,bnhd->bmhd", p, v)


# ----------------------------------------------------------------------------------------------------------------
# A prefix that all requests share


def with_prefix(d: Any) -> tuple[Tensor, ...]:
    return (*paged(d), d(d.n(9), HKV, D), d(d.n(9), HKV, D))


def grouped(q: Tensor) -> Tensor:
    return q.unflatten(2, (HKV, G)) * SCALE


@CASES.fuse(with_prefix, count=2, note="FlashInfer's cascade: parts merged by a sigmoid of their log-sum-exps")
def merged_by_a_sigmoid(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    def part(s: Tensor, v: Tensor, product: str) -> tuple[Tensor, Tensor]:
        lse = torch.logsumexp(s, -1)
        return torch.einsum(product, (s - lse[..., None]).exp(), v), lse

    common, l1 = part(torch.einsum("bmhgd,nhd->bhgmn", grouped(q), keys), values, "bhgmn,nhd->bhgmd")
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    s = torch.einsum("bmhgd,bnhd->bhgmn", grouped(q), k).masked_fill(late(table, lengths)[:, None], -INF)
    own, l2 = part(s, v, "bhgmn,bnhd->bhgmd")
    w = torch.sigmoid(l1 - l2)[..., None]
    return (w * common + (1 - w) * own).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(with_prefix, count=2)
def merged_above_the_larger(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    s = torch.einsum("bmhgd,nhd->bhgmn", grouped(q), keys)
    common, l1 = torch.einsum("bhgmn,nhd->bhgmd", s.softmax(-1), values), s.logsumexp(-1, keepdim=True)
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    s = torch.einsum("bmhgd,bnhd->bhgmn", grouped(q), k).masked_fill(late(table, lengths)[:, None], -INF)
    own, l2 = torch.einsum("bhgmn,bnhd->bhgmd", s.softmax(-1), v), s.logsumexp(-1, keepdim=True)
    top = torch.maximum(l1, l2)
    a, b = (l1 - top).exp(), (l2 - top).exp()
    return ((a * common + b * own) / (a + b)).permute(0, 3, 1, 2, 4).flatten(2, 3)


@CASES.fuse(lambda d: (*paged(d), d(d.n(9), H, D), d(d.n(9), H, D)))
def one_softmax_over_prefix_and_pages(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    s = scored(q, fetched(k_pool, table)).masked_fill(late(table, lengths), -INF)
    p = torch.cat([torch.einsum("bmhd,nhd->bhmn", q, keys) * SCALE, s], -1).softmax(-1)
    common = torch.einsum("bhmn,nhd->bmhd", p[..., : len(keys)], values)
    return common + weighed(p[..., len(keys) :], fetched(v_pool, table))


# ----------------------------------------------------------------------------------------------------------------
# Drafts


def tree(d: Any) -> tuple[Tensor, ...]:
    keep = (d(B, 3, 3) > 0) | torch.eye(3, dtype=torch.bool, device=d.device)
    return (*paged(d, M=3), keep)


@CASES.fuse(tree, note="Medusa: the last three tokens see each other by a mask [B, M, M]")
def tree_gathered(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, keep: Tensor
) -> Tensor:
    place = torch.arange(table.shape[1] * PAGE, device=q.device) - (lengths[:, None] - 3)
    inside = torch.gather(keep, 2, place.clamp(0, 2)[:, None].expand(-1, 3, -1))
    seen = (place < 0)[:, None] | (((place >= 0) & (place < 3))[:, None] & inside)
    s = scored(q, fetched(k_pool, table)).masked_fill(~seen[:, None], -INF)
    return weighed(s.softmax(-1), fetched(v_pool, table))


# ----------------------------------------------------------------------------------------------------------------
# Other words for the softmax


@CASES.fuse(paged)
def shifted_and_guarded(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    lengths = torch.where(torch.arange(B, device=q.device) == 1, 0, lengths)  # the second request is empty: it gives 0
    s = scored(q, fetched(k_pool, table)).masked_fill(late(table, lengths), -INF)
    m = s.amax(-1, keepdim=True)
    e = torch.exp(s - torch.where(m == -INF, torch.zeros_like(m), m))
    total = e.sum(-1, keepdim=True)
    return weighed(e / torch.where(total == 0, torch.ones_like(total), total), fetched(v_pool, table))


@CASES.fuse(paged, grad=(), note="softmax off by one, as it is copied: the one is not shifted")
def one_beside_the_largest(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    s = scored(q, fetched(k_pool, table)).masked_fill(late(table, lengths), -INF)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return weighed(e / (e.sum(-1, keepdim=True) + 1), fetched(v_pool, table))


@CASES.fuse(lambda d: (*paged(d), d(H)), note="a sink as a gate of the output")
def gated_by_the_logsumexp(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, sinks: Tensor
) -> Tensor:
    s = scored(q, fetched(k_pool, table)).masked_fill(late(table, lengths), -INF)
    gate = torch.sigmoid(s.logsumexp(-1) - sinks[:, None]).transpose(1, 2)[..., None]
    return weighed(s.softmax(-1), fetched(v_pool, table)) * gate


@CASES.fuse(lambda d: (*paged(d), d(B, 1, H, D)), count=2)
def difference_of_two(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, other: Tensor
) -> Tensor:
    k = fetched(k_pool, table)
    a, b = (scored(x, k).masked_fill(late(table, lengths), -INF).softmax(-1) for x in (q, other))
    return weighed(a - 0.3 * b, fetched(v_pool, table))


def in_pieces(d: Any) -> tuple[Tensor, ...]:
    q, *_, table, lengths = paged(d)
    return q, d(d.n(POOL), HKV, D // 4, PAGE, 4), d(d.n(POOL), HKV, D, PAGE), table, lengths


@CASES.fuse(in_pieces, note="vLLM's first layout of keys: some elements of the head beside each other")
def keys_in_pieces_of_the_head(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    k = k_pool[table].permute(0, 1, 4, 2, 3, 5).reshape(B, -1, HKV, D).repeat_interleave(G, 2)
    v = v_pool[table].permute(0, 1, 4, 2, 3).reshape(B, -1, HKV, D).repeat_interleave(G, 2)
    return weighed(scored(q, k).masked_fill(late(table, lengths), -INF).softmax(-1), v)


# ----------------------------------------------------------------------------------------------------------------
# Near misses


@CASES.decline(with_prefix, "the softmax runs over another axis")
def prefix_and_pages_normalised_apart(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    s = torch.einsum("bmhgd,nhd->bhgmn", grouped(q), keys)
    k, v = (x[table].flatten(1, 2) for x in (k_pool, v_pool))
    own = torch.einsum("bmhgd,bnhd->bhgmn", grouped(q), k).masked_fill(late(table, lengths)[:, None], -INF)
    p = torch.cat([s.softmax(-1), own.softmax(-1)], -1)
    v = torch.cat([values.expand(B, -1, -1, -1), v], 1)
    return torch.einsum("bhgmn,bnhd->bmhgd", p, v).flatten(2, 3)
